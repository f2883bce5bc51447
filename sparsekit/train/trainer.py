"""A training loop for models with sparse and dense parameters."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..distributed import Exchange, exchange_of, wrap_ddp
from ..distributed.averaging import averaging_of
from ..errors import DivergedError
from ..optim import split_embedding_variable_from_others
from .progress import Progress

Batch = tuple[torch.Tensor, ...]
LossFn = Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, torch.Tensor | float]]
Evaluate = Callable[[torch.nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Epoch:
    """What one epoch gave.

    Attributes:
        number: from 1.
        loss: mean over all samples, each with the weights it was trained with; no penalty.
        seconds: spent training, evaluation not included.
        samples_per_second: of training.
        metrics: what evaluate returned.
    """

    number: int
    loss: float
    seconds: float
    samples_per_second: float
    metrics: dict[str, float] = field(default_factory=dict)


class _Loss(torch.nn.Module):
    """The model and its loss in one: DistributedDataParallel must see the whole forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss_fn: LossFn, batch: Batch) -> Any:
        return loss_fn(self.model, batch)


class Trainer:
    """Runs a model over its data, epoch by epoch.

    The same seed, data and model give the same bits: samples are shuffled by a generator of the
    trainer's own, so nothing else that draws random numbers changes their order.

    Where torch.distributed has several ranks, every one of them makes a trainer and calls `fit`
    with the same arguments, all of the data included. A batch is split over the ranks, of which
    some may get no sample of the last one; the gradient is that of the whole batch, so the weights
    are those of one rank, up to rounding.

    Args:
        model: what is trained. Over ranks its dense part is wrapped in DistributedDataParallel
            here, so it comes unwrapped. Buffers are each rank's own.
        loss_fn: ``loss_fn(model, batch) -> (losses, penalty)``: one loss for each sample, shape
            ``[len(batch)]``, and what is added to their mean in training, a regulariser for
            instance: either one for each sample as well, of which the mean is taken, or a number
            that does not depend on the batch (0.0 for nothing).
        optimizers: each is stepped after each batch; sparse and dense parameters have different
            ones.
        schedulers: learning rate schedulers, stepped after each batch.
        seed: of the order of samples.
        stream: where rank 0 writes progress; None means ``sys.stderr``.

    Attributes:
        history: the finished epochs, of all calls of fit.
        interrupted: whether the last call of fit was ended by Ctrl-C.

    Raises:
        ValueError: over ranks, a layer that normalises by the batch, of which each has a part.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler] = (),
        seed: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.stream = stream
        self.history: list[Epoch] = []
        self.interrupted = False
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._exchange: Exchange | None = None  # with the other ranks, once fit is called
        if dist.is_initialized() and dist.get_world_size() > 1:
            _refuse_batch_norm(model)
        self._loss = wrap_ddp(_Loss(model))
        if isinstance(self._loss, torch.nn.parallel.DistributedDataParallel):
            # Sending buffers from rank 0 before each batch is for layers that change them in
            # training, and those are refused.
            self._loss.broadcast_buffers = False
            averaging = averaging_of(self._loss.device)
            if averaging is not None:
                self._loss.register_comm_hook(None, averaging.average)

    @property
    def _rank(self) -> int:
        return self._exchange.rank if self._exchange else 0

    @property
    def _world_size(self) -> int:
        return self._exchange.world_size if self._exchange else 1

    def fit(
        self,
        data: Batch,
        *,
        epochs: int,
        batch_size: int,
        evaluate: Evaluate | None = None,
    ) -> list[Epoch]:
        """Train on data, in another random order in each epoch, each sample once.

        Ctrl-C ends it, on one rank: the epochs finished so far are returned and ``interrupted`` is
        set. The model may then be some batches beyond the last epoch.

        Args:
            data: tensors of equal length n; a batch is a tuple of their rows.
            epochs: how many, >= 0.
            batch_size: samples in a batch, of all ranks together; the last of an epoch may be
                smaller.
            evaluate: called with the model after each epoch, in evaluation mode and without
                gradients, on every rank; what it returns is kept, and printed by rank 0.

        Returns:
            The history.

        Raises:
            ValueError: data is empty or of unequal lengths, or a number is out of range.
            RuntimeError: ranks that would train differently.
            DivergedError: the loss of a step is infinite or NaN; raised at the end of the epoch, on
                all ranks.
        """
        self._agree(data, epochs, batch_size)
        self.interrupted = False
        last = len(self.history) + epochs
        try:
            while len(self.history) < last:
                self._epoch(data, batch_size, f"epoch {len(self.history) + 1}/{last}", evaluate)
        except KeyboardInterrupt:
            if self._exchange is not None:
                raise  # other ranks may be waiting for this one
            self.interrupted = True
            text = f"{len(self.history)} of {last} epochs are finished"
            Progress("interrupted:", 0, self.stream).finish(text)
        return self.history

    def _agree(self, data: Batch, epochs: int, batch_size: int) -> None:
        """Check arguments, and that they are the same on all ranks."""
        lengths = sorted({len(tensor) for tensor in data})
        device = data[0].device if data else torch.device("cpu")
        self._exchange = exchange_of(dist.group.WORLD, device)

        def check() -> None:
            if len(lengths) != 1 or lengths == [0]:
                raise ValueError(f"data must be tensors of one length >= 1, got {lengths}")
            if epochs < 0 or batch_size < 1:
                raise ValueError(f"epochs={epochs} must be >= 0 and batch_size={batch_size} >= 1")

        if self._exchange is None:
            check()
            return
        seed = self._generator.initial_seed()
        plan = (
            f"train on {lengths} samples in batches of {batch_size}, {epochs} epochs after "
            f"{len(self.history)}, seed {seed}"
        )
        self._exchange.meet(plan, check)

    def _epoch(self, data: Batch, batch_size: int, title: str, evaluate: Evaluate | None) -> None:
        count = len(data[0])
        # In float64, where a sum over many millions of samples has digits to spare.
        total = torch.zeros((), dtype=torch.float64, device=data[0].device)
        # Counted where it is computed: to ask a GPU after each step would mean waiting for it.
        finite_steps = torch.zeros((), dtype=torch.int64, device=data[0].device)
        mine = 0
        self.model.train()
        with Progress(title, count, self.stream if self._rank == 0 else io.StringIO()) as progress:

            def loss_so_far() -> float:
                return total.item() / mine  # rank 0 has a sample of every batch

            for batch, samples in self._batches(data, batch_size):
                total.add_(self._step(batch, samples))
                finite_steps += total.isfinite()
                mine += len(batch[0])
                progress.update(samples, loss_so_far)
            if self._exchange is not None:
                dist.all_reduce(total, group=self._exchange.group)
            if not math.isfinite(total.item()):
                if self._exchange is not None:
                    dist.all_reduce(finite_steps, dist.ReduceOp.MIN, group=self._exchange.group)
                step, steps = int(finite_steps) + 1, math.ceil(count / batch_size)
                raise DivergedError(
                    f"{title}: the loss is infinite or NaN from step {step} of {steps} on: "
                    f"training has diverged"
                )
            seconds = progress.seconds
            metrics = {} if evaluate is None else self._evaluate(evaluate)
            rate = count / seconds
            number = len(self.history) + 1
            epoch = Epoch(number, total.item() / count, seconds, rate, metrics)
            self.history.append(epoch)
            shown = "".join(f"  {name} {value:.4f}" for name, value in metrics.items())
            progress.finish(f" loss {epoch.loss:.4f}{shown}  {rate:,.0f} samples/s")

    def _batches(self, data: Batch, batch_size: int) -> Iterator[tuple[Batch, int]]:
        """Yield this rank's share of each batch, and how many samples all ranks have of it."""
        # On the CPU, where the generator is, whatever torch's default device.
        order = torch.randperm(len(data[0]), generator=self._generator, device="cpu")
        for positions in order.to(data[0].device).split(batch_size):
            mine = positions.tensor_split(self._world_size)[self._rank]
            yield tuple(tensor[mine] for tensor in data), len(positions)

    def _step(self, batch: Batch, samples: int) -> torch.Tensor:
        """One update; returns the sum of this rank's losses.

        Args:
            batch: this rank's share.
            samples: of all ranks.
        """
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses, penalty = self._loss(self.loss_fn, batch)
        _check_shapes(losses, penalty, len(batch[0]))
        total = losses.sum()
        if isinstance(penalty, torch.Tensor) and penalty.dim() == 1:
            total, penalty = total + penalty.sum(), 0.0
        # Gradients are averaged over ranks, so this makes them those of the mean over all samples;
        # a mean over the rank's own would give those of a small share too much weight.
        loss = total * self._world_size / samples + penalty
        if self._world_size > 1 and len(losses) == 0:
            # Ranks wait for one another's gradients of every dense parameter, and a model may
            # leave some of them alone when it has nothing to do.
            _, dense = split_embedding_variable_from_others(self.model)
            loss = loss + sum(p.sum() * 0 for p in dense if p.requires_grad)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        return losses.detach().sum(dtype=torch.float64)

    def _evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            metrics = evaluate(self.model)
        self.model.train()
        return metrics


def _check_shapes(losses: torch.Tensor, penalty: torch.Tensor | float, samples: int) -> None:
    # A mean already would be reported wrongly, or weighted wrongly over ranks, and in silence.
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


def _refuse_batch_norm(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        by_batch = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if by_batch and not isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is {type(module).__name__}, which would normalise by each rank's part of "
                f"a batch; use torch.nn.SyncBatchNorm on GPUs, or LayerNorm"
            )
