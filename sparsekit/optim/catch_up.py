"""Optimizers under which rows move in steps without a gradient too, at the cost of those touched.

What a row does in a step in which it has no gradient depends on the row and on the numbers of that
step only. So it may wait until somebody wants to see it: a lookup, a gradient, a saved state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from .. import ops
from ..nn.shard import EmbeddingWeight
from .row_optimizer import RowOptimizer, Rows, matrix

# Steps that are kept at most; then all rows catch up, once in so many steps.
_MOST = 65536


class _Missed:
    """The numbers of the steps that some rows of a parameter have not made yet."""

    def __init__(self, first_step: int, settings: list[float], device: torch.device) -> None:
        self.first_step = first_step
        self.settings = settings  # of those steps, but for rates
        self.count = 0
        self._numbers = torch.empty(64, 2, dtype=torch.float64, device=device)

    @property
    def numbers(self) -> torch.Tensor:
        return self._numbers[: self.count]

    def add(self, first: float, second: float) -> None:
        if self.count == len(self._numbers):
            self._numbers = torch.cat([self._numbers, torch.empty_like(self._numbers)])
        # Filled and not copied: on a device that needs no word from the host.
        self._numbers[self.count, 0] = first
        self._numbers[self.count, 1] = second
        self.count += 1


class CatchUpOptimizer(RowOptimizer):
    """Base class. A subclass says which groups it is for, and gives the two numbers of a step.

    Raises:
        ValueError: (in step) a sparse gradient of a parameter that is no embedding layer's: whoever
            reads that parameter could not be shown its rows as they ought to be.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self._missed: dict[torch.Tensor, _Missed] = {}
        # Lookups in evaluation may come from several threads, and each may find rows that are late.
        self._lock = threading.RLock()
        super().__init__(params, defaults, stochastic_rounding, seed)

    def _moves_all(self, group: dict[str, Any]) -> bool:
        """Whether rows move without a gradient."""
        raise NotImplementedError

    def _sweeps(self, group: dict[str, Any]) -> bool:
        """Whether they do so at once."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], step: int) -> tuple[float, float]:
        """What `catch_up_rows_` needs of a step."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        super().add_param_group(param_group)
        self._watch(self.param_groups[-1])

    def _watch(self, group: dict[str, Any]) -> None:
        if self._moves_all(group) and not self._sweeps(group):
            for parameter in group["params"]:
                if isinstance(parameter, EmbeddingWeight):
                    parameter.catch_up()  # under the optimizer that it may have had before
                    parameter.before_read = _BeforeRead(self, parameter)

    @torch.no_grad()
    def catch_up(self, parameter: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Bring rows, or all of them, to the step of their parameter.

        Layers do it by themselves for the rows they look up and before they are saved, copied or
        loaded. Call it before reading ``weight`` in any other way.

        Args:
            parameter: one of this optimizer's.
            rows: int64 ``[n]``, distinct, negative ones are left out; None means all rows.
        """
        with self._lock:
            missed = self._missed.get(parameter)
            if missed is None or missed.count == 0:
                return
            (group,) = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
            ops.catch_up_rows_(
                matrix(parameter.detach()),
                self._state_matrices(parameter, group),
                self.state[parameter]["row_step"],
                rows,
                missed.numbers,
                missed.first_step,
                self.rule,
                missed.settings,
            )
            if rows is None:
                missed.first_step += missed.count
                missed.count = 0

    def _gradient(self, parameter: torch.Tensor) -> Rows:
        rows, grad = super()._gradient(parameter)
        (group,) = (g for g in self.param_groups if any(p is parameter for p in g["params"]))
        lags = rows is not None and self._moves_all(group) and not self._sweeps(group)
        if lags and not isinstance(parameter, EmbeddingWeight):
            raise ValueError(
                f"{type(self).__name__}: mode='catch_up' with sparse gradients is for the weights "
                f"of embedding layers, which bring rows up to date before they read them; this "
                f"parameter of shape {tuple(parameter.shape)} is another's"
            )
        return rows, grad

    def _update(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        rows: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> None:
        if not self._moves_all(group):
            super()._update(parameter, group, rows, grad)
            return
        with self._lock:
            state = self._state_of(parameter, group)
            settings = self._settings(group)
            missed = self._missed.get(parameter)
            if missed is None:
                # The only wait for a device; from here on steps are counted on both sides.
                missed = _Missed(int(state["step"]) + 1, settings, parameter.device)
                self._missed[parameter] = missed
            if missed.settings[1:] != settings[1:] or missed.count == _MOST:
                self.catch_up(parameter)  # with the settings of those steps
            missed.settings = settings
            self.catch_up(parameter, rows)
            super()._update(parameter, group, rows, grad)
            missed.add(*self._numbers(group, missed.first_step + missed.count))
            if self._sweeps(group) or rows is None:
                self.catch_up(parameter)

    def _has_row_step(self, group: dict[str, Any]) -> bool:
        return self._moves_all(group)

    def _catch_up_all(self) -> None:
        for parameter in self._missed:
            self.catch_up(parameter)

    def state_dict(self) -> dict[str, Any]:
        """See torch.optim.Optimizer; all rows catch up before."""
        self._catch_up_all()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._catch_up_all()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._missed = {}
        self._lock = threading.RLock()
        for group in self.param_groups:
            self._watch(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `RowOptimizer`; rows catch up before their state is replaced."""
        self._catch_up_all()
        super().load_state_dict(state_dict)


class _BeforeRead:
    """What a layer calls before it reads rows; None for all."""

    def __init__(self, optimizer: CatchUpOptimizer, parameter: torch.Tensor) -> None:
        self.optimizer = optimizer
        self.parameter = parameter

    def __call__(self, rows: torch.Tensor | None) -> None:
        self.optimizer.catch_up(self.parameter, rows)
