"""Learning rates for large batches."""

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

    Step t (from 0) is made with

    - ``lr * (1 + (scale - 1) * min(1, t / warmup_steps))``, and with total_steps, from
      warmup_steps on,
    - ``lr * scale * (total_steps - t) / (total_steps - warmup_steps)``, and 0 behind the end.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017: the
    linear scaling rule, and gradual warm-up. Their momentum correction, by which a velocity that
    has the learning rate in it is multiplied by new lr / old lr, is for libraries that keep such a
    one; the velocity of torch's and sparsekit's SGD is of gradients alone, so nothing is to be
    corrected.

    Args:
        optimizer: whose lr is that for one rank's batch.
        scale: how many times larger the batch is, as a rule the number of ranks; > 0.
        warmup_steps: how long it takes, >= 0.
        total_steps: after how many the rate is zero, > warmup_steps; None: it stays.

    Returns:
        A scheduler to be stepped after each update, as `Trainer` does.

    Raises:
        TypeError, ValueError: a number is out of range.
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
