"""Performs one update of a model: forward, backward and the optimizers' steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .._reports import errors_are_deferred
from ..distributed import Exchange, wrap_ddp
from ..distributed.averaging import averaging_of
from ..distributed.exchange import attempt
from ..optim import clip_grad_norm_, split_embedding_variable_from_others
from ..tables.reports import raise_errors
from .feed import Share

LossFn = Callable[[torch.nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]


class _Loss(torch.nn.Module):
    """Model and loss as one module, since DistributedDataParallel must wrap the whole forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: LossFn, batch: Any) -> Any:
        return loss_fn(self.model, batch)


class Step:
    """Updates a model's weights with the gradient of one or more batches; used by `Trainer`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler],
        clip_norm: float | None,
        autocast: torch.dtype | None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._schedulers = schedulers
        self._clip_norm = clip_norm
        self._autocast = autocast
        self._device = next(model.parameters()).device
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        if self._ranks > 1:
            _refuse_batch_norm(model)
        self._loss = wrap_ddp(_Loss(model))
        # Returns a context that accumulates dense gradients locally, to be averaged later.
        self._without_averaging: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(self._loss, DistributedDataParallel):
            self._without_averaging = self._loss.no_sync
            # Buffers need no broadcast before each batch, since layers that change buffers in
            # training are refused.
            self._loss.broadcast_buffers = False
            averaging = averaging_of(self._loss.device)
            if averaging is not None:
                self._loss.register_comm_hook(None, averaging.average)

    def raise_errors(self, exchange: Exchange | None) -> None:
        """Raise any deferred error from an earlier step, on all ranks."""
        if not errors_are_deferred(self._device):
            return
        if exchange is None:
            raise_errors(self._device)
        else:
            exchange.agree("errors of steps", attempt(lambda: raise_errors(self._device)))

    def update(
        self, loss_fn: LossFn, shares: Sequence[Share], following: Share | None
    ) -> torch.Tensor:
        """Update the weights once; return the sum of this rank's losses as a 0-dim float64 tensor.

        Args:
            loss_fn: as for `Trainer`.
            shares: this rank's shares of the batches whose gradients are accumulated.
            following: first batch of the next update, for prefetching; or None.
        """
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        samples = sum(share.samples for share in shares)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for number, share in enumerate(shares, 1):
            ends = number == len(shares)
            after = following if ends else shares[number]
            with nullcontext() if ends else self._without_averaging():
                total += self._backward(loss_fn, share, after, samples, len(shares))
        if self._clip_norm is not None:
            # Do not raise for non-finite gradients: `Losses` reports the step's number later.
            clip_grad_norm_(self._model.parameters(), self._clip_norm, error_if_nonfinite=False)
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        return total

    def _backward(
        self, loss_fn: LossFn, share: Share, after: Share | None, samples: int, batches: int
    ) -> torch.Tensor:
        """Add a batch's gradient to the accumulated gradients; return the sum of its losses."""
        cast = self._autocast
        with nullcontext() if cast is None else torch.autocast(self._device.type, cast):
            returned = self._loss(loss_fn, share.batch)
        losses, penalty = _checked(returned, share.rows)
        total = losses.sum()
        if isinstance(penalty, torch.Tensor) and penalty.dim() == 1:
            total, penalty = total + penalty.sum(), 0.0
        # Gradients are averaged over ranks. With this factor, the result is the mean over all
        # samples. The average of per-rank means would give too much weight to small shares.
        loss = total * (self._ranks / max(samples, 1))
        if isinstance(penalty, torch.Tensor) or penalty:
            loss = loss + penalty / batches
        if self._ranks > 1 and share.rows == 0:
            # Each rank waits for the gradients of all dense parameters from all other ranks. With
            # no samples, a model may skip parameters, so make the loss depend on each of them.
            _, dense = split_embedding_variable_from_others(self._model)
            loss = loss + sum(p.sum() * 0 for p in dense if p.requires_grad)
        prefetch = getattr(self._model, "prefetch", None)
        if self._ranks > 1 and after is not None and callable(prefetch):
            prefetch(after.batch)
        loss.backward()
        return losses.detach().sum(dtype=torch.float64)


def _checked(returned: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Check the losses and the penalty from ``loss_fn``; raise TypeError or ValueError."""
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not pair or not isinstance(returned[0], torch.Tensor):
        got = type(returned).__name__
        if isinstance(returned, torch.Tensor):
            got = f"one tensor of shape {tuple(returned.shape)}"
        elif isinstance(returned, tuple | list):
            got += f" of {', '.join(type(each).__name__ for each in returned) or 'nothing'}"
        raise TypeError(
            f"loss_fn must return (losses, penalty): a tensor with one loss for each of the "
            f"{samples} samples, not yet averaged, and what is added to their mean, 0.0 for "
            f"nothing; got {got}"
        )
    losses, penalty = returned
    # Without this check, a mean returned instead of one loss per sample would be misweighted.
    if losses.shape != (samples,):
        raise ValueError(
            f"loss_fn must return one loss for each of the {samples} samples, "
            f"got shape {tuple(losses.shape)}"
        )
    if isinstance(penalty, torch.Tensor) and penalty.shape not in ((), (samples,)):
        raise ValueError(
            f"loss_fn must return one penalty, or one for each of the {samples} samples, "
            f"got shape {tuple(penalty.shape)}"
        )
    return losses, penalty


def _refuse_batch_norm(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        by_batch = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if by_batch and not isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is {type(module).__name__}, which would normalise by each rank's part of "
                f"a batch; use torch.nn.SyncBatchNorm on GPUs, or LayerNorm"
            )
