"""Converts saved optimizer states for a parameter, even from a table with another capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol

import torch

from .. import ops
from ..distributed.dtensor import local
from ..tables.row_states import reach_of, with_rows
from ..tables.weight import EmbeddingWeight

# Number of rows to compare at a time.
_ROWS = 1 << 18
# Settings of torch's optimizers that change the result of a step.
_OTHER_SETTINGS = ("weight_decay", "amsgrad", "centered", "dampening", "nesterov")


class StatesOfRows(Protocol):
    """The members of `RowOptimizer` that determine the states of a parameter."""

    rule: ClassVar[str]
    defaults: dict[str, Any]
    param_groups: list[dict[str, Any]]

    def _check_settings(self, group: dict[str, Any]) -> None: ...

    def _new_states(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]: ...

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]: ...

    def _per_row(self, group: dict[str, Any]) -> bool: ...


def keep_kind(lr: Any, loaded: Any) -> Any:
    """Return the loaded learning rate, as a tensor if the current one, `lr`, is a tensor.

    `lr` is filled in place: a CUDA graph may read it, and the loaded rate may be on another device.
    """
    number = float(loaded)
    return lr.fill_(number) if isinstance(lr, torch.Tensor) else number


def with_keys(state: Mapping[str, Any], weight: EmbeddingWeight) -> Mapping[str, Any]:
    """Return a weight's state with its rows' keys added, and rows without a key left out."""
    if "keys" in state:
        return with_rows(state, weight)
    keys = weight.keys()
    return state if keys is None else {**with_rows(state, weight, len(keys)), "keys": keys}


def untouched(
    optimizer: StatesOfRows, parameter: torch.Tensor, group: dict[str, Any], step: int
) -> dict[str, torch.Tensor]:
    """Return a parameter's states after `step` steps that did not touch any row."""
    states = optimizer._new_states(parameter, group)
    if "row_step" in states and not optimizer._per_row(group):
        # Treat rows as having taken all steps.
        states["row_step"][: reach_of(parameter)].fill_(step)
    return states


