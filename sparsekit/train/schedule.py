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
    """Warm up the learning rate linearly from lr to scale * lr, for a larger batch.

    The learning rate at step t, counted from 0, is

    - ``lr * (1 + (scale - 1) * min(1, t / warmup_steps))``;
    - with total_steps, after the warm-up:
      ``lr * scale * (total_steps - t) / (total_steps - warmup_steps)``, and 0 after the end.

    This is the linear scaling rule with gradual warm-up. Source: Goyal et al., "Accurate, Large
    Minibatch SGD: Training ImageNet in 1 Hour", 2017. Their momentum correction multiplies the
    velocity by new lr / old lr if the velocity includes the learning rate. In torch's and
    sparsekit's SGD, the velocity is a sum of gradients alone, so no correction is needed.

    Args:
        optimizer: optimizer whose learning rate is the one for a single rank's batch.
        scale: ratio of the batch size to a single rank's, usually the number of ranks; > 0.
        warmup_steps: number of steps of the warm-up, >= 0.
        total_steps: the learning rate is zero after this many steps, > warmup_steps. With None, the
            learning rate is constant after the warm-up.

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
