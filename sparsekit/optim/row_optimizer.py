"""What all optimizers share: gradients to rows, states, and the call of the fused step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from .. import ops
from ..ops._checks import ROW_DTYPES, accumulate_dtype

Rows = tuple[torch.Tensor | None, torch.Tensor]


def check_range(name: str, argument: str, value: Any, least: float, below: float | None) -> None:
    """Raise ValueError unless ``least <= value``, and ``value < below`` if that is given."""
    if below is None:
        if not value >= least:
            raise ValueError(f"{name}: {argument} must be >= {least:g}, got {value}")
    elif not least <= value < below:
        raise ValueError(f"{name}: {argument} must be in [{least:g}, {below:g}), got {value}")


class RowOptimizer(torch.optim.Optimizer):
    """Base class. A subclass names its rule, states and settings; see `sparsekit.ops.update_rows_`.

    Parameters are float32, float64 or bfloat16 and contiguous; the states of bfloat16 ones are
    float32. A sparse gradient has rows (sparse_dim 1), repeated or not; a dense one touches all
    rows. ``state[parameter]`` has ``step``, an int64 tensor, and the states by name, each in the
    shape of the parameter.

    Raises:
        TypeError: (in step) a parameter of another dtype.
        ValueError: (in step) a parameter that is not contiguous, or a sparse gradient of single
            elements rather than rows (sparse_dim > 1).
        RuntimeError: (in backward) a second update of one layer since the last step, where updates
            are made in backward.
    """

    rule: ClassVar[str]
    row_wise: ClassVar[bool] = False  # whether a state has one number for a row

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults |= {"stochastic_rounding": stochastic_rounding, "seed": seed}
        self._updated: set[torch.Tensor] = set()  # in backward, since the last step
        super().__init__(params, defaults)

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        """Name and initial value of each state, in the rule's order."""
        raise NotImplementedError

    def _settings(self, group: dict[str, Any]) -> list[float]:
        """The rule's settings, in its order."""
        raise NotImplementedError

    def _per_row(self, group: dict[str, Any]) -> bool:
        """Whether each row counts its own steps."""
        return False

    def _has_row_step(self, group: dict[str, Any]) -> bool:
        """Whether there is a step for each row."""
        return self._per_row(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All are looked at before any is changed.
        steps = [
            (parameter, group, *self._gradient(parameter))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for step in steps:
            self._update(*step)
        self._updated.clear()
        return loss

    @torch.no_grad()
    def update_in_backward(
        self, parameter: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor
    ) -> None:
        """The step of one parameter, for `fuse_in_backward`: distinct rows and their gradients."""
        if parameter in self._updated:
            raise RuntimeError(
                f"{type(self).__name__}: two updates of one parameter of shape "
                f"{tuple(parameter.shape)} without step() between them. With fuse_in_backward "
                f"every backward is an update: call step() after it, and do not look a layer up "
                f"twice in one backward or accumulate gradients"
            )
        self._check(parameter)
        (group,) = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
        self._update(parameter, group, rows, grad)
        self._updated.add(parameter)

    def _check(self, parameter: torch.Tensor) -> None:
        name = type(self).__name__
        if parameter.dtype not in ROW_DTYPES:
            raise TypeError(
                f"{name}: parameters must be float32, float64 or bfloat16, got {parameter.dtype} "
                f"for one of shape {tuple(parameter.shape)}"
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"{name}: parameters must be contiguous, got one of shape "
                f"{tuple(parameter.shape)} and strides {parameter.stride()}"
            )

    def _gradient(self, parameter: torch.Tensor) -> Rows:
        """Rows, or None for all, and their gradients."""
        self._check(parameter)
        grad = parameter.grad
        assert grad is not None
        if parameter in self._updated:
            raise ValueError(
                f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} was updated "
                f"in backward and has a gradient besides; fuse_in_backward is for parameters that "
                f"are used by their layer only"
            )
        if not grad.is_sparse:
            return None, grad
        if grad.sparse_dim() != 1:
            raise ValueError(
                f"{type(self).__name__}: a sparse gradient must be one of rows (sparse_dim 1), got "
                f"sparse_dim {grad.sparse_dim()} for a parameter of shape {tuple(parameter.shape)}"
            )
        rows, values = grad._indices()[0], grad._values()
        if grad.is_coalesced():
            return rows, values
        distinct, inverse, _ = ops.unique(rows)
        flat = values.reshape(len(rows), parameter[0].numel() if len(parameter) else 0)
        return distinct, ops.unsorted_segment_sum(flat, inverse, len(distinct))

    def _update(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        rows: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        state = self._state_of(parameter, group)
        step = state["step"] + 1
        weight = matrix(parameter.detach())
        ops.update_rows_(
            weight,
            self._state_matrices(parameter, group),
            state.get("row_step"),
            rows,
            grad.reshape(len(weight) if rows is None else len(rows), weight.shape[1]),
            step,
            self.rule,
            self._settings(group),
            per_row=self._per_row(group),
            rounding_seed=group["seed"] if group["stochastic_rounding"] else None,
        )
        state["step"].copy_(step)  # counted once it is done

    def _state_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=parameter.device)
            if self._has_row_step(group):
                state["row_step"] = _row_steps(parameter)
            state.update(self._new_states(parameter, group))
        return state

    def _new_states(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        dtype = accumulate_dtype(parameter.dtype)
        initial = self._initial_states(group)
        if self.row_wise:
            shape = parameter.shape[:1]
            return {
                name: parameter.new_full(shape, value, dtype=dtype)
                for name, value in initial.items()
            }
        # One allocation, in which the states of a row are neighbours: a row that is touched is one
        # place in memory and not several.
        rows, rest = parameter.shape[:1], parameter.shape[1:]
        space = parameter.new_zeros((*rows, len(initial), *rest), dtype=dtype)
        states = dict(zip(initial, space.unbind(len(rows)), strict=True))
        for name, value in initial.items():
            if value != 0:
                states[name].fill_(value)
        return states

    def _state_matrices(self, parameter: torch.Tensor, group: dict[str, Any]) -> list[torch.Tensor]:
        state = self.state[parameter]
        states = [state[name] for name in self._initial_states(group)]
        return [s.view(-1, 1) if self.row_wise else matrix(s) for s in states]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updated = set()
        for group in self.param_groups:  # of another version, or of torch's optimizer
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of torch's optimizer of that name or from another device.

        States of bfloat16 parameters stay float32.
        """
        super().load_state_dict(state_dict)
        # torch has cast the states to the parameters' dtype; go back to the saved ones where they
        # are kept in another. It leaves the step where and what it was: on the device it was saved
        # on, and a plain number or a float if torch's optimizer has counted it.
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        for group in self.param_groups:
            for parameter in group["params"]:
                values = state_dict["state"].get(next(saved), {})
                if values:
                    self.state[parameter] = self._loaded(parameter, group, values)

    def _loaded(
        self, parameter: torch.Tensor, group: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, Any]:
        step = torch.as_tensor(values["step"]).to(parameter.device, torch.int64, copy=True)
        state: dict[str, Any] = {"step": step}
        if self._has_row_step(group):
            # Without one all rows have made all steps, as far as anybody knows.
            steps = values.get("row_step", step)
            state["row_step"] = _row_steps(parameter).copy_(steps)
        for name, tensor in self._new_states(parameter, group).items():
            if name not in values:
                raise ValueError(
                    f"{type(self).__name__}: the state to load has no {name}, but "
                    f"{', '.join(values)}"
                )
            if values[name].shape != tensor.shape:
                raise ValueError(
                    f"{type(self).__name__}: {name} must have shape {tuple(tensor.shape)}, got "
                    f"{tuple(values[name].shape)}"
                )
            state[name] = tensor.copy_(values[name])
        return state


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any shape as a matrix of rows: a view, so that changes reach it."""
    # No size is left to view() as -1, since there may be no elements.
    num_rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.view(num_rows, tensor.numel() // max(num_rows, 1))


def _row_steps(parameter: torch.Tensor) -> torch.Tensor:
    num_rows = parameter.shape[0] if parameter.dim() else 1
    return torch.zeros(num_rows, dtype=torch.int32, device=parameter.device)
