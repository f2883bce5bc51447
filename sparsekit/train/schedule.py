"""Learning rate schedules for large batches."""

from __future__ import annotations

import torch

from ..errors import check_int


def linear_warmup(
    optimizer: torch.optim.Optimizer,
    scale: float,
    warmup_steps: int,
    total_steps: int | None = None,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Raise the learning rate linearly from lr to scale * lr, for a batch scale times larger.

    The learning rate of step t, counted from 0, is

    - ``lr * (1 + (scale - 1) * min(1, t / warmup_steps))``;
    - with total_steps, after the warm-up:
      ``lr * scale * (total_steps - t) / (total_steps - warmup_steps)``, and 0 after the end.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017: the
    linear scaling rule, and gradual warm-up. Their momentum correction multiplies a velocity that
    includes the learning rate by new lr / old lr. The velocity of torch's and sparsekit's SGD is a
    sum of gradients alone, so there is nothing to correct.

    Args:
        optimizer: optimizer whose lr suits the batch of a single rank.
        scale: factor by which the batch is larger, usually the number of ranks; > 0.
        warmup_steps: length of the warm-up, >= 0.
        total_steps: number of steps after which the rate is zero, > warmup_steps; None to keep the
            rate constant after the warm-up.

    Returns:
        A scheduler to step after each update, as `Trainer` does.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """
    check_int("linear_warmup", "warmup_steps", warmup_steps, 0, 2**62)
    if not 0 < scale < float("inf"):
        raise ValueError(f"linear_warmup: scale must be a number > 0, got {scale}")
    if total_steps is not None:
        check_int("linear_warmup", "total_steps", total_steps, warmup_steps + 1, 2**62)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return 1 + (scale - 1) * step / warmup_steps
        if total_steps is None:
            return scale
        return scale * max(total_steps - step, 0) / (total_steps - warmup_steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
