"""Computes the mean loss of an epoch over all ranks, and finds the first non-finite loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DataFormatError, DivergedError


class Losses:
    """Accumulates the losses of an epoch.

    Args:
        device: device of the losses.
        group: process group of the ranks; None for a single rank.
        expected: number of steps in the epoch, for messages; 0 if unknown.
    """

    def __init__(
        self, device: torch.device, group: dist.ProcessGroup | None, expected: int
    ) -> None:
        self._group = group
        self._expected = expected
        # A sum over many millions of samples needs the precision of float64.
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        # Count on the device: reading a loss after each step would mean waiting for a GPU.
        self._finite_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._rows = 0
        # Values at the last call of `since_last`: total loss and number of samples on all ranks,
        # number of steps, and seconds.
        self._last: tuple[float, float, float, float] = 0.0, 0, 0, 0.0
        self.steps = 0

    def state(self, title: str) -> dict[str, Any]:
        """Return the sums over all ranks, to be loaded by `restore` on any number of ranks.

        Raises:
            DivergedError: the sums are not finite.
        """
        total, samples = self._over_ranks(title)
        return {"total": total, "samples": samples, "steps": self.steps, "last": list(self._last)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state; rank 0 continues from the sums of all ranks, the others from zero."""
        if self._group is None or dist.get_rank(self._group) == 0:
            self._total.fill_(state["total"])
            self._rows = state["samples"]
        self.steps = state["steps"]
        self._finite_steps.fill_(self.steps)
        total, samples, steps, seconds = state["last"]
        self._last = total, samples, steps, seconds

    def add(self, loss: torch.Tensor, rows: int) -> None:
        """Add a step, given the sum of this rank's losses over its ``rows`` samples."""
        self._total.add_(loss)
        self._finite_steps += self._total.isfinite()
        self._rows += rows
        self.steps += 1

    def so_far(self) -> float:
        """Return the mean loss over this rank's samples so far, for the progress bar."""
        return self._total.item() / max(self._rows, 1)

    def mean(self, title: str) -> float:
        """Return the mean loss over the samples of all ranks.

        Raises:
            DivergedError: the mean is not finite.
            DataFormatError: there are no samples.
        """
        total, samples = self._over_ranks(title)
        if samples == 0:
            raise DataFormatError(
                f"{title}: the data have no sample: a file without rows, an empty loader, or a "
                f"generator that an epoch before has used up"
            )
        return total / samples

    def since_last(self, title: str, seconds: float) -> tuple[float, float, float, float]:
        """Return the mean loss, and the numbers of samples, steps and seconds, since the last call.

        Args:
            title: start of the error message.
            seconds: time in seconds since the epoch began.
        """
        now = *self._over_ranks(title), self.steps, seconds
        total, *others = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        return total / max(others[0], 1), others[0], others[1], others[2]

    def _over_ranks(self, title: str) -> tuple[float, int]:
        sums = torch.stack([self._total, torch.full_like(self._total, self._rows)])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        total, samples = sums.tolist()
        if not math.isfinite(total):
            if self._group is not None:
                dist.all_reduce(self._finite_steps, dist.ReduceOp.MIN, group=self._group)
            step, of = int(self._finite_steps) + 1, f" of {self._expected}" * bool(self._expected)
            raise DivergedError(
                f"{title}: the loss is infinite or NaN from step {step}{of} on: "
                f"training has diverged"
            )
        return total, int(samples)