def loaded_states(
    optimizer: StatesOfRows, state_dict: dict[str, Any]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Convert saved states for an optimizer's `load_state_dict`, without changing the optimizer.

    Raises:
        ValueError: the states do not fit the parameters.
    """
    own_name = type(optimizer).__name__
    loaded: dict[torch.Tensor, dict[str, Any]] = {}
    # Groups are not checked here, since torch itself raises if they do not match.
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=False):
        settings = {**optimizer.defaults, **saved}
        for name in _OTHER_SETTINGS:
            if saved.get(name) and name not in optimizer.defaults:
                raise ValueError(
                    f"{own_name}: the state to load has {name}={saved[name]}, which "
                    f"there is not here"
                )
        coupled = saved.get("weight_decay") and saved.get("decoupled_weight_decay") is False
        if coupled and "decoupled_weight_decay" not in optimizer.defaults:
            raise ValueError(
                f"{own_name}: the state to load has a weight_decay of "
                f"{saved['weight_decay']} that is part of the gradient; here it is decoupled"
            )
        optimizer._check_settings(settings)
        for index, parameter in zip(saved["params"], group["params"], strict=False):
            values = state_dict["state"].get(index)
            if values:
                try:
                    loaded[parameter] = loaded_state(optimizer, parameter, settings, values)
                except ValueError as error:
                    of = f"parameter {index} of shape {tuple(parameter.shape)}"
                    raise ValueError(f"{error}, for {of}") from None
    return loaded


def loaded_state(
    optimizer: StatesOfRows,
    parameter: torch.Tensor,
    group: dict[str, Any],
    values: Mapping[str, Any],
) -> dict[str, torch.Tensor | None]:
    """Return a copy of a saved state, in the shapes that a parameter needs.

    Raises:
        ValueError: the state does not fit the parameter.
    """
    name = type(optimizer).__name__
    # torch's SGD does not count steps. It has no bias correction, so any count will do.
    if "step" not in values and optimizer.rule != "sgd":
        raise ValueError(f"{name}: the state to load has no step, but {', '.join(values)}")
    count = int(values.get("step", 1))
    if isinstance(parameter, EmbeddingWeight) and parameter.reach is not None:
        values = _of_rows_with_keys(values)
        names = [*optimizer._initial_states(group), "row_step"]
        parameter.reserve(_single_length(names, values) or 0)
    states = untouched(optimizer, parameter, group, count)
    rows = _rows_saved(parameter, states, values)
    if "row_step" in states:
        # If row_step was not saved, assume that all rows have taken all steps.
        known = values.get("row_step", torch.full((rows,), count))
        values = {**values, "row_step": known}
    initial = optimizer._initial_states(group) | {"row_step": 0}
    for own, tensor in states.items():
        if own not in values:
            raise ValueError(f"{name}: the state to load has no {own}, but {', '.join(values)}")
        saved = values[own]
        if saved is None:  # torch's SGD saves None before the first step
            continue
        same = rows == _rows(tensor)
        expected = tensor.shape if same else (rows, *tensor.shape[1:])
        if saved.shape != expected:
            raise ValueError(_shape(name, own, saved, tensor))
        if own == "row_step":
            if saved.numel() and (saved.min() < 0 or saved.max() > count):
                raise ValueError(
                    f"{name}: row_step must be in [0, {count}], the step, got numbers from "
                    f"{int(saved.min())} to {int(saved.max())}"
                )
            if not optimizer._per_row(group):
                # Rows without a key have taken all steps too, so row_step does not show which rows
                # are in use.
                tensor[:rows].copy_(saved[: len(tensor)])
                continue
        if same:
            tensor.copy_(saved)
            continue
        if reach_of(parameter) is None or "keys" not in values:
            _check_rows_beyond(name, own, saved, tensor, parameter, initial[own])
        tensor[:rows].copy_(saved[: len(tensor)])
    step = torch.tensor(count, dtype=torch.int64, device=parameter.device)
    return {"step": step, **states, **_of_keys(name, values.get("keys"), parameter)}


def _of_keys(name: str, saved: Any, weight: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Return the saved ``keys`` in a dict; an empty dict if rows are known to be in table order."""
    now = weight.keys() if isinstance(weight, EmbeddingWeight) else None
    if now is None:
        return {}
    if not isinstance(saved, torch.Tensor) or saved.dtype != torch.int64 or saved.dim() != 1:
        return {"keys": None}  # a state from torch has no keys
    if len(ops.unique(saved)[0]) < len(saved):
        raise ValueError(f"{name}: the state to load is damaged: keys has one of them twice")
    keys = saved[: len(weight)].to(now.device, copy=True)
    return {} if torch.equal(keys, now[: len(keys)]) else {"keys": keys}


def _rows(tensor: torch.Tensor) -> int:
    return len(tensor) if tensor.dim() else 1


def _rows_saved(parameter: torch.Tensor, states: Iterable[str], values: Mapping[str, Any]) -> int:
    """Return the number of rows in a saved state.

    If the saved tensors have different numbers of rows, or the parameter cannot load a different
    number of rows, return the parameter's number of rows.
    """
    saved = _single_length(states, values) if isinstance(parameter, EmbeddingWeight) else None
    return _rows(local(parameter)) if saved is None else saved


def _single_length(states: Iterable[str], values: Mapping[str, Any]) -> int | None:
    """Return the saved tensors' number of rows; None if there are none or the numbers differ."""
    tensors = [values[name] for name in states if isinstance(values.get(name), torch.Tensor)]
    lengths = {len(tensor) for tensor in tensors if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else None


def _of_rows_with_keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state reduced to rows with keys; the other rows will start like new rows."""
    keys = values.get("keys")
    if not isinstance(keys, torch.Tensor) or keys.dim() != 1:
        return values
    return {
        name: value[: len(keys)] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in values.items()
    }


def _check_rows_beyond(
    name: str,
    own: str,
    saved: torch.Tensor,
    tensor: torch.Tensor,
    weight: torch.Tensor,
    initial: float,
) -> None:
    """Raise ValueError if the state or the parameter uses rows that the other one lacks.

    A saved row is in use if its states differ from initial states, since only rows in use have a
    gradient. A row of the parameter is in use if its vector is not zero, since free rows of a table
    with keys are zeros. It therefore does not matter whether keys are loaded before states.
    """
    rows, capacity = len(saved), len(tensor)
    if not weight.is_meta and bool(weight.detach()[rows : reach_of(weight)].any()):
        raise ValueError(
            f"{_shape(name, own, saved, tensor)}: a state of {rows} rows, and there are vectors in "
            f"rows beyond; of a table of another capacity load the module's state first, and "
            f"without a hash table keep the capacity"
        )
    for begin in range(capacity, rows, _ROWS):
        part = saved[begin : begin + _ROWS]
        fresh = torch.full((), initial, dtype=part.dtype, device=part.device)
        touched = (part != fresh).nonzero()
        if len(touched):
            row = begin + int(touched[0, 0])
            raise ValueError(
                f"{_shape(name, own, saved, tensor)}: row {row} of the saved table has been "
                f"trained, and there is room for {capacity} rows; give the layer a larger capacity "
                f"(max_vocabulary_size_per_gpu, or num_embeddings)"
            )


def _shape(name: str, own: str, saved: torch.Tensor, like: torch.Tensor) -> str:
    return f"{name}: {own} must have shape {tuple(like.shape)}, got {tuple(saved.shape)}"
