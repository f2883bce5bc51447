"""Optimizers that also move rows without a gradient, but spend time only on touched rows.

A row's movement in a step without a gradient depends only on the row and on two numbers of that
step. It can therefore be postponed until a lookup, a gradient or a save reads the row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import ops
from ..distributed.dtensor import local
from ..tables.row_states import reach_of
from ..tables.weight import EmbeddingWeight
from ..tables.written_rows import Write
from .row_optimizer import RowOptimizer, Rows
from .update_call import Update, matrix

# Maximum number of missed steps to keep; when there are that many, all rows catch up.
_MOST = 65536


class _Missed:
    """Two numbers for each step that some rows of a parameter have missed."""

    def __init__(self, first_step: int, device: torch.device) -> None:
        self.first_step = first_step
        # Number of missed steps. None during a step, and while steps are being dropped: if either
        # is interrupted, the number is recomputed from the parameter's step, which is updated
        # together with the rows.
        self.count: int | None = 0
        # Settings of the missed steps, except the learning rate, and names of the states.
        self.settings: list[float] = []
        self.states: list[str] = []
        self._numbers = torch.empty(64, 2, dtype=torch.float64, device=device)

    @property
    def numbers(self) -> torch.Tensor:
        return self._numbers[: self.count]

    def write(self, numbers: tuple[float | torch.Tensor, float]) -> None:
        """Store the two numbers of the next step; the caller increments `count` later."""
        if self.count == len(self._numbers):
            self._numbers = torch.cat([self._numbers, torch.empty_like(self._numbers)])
        for place, number in zip(self._numbers[self.count], numbers, strict=True):
            place.fill_(number)  # an assignment would copy and wait for the device

    def drop(self, count: int) -> None:
        """Drop all `count` missed steps."""
        next_step = self.first_step + count
        self.count = None
        self.first_step = next_step
        self.count = 0


class CatchUpOptimizer(RowOptimizer):
    """Base of optimizers whose rows catch up later; a subclass gives two numbers for each step.

    While rows of an embedding layer's weight are late, the weight keeps a reference to the
    optimizer. Layers let rows catch up before a lookup reads them, and let all rows catch up before
    they are saved, loaded, copied or moved. Code that reads or writes ``weight`` other than through
    its layer (a penalty, torch.nn.init, model averaging) must call `catch_up` first. If a sweep is
    interrupted, rows of a parameter outside embedding layers may be late until the next step or
    `catch_up`. On CUDA, lookups in evaluation on several streams at the same time are not
    supported.

    Raises:
        ValueError: (in step) a parameter outside embedding layers has a sparse gradient; code that
            reads the parameter would see late rows.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._missed: dict[torch.Tensor, _Missed] = {}
        # Held while rows catch up: in evaluation, several threads may run lookups at once, and each
        # may find rows that have missed steps.
        self._lock = threading.RLock()
        super().__init__(params, defaults)

    def _moves_all(self, group: dict[str, Any]) -> bool:
        """Return whether rows in the group move even without a gradient."""
        raise NotImplementedError

    def _sweeps(self, group: dict[str, Any]) -> bool:
        """Return whether rows without a gradient move in every step, rather than catch up later."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], step: int) -> tuple[float | torch.Tensor, float]:
        """Return the two numbers that `catch_up_rows_` needs for a step.

        The first number depends on the learning rate; it is a tensor if that rate is a tensor.
        """
        raise NotImplementedError

    @torch.no_grad()
    def catch_up(self, parameter: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Apply the steps that the given rows, or all rows, of a parameter have missed.

        Args:
            parameter: a parameter of this optimizer.
            rows: int64 ``[n]``, distinct; negative rows are ignored. None means all rows.
        """
        with self._lock:
            missed, count = self._counted(parameter)
            if missed is None:
                return
            if count:
                state = self.state[parameter]
                weight = matrix(local(parameter))
                states = [matrix(state[name]) for name in missed.states]
                row_step, reach = state["row_step"], reach_of(parameter)
                if reach is not None:
                    weight, row_step = weight[:reach], row_step[:reach]
                    states = [of_rows[:reach] for of_rows in states]
                write = Write([parameter])
                ops.catch_up_rows_(
                    weight,
                    states,
                    row_step,
                    rows,
                    missed.numbers,
                    missed.first_step,
                    self.rule,
                    [0.0, *missed.settings],  # 0.0 is unused: `numbers` has the learning rates
                )
                write.done([rows])
            if rows is None:
                missed.drop(count)
                if (
                    isinstance(parameter, EmbeddingWeight)
                    and parameter.before_read == self.catch_up
                ):
                    parameter.before_read = None

    def _counted(self, parameter: torch.Tensor) -> tuple[_Missed | None, int]:
        missed = self._missed.get(parameter)
        if missed is None:
            return None, 0
        if missed.count is None:
            missed.count = int(self.state[parameter]["step"]) + 1 - missed.first_step
        return missed, missed.count

    def _gradient(self, parameter: torch.Tensor, group: dict[str, Any]) -> Rows:
        rows, grad = super()._gradient(parameter, group)
        lags = rows is not None and self._moves_all(group) and not self._sweeps(group)
        if lags and not isinstance(parameter, EmbeddingWeight):
            raise ValueError(
                f"{type(self).__name__}: mode='catch_up' with sparse gradients is for the weights "
                f"of embedding layers, which bring rows up to date before they read them; this "
                f"parameter of shape {tuple(parameter.shape)} is another's; use another mode"
            )
        return rows, grad

    def _update(self, group: dict[str, Any], updates: Sequence[Update]) -> None:
        with self._lock:
            moves_all, settings = self._moves_all(group), self._settings(group)
            for parameter, _, _ in updates:
                missed, count = self._counted(parameter)
                if missed is not None and count:
                    changed = missed.settings != settings
                    if not moves_all or changed or count == _MOST:
                        self.catch_up(parameter)  # with the missed steps' settings, not new ones
            if not moves_all:
                for parameter, _, _ in updates:
                    self._missed.pop(parameter, None)
                super()._update(group, updates)
                return
            begun = [self._begin(group, settings, update) for update in updates]
            super()._update(group, updates)
            for (of_update, count), (parameter, rows, _) in zip(begun, updates, strict=True):
                of_update.count = count + 1
                if self._sweeps(group) or rows is None:
                    self.catch_up(parameter)

    def _may_sum(self, group: dict[str, Any], weights: Sequence[torch.Tensor]) -> bool:
        # The rows must be known before the update, so that late rows can catch up first.
        late = self._missed and not self._missed.keys().isdisjoint(weights)
        return super()._may_sum(group, weights) and not self._moves_all(group) and not late

    def _begin(
        self, group: dict[str, Any], settings: list[float], update: Update
    ) -> tuple[_Missed, int]:
        """Let rows catch up, and record the next step; return the missed steps, and their count.

        The step is recorded before its update, since the update makes all other rows late.
        """
        parameter, rows, _ = update
        missed = self._missed.get(parameter)
        if missed is None:
            state = self.state[parameter]
            self._add_states(parameter, group, state)
            # This is the only wait for the device; from now on, host and device each count steps.
            missed = _Missed(int(state["step"]) + 1, parameter.device)
            self._missed[parameter] = missed
        missed.settings, missed.states = settings, list(self._initial_states(group))
        self.catch_up(parameter, rows)
        count = self._counted(parameter)[1]
        missed.write(self._numbers(group, missed.first_step + count))
        if isinstance(parameter, EmbeddingWeight):
            parameter.before_read = self.catch_up
        missed.count = None
        return missed, count

    def _has_row_step(self, group: dict[str, Any]) -> bool:
        return self._moves_all(group)

    def _catch_up_all(self) -> None:
        for parameter in self._missed:
            self.catch_up(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Let all rows catch up, and return the state as torch.optim.Optimizer does."""
        self._catch_up_all()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._catch_up_all()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_missed": {}, "_lock": threading.RLock(), **state})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let all rows catch up, and load a state as `RowOptimizer` does."""
        self._catch_up_all()
        super().load_state_dict(state_dict)
