"""Groups parameters into calls of `sparsekit.ops.update_rows_`."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import ops
from .._overrides import without_overrides
from .._pybind import each_is
from ..memory import untouched_zeros
from ..ops._checks import ROW_DTYPES, accumulate_dtype
from ..row_files import Column
from ..tables.row_states import files_of, reach_of

State = dict[str, torch.Tensor]

# A parameter, the rows that have a gradient (None for all), and the gradients of these rows.
Update = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


@dataclass(slots=True)
class UpdateCall:
    """Parameters that one call updates together, and their states."""

    positions: Sequence[int]  # positions of these parameters in `by_kind`'s argument
    weights: Sequence[torch.Tensor]  # the parameters as matrices
    states: list[torch.Tensor]
    row_steps: list[torch.Tensor]
    steps: list[torch.Tensor]


def by_kind(
    parameters: Sequence[torch.Tensor],
    dense: Sequence[bool],
    states: Sequence[State],
    names: Sequence[str],
    row_states: Collection[str],
) -> list[UpdateCall]:
    """Group parameters into sets that one call can update.

    Args:
        parameters: the parameters to update.
        dense: for each parameter, whether it has a gradient for all rows.
        states: states of each parameter.
        names: names of the rule's states, in the order that the rule defines.
        row_states: names of the states with one number per row.
    """
    if len(parameters) == 1:
        return [_call(range(1), parameters, states, names, row_states)]
    each = zip(parameters, dense, states, strict=True)
    kinds = [(p.dtype, p.device, d, "row_step" in state) for p, d, state in each]
    if len(set(kinds)) == 1:
        return [_call(range(len(kinds)), parameters, states, names, row_states)]
    alike: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        alike.setdefault(kind, []).append(i)
    return [
        _call(own, [parameters[i] for i in own], [states[i] for i in own], names, row_states)
        for own in alike.values()
    ]


def _call(
    positions: Sequence[int],
    parameters: Sequence[torch.Tensor],
    states: Sequence[State],
    names: Sequence[str],
    row_states: Collection[str],
) -> UpdateCall:
    tensors = [state[name] for state in states for name in names]
    weights = parameters
    if any(parameter.dim() != 2 for parameter in parameters):
        weights = [matrix(parameter) for parameter in parameters]
        tensors = [
            state[name].view(-1) if name in row_states else matrix(state[name])
            for state in states
            for name in names
        ]
    row_steps = [state["row_step"] for state in states if "row_step" in state]
    return UpdateCall(positions, weights, tensors, row_steps, [state["step"] for state in states])


def with_gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters that have a gradient."""
    # Return early in a common case: backward has updated all tables, so none has a gradient.
    if len(parameters) > 1 and without_overrides(each_is, parameters, "grad", None):
        return []
    return [parameter for parameter in parameters if parameter.grad is not None]


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise TypeError or ValueError if an optimizer cannot update the parameter."""
    if parameter.dtype not in ROW_DTYPES:
        raise TypeError(
            f"{name}: parameters must be float32, float64 or bfloat16, got {parameter.dtype} for "
            f"one of shape {tuple(parameter.shape)}"
        )
    if not (parameter.is_contiguous() or files_of(parameter) is not None):
        raise ValueError(
            f"{name}: parameters must be contiguous, got one of shape {tuple(parameter.shape)} and "
            f"strides {parameter.stride()}"
        )


def new_states(
    parameter: torch.Tensor,
    initial: Mapping[str, float],
    row_states: Collection[str],
    row_step: bool,
) -> State:
    """Return new states for a parameter, as they are before its first step.

    Args:
        parameter: the parameter.
        initial: initial value of each state, in the order of the rule's states.
        row_states: names of the states with one number per row.
        row_step: whether to add a step count for each row.
    """
    dtype = accumulate_dtype(parameter.dtype)
    rows, rest = parameter.shape[:1], parameter.shape[1:]
    reach = reach_of(parameter)
    where = parameter.device, reach
    if (files := files_of(parameter)) is not None:
        states = files.states(parameter, _columns_of(parameter, initial, row_states))
    else:
        states = {name: untouched_zeros(rows, dtype, *where) for name in row_states}
    # Store the states of each row contiguously, in a single allocation, so that updating a row
    # accesses one place in memory instead of several.
    if names := [name for name in initial if name not in states]:
        space = untouched_zeros((*rows, len(names), *rest), dtype, *where)
        states |= zip(names, space.unbind(len(rows)), strict=True)
    for name, value in initial.items():
        if value != 0:
            (states[name] if reach is None else states[name][:reach]).fill_(value)
    if row_step:
        states["row_step"] = untouched_zeros(rows or (1,), torch.int32, *where)
    return states


def prepare_states(
    parameter: torch.Tensor, names: Collection[str], row_states: Collection[str]
) -> None:
    """Make room for states next to a parameter's rows, if the rows are in a file.

    Args:
        parameter: the parameter.
        names: names of the states; see `new_states`.
        row_states: as in `new_states`.

    Raises:
        OSError: the disk has no space for the states.
    """
    if (files := files_of(parameter)) is not None and not parameter.is_meta:
        files.prepare(parameter, _columns_of(parameter, names, row_states))


def _columns_of(
    parameter: torch.Tensor, names: Collection[str], row_states: Collection[str]
) -> dict[str, Column]:
    """Return, by name, each state's row shape and dtype."""
    dtype = accumulate_dtype(parameter.dtype)
    return {name: (() if name in row_states else parameter.shape[1:], dtype) for name in names}


def rows_of(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct rows of a sparse gradient, and the summed gradient of each row."""
    rows, values = grad._indices()[0], grad._values()
    if grad.is_coalesced():
        return rows, values
    distinct, inverse, _ = ops.unique(rows)
    flat = values.reshape(len(rows), math.prod(grad.shape[1:]))
    return distinct, ops.unsorted_segment_sum(flat, inverse, len(distinct))


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of any shape as a matrix of rows; writes to the view change the tensor."""
    if tensor.dim() == 2:
        return tensor
    # Pass all sizes to view(), which cannot infer a size of -1 if there are no elements.
    num_rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.view(num_rows, tensor.numel() // max(num_rows, 1))


def as_rows(weight: torch.Tensor, rows: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
    """Reshape a parameter's gradient to match `weight`, the parameter's matrix view."""
    if grad.dim() == 2:  # true for every table, and faster than a reshape
        return grad
    return grad.reshape(len(weight if rows is None else rows), weight.shape[1])
