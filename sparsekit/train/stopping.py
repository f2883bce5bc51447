"""Stops training when a metric no longer improves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import Exchange


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training when a metric has not improved for several epochs.

    Compute the metric on a validation split: data that decides when to stop can no longer serve as
    test data.

    Args:
        metric: name of the metric in the result of ``evaluate``.
        patience: training ends after this many epochs without improvement, >= 1.
        larger_is_better: True if larger values are better, as for an AUC; False for a loss.
        min_delta: smallest improvement that counts, >= 0.

    Raises:
        ValueError: patience or min_delta is out of range.
    """

    metric: str
    patience: int = 1
    larger_is_better: bool = False
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.patience < 1 or not self.min_delta >= 0:
            raise ValueError(
                f"EarlyStopping: patience={self.patience} must be >= 1 and "
                f"min_delta={self.min_delta} >= 0"
            )

    def reached(self, history: Sequence[Any]) -> bool:
        """Return whether training should end after the epochs in history.

        Raises:
            ValueError: the result of ``evaluate`` does not contain the metric.
        """
        sign = 1 if self.larger_is_better else -1
        best, since = float("-inf"), 0
        for epoch in history:
            if self.metric not in epoch.metrics:
                raise ValueError(
                    f"EarlyStopping: no metric {self.metric!r}; evaluate returns "
                    f"{sorted(epoch.metrics)}"
                )
            value = sign * epoch.metrics[self.metric]
            better = value > best + self.min_delta
            best, since = (value, 0) if better else (best, since + 1)
        return since >= self.patience


def ended_early(
    stop: EarlyStopping | None, history: Sequence[Any], exchange: Exchange | None
) -> bool:
    """Let rank 0 decide whether training should end; return its decision on all ranks."""
    if stop is None or not history:
        return False
    here = stop.reached(history)
    if exchange is None:
        return here
    flag = torch.tensor([here], dtype=torch.int64, device=exchange.device)
    dist.broadcast(flag, dist.get_global_rank(exchange.group, 0), exchange.group)
    return bool(flag.item())
