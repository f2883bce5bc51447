"""A training loop for models with sparse and dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import torch

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


class Trainer:
    """Runs a model over its data, epoch by epoch.

    The same seed, data and model give the same bits: samples are shuffled by a generator of the
    trainer's own, so nothing else that draws random numbers changes their order.

    Args:
        model: what is trained.
        loss_fn: ``loss_fn(model, batch) -> (losses, penalty)``: one loss for each sample, shape
            ``[len(batch)]``, and what is added to their mean in training (0.0 for nothing), a
            regulariser for instance.
        optimizers: each is stepped after each batch; sparse and dense parameters have different
            ones.
        schedulers: learning rate schedulers, stepped after each batch.
        seed: of the order of samples.
        stream: where progress is written; None means ``sys.stderr``.

    Attributes:
        history: the finished epochs, of all calls of fit.
        interrupted: whether the last call of fit was ended by Ctrl-C.
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

    def fit(
        self,
        data: Batch,
        *,
        epochs: int,
        batch_size: int,
        evaluate: Evaluate | None = None,
    ) -> list[Epoch]:
        """Train on data, in another random order in each epoch, each sample once.

        Ctrl-C ends it: the epochs finished so far are returned and ``interrupted`` is set. The
        model may then be some batches beyond the last epoch.

        Args:
            data: tensors of equal length n; a batch is a tuple of their rows.
            epochs: how many, >= 0.
            batch_size: samples in a batch; the last of an epoch may be smaller.
            evaluate: called with the model after each epoch, in evaluation mode and without
                gradients; what it returns is printed and kept.

        Returns:
            The history.

        Raises:
            ValueError: data is empty or of unequal lengths, or a number is out of range.
        """
        lengths = {len(tensor) for tensor in data}
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(f"data must be tensors of one length >= 1, got {sorted(lengths)}")
        if epochs < 0 or batch_size < 1:
            raise ValueError(f"epochs={epochs} must be >= 0 and batch_size={batch_size} >= 1")
        self.interrupted = False
        last = len(self.history) + epochs
        try:
            while len(self.history) < last:
                self._epoch(data, batch_size, f"epoch {len(self.history) + 1}/{last}", evaluate)
        except KeyboardInterrupt:
            self.interrupted = True
            text = f"{len(self.history)} of {last} epochs are finished"
            Progress("interrupted:", 0, self.stream).finish(text)
        return self.history

    def _epoch(self, data: Batch, batch_size: int, title: str, evaluate: Evaluate | None) -> None:
        count = len(data[0])
        # In float64, where a sum over many millions of samples has digits to spare.
        total = torch.zeros((), dtype=torch.float64, device=data[0].device)
        self.model.train()
        with Progress(title, count, self.stream) as progress:

            def loss_so_far() -> float:
                return total.item() / progress.done

            for batch in self._batches(data, batch_size):
                total.add_(self._step(batch))
                progress.update(len(batch[0]), loss_so_far)
            seconds = progress.seconds
            metrics = {} if evaluate is None else self._evaluate(evaluate)
            rate = count / seconds
            number = len(self.history) + 1
            epoch = Epoch(number, total.item() / count, seconds, rate, metrics)
            self.history.append(epoch)
            shown = "".join(f"  {name} {value:.4f}" for name, value in metrics.items())
            progress.finish(f" loss {epoch.loss:.4f}{shown}  {rate:,.0f} samples/s")

    def _batches(self, data: Batch, batch_size: int) -> Iterator[Batch]:
        # On the CPU, where the generator is, whatever torch's default device.
        order = torch.randperm(len(data[0]), generator=self._generator, device="cpu")
        for positions in order.to(data[0].device).split(batch_size):
            yield tuple(tensor[positions] for tensor in data)

    def _step(self, batch: Batch) -> torch.Tensor:
        """One update; returns the sum of the losses."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses, penalty = self.loss_fn(self.model, batch)
        if losses.shape != (len(batch[0]),):
            # A loss that is a mean already would be reported wrongly, and in silence.
            raise ValueError(
                f"loss_fn must return one loss for each of the {len(batch[0])} samples, "
                f"got shape {tuple(losses.shape)}"
            )
        (losses.mean() + penalty).backward()
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
