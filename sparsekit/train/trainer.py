"""A training loop for models with sparse and dense parameters."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..checkpoint import Checkpoints
from ..distributed import Exchange, exchange_of
from ..distributed.exchange import attempt
from ..errors import ResumeError, check_int
from .feed import Ranks, Share, of_loader, of_tensors, set_epoch, steps_of
from .fit_data import FitData
from .logs import Log, go_on, write_record
from .losses import Losses
from .metrics import Evaluate, evaluated
from .progress import Progress
from .resume import Epoch, Position
from .spinning import Spinning
from .step import LossFn, Step
from .stopping import EarlyStopping, ended_early
from .telemetry import Telemetry


class Trainer:
    """Trains a model epoch by epoch.

    The same seed, data and model give the same bits. The trainer shuffles samples with its own
    generator, so other random draws do not affect their order.

    With torch.distributed, each rank creates a trainer and calls `fit` with the same arguments. If
    the data is tensors, each rank passes all samples, and the batches are split over the ranks. A
    loader yields only the samples of its own rank. A rank may have no samples in a batch. The
    gradient is computed over the whole batch, so the weights are the same as on one rank, up to
    rounding.

    On several ranks, the trainer passes the next batch to the model's method ``prefetch(batch)``,
    if any, between forward and backward. An `EmbeddingGroup` can then begin to send its keys.

    Args:
        model: the model to train, unwrapped: on several ranks the trainer wraps its dense part in
            DistributedDataParallel. Each rank has its own buffers.
        loss_fn: ``loss_fn(model, batch)`` returns ``(losses, penalty)``. ``losses`` has one loss
            per sample, shape ``[samples of batch]``. In training, the penalty, such as a
            regularizer, is added to their mean. It is either one number per sample, to be averaged,
            or a single number that does not depend on the batch (0.0 for none).
        optimizers: optimizers, which all step in every update; sparse and dense parameters need
            separate optimizers.
        schedulers: learning rate schedulers, stepped after each update; see `linear_warmup`.
        seed: seed for shuffling the samples, if the data is tensors.
        stream: stream to which rank 0 writes progress; None means ``sys.stderr``.
        accumulate: number of batches whose gradients are accumulated for one step.
        clip_norm: maximum norm of the gradient over all weights, sparse and dense together. A
            larger gradient is scaled down to this norm. None means no limit.
        autocast: ``torch.bfloat16`` to run the dense part's forward in this dtype; None for the
            model's own dtype.
        logs: logs to which rank 0 writes records of steps and epochs; see `JsonLines`.
        log_every: number of steps between two records. Each record also checks that the loss is
            finite, so the CPU waits for the GPU.
        checkpoints: folder of checkpoints. After each epoch, the model, optimizers, schedulers and
            the position in the data are saved to it in the background. ``fit(resume=True)`` resumes
            from the latest checkpoint.
        checkpoint_every: number of steps between two checkpoints within an epoch; None saves
            checkpoints only after epochs.

    Attributes:
        history: the finished epochs of all calls of `fit`.
        steps: number of updates made so far.
        interrupted: whether Ctrl-C ended the last call of `fit`.

    Raises:
        ValueError: a number is out of range; checkpoint_every is given without checkpoints; or, on
            several ranks, a layer normalizes over the batch, though each rank has only a part of
            it.
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
        accumulate: int = 1,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        logs: Sequence[Log] = (),
        log_every: int = 100,
        checkpoints: Checkpoints | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.optimizers = list(optimizers)
        self.schedulers = list(schedulers)
        self.stream = stream
        self.accumulate = check_int("Trainer", "accumulate", accumulate, 1, 2**31 - 1)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"Trainer: clip_norm must be > 0, got {clip_norm}")
        self.clip_norm = clip_norm
        self.autocast = autocast
        self.logs = list(logs)
        self.log_every = check_int("Trainer", "log_every", log_every, 1, 2**31 - 1)
        if checkpoint_every is not None:
            check_int("Trainer", "checkpoint_every", checkpoint_every, 1, 2**31 - 1)
            if checkpoints is None:
                raise ValueError(f"Trainer: checkpoint_every={checkpoint_every} needs checkpoints")
        self.checkpoints = checkpoints
        self.checkpoint_every = checkpoint_every
        self.history: list[Epoch] = []
        self.steps = 0
        self.interrupted = False
        self._generator = torch.Generator("cpu").manual_seed(seed)
        # The connection to the other ranks; set by `fit`.
        self._exchange: Exchange | None = None
        self._step = Step(model, self.optimizers, self.schedulers, clip_norm, autocast)
        self._telemetry = Telemetry(model)
        self._spinning = Spinning()
        self._samples = self._updates = 0  # per epoch; 0 until known
        self._place: Position | None = None  # position within an epoch, to be saved or just loaded
        self._resumed: FitData | None = None  # while resuming: the data to be compared

    @property
    def _rank(self) -> int:
        return self._exchange.rank if self._exchange else 0

    @property
    def _world_size(self) -> int:
        return self._exchange.world_size if self._exchange else 1

    def fit(
        self,
        data: tuple[torch.Tensor, ...] | Iterable[Any],
        *,
        epochs: int,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        evaluate: Evaluate | None = None,
        stop: EarlyStopping | None = None,
        resume: bool = False,
    ) -> list[Epoch]:
        """Train the model on data.

        On one rank, Ctrl-C ends training: `fit` returns the finished epochs and sets
        ``interrupted``. The model may then have been trained on some batches of the next epoch.

        Args:
            data: a tuple of tensors of equal length, or a loader. With tensors, an epoch uses each
                row once, in random order, and a batch is a tuple of rows from all tensors. A loader
                is an iterable over the batches of an epoch, such as a reader of `sparsekit.data` or
                a DataLoader. Its batches are a `Batch`, a tensor, or a tuple, list or dict that
                begins with one of these. The loader is read in another thread. On several ranks, it
                must yield each rank's own samples, in equal numbers of batches. A `Batch` or tensor
                is moved to the model's device; tensors in a tuple, list or dict are not moved.
            epochs: number of epochs, >= 0.
            batch_size: number of samples per rank in a batch, if the data is tensors. The last
                batch of an epoch may be smaller. None for a loader, which has its own batch size.
            global_batch_size: total number of samples in a batch on all ranks, instead of
                batch_size; batches then do not depend on the number of ranks.
            evaluate: called on every rank after each epoch, with the model in evaluation mode and
                without gradients. Its result is stored in ``history``, and printed by rank 0.
            stop: early stopping, based on rank 0's value of a metric from ``evaluate``.
            resume: whether to continue from the trainer's latest checkpoint, if there is one. Then
                ``epochs`` includes the epochs already trained, so that a restarted script ends at
                the same epoch. The data and, in the middle of an epoch, the batches must be the
                same as before. Tensors are compared by size and checksum, readers by their state,
                other loaders by size. If the number of ranks has changed in the middle of an epoch,
                a loader restarts the epoch; tensors continue if global_batch_size is the same.

        Returns:
            ``history``: the finished epochs of all calls of `fit`.

        Raises:
            TypeError: a batch has a form not listed above.
            ValueError: tensors are empty or have unequal lengths, a number is out of range, or the
                metric of ``stop`` does not exist.
            ResumeError: data or schedulers differ from those in the checkpoint; nothing is loaded.
            DataFormatError: an epoch has no samples: a file is empty, or the data is a generator
                that the previous epoch has exhausted.
            RuntimeError: the ranks' data, number of epochs, seeds or other settings differ.
            CheckpointError: a checkpoint cannot be written or read, or the folder has checkpoints
                of a run that this call does not resume.
            DivergedError: the loss of a step is infinite or NaN. Raised on all ranks, with the next
                record of the logs or at the end of the epoch.
        """
        fit, device = self._agree(data, epochs, batch_size, global_batch_size)
        if resume:
            self._resume(fit)
        if self.checkpoints is not None:
            self.checkpoints.claim(self.steps + 1, self.model)
        if self.steps:
            go_on(self.logs, self.steps, self.stream, self._exchange)
        self.interrupted = False
        last = epochs if resume else len(self.history) + epochs
        try:
            done = resume and ended_early(stop, self.history, self._exchange)
            while not done and len(self.history) < last:
                place = self._begin(fit)
                shares = self._shares(fit, device)
                title = f"epoch {len(self.history) + 1}/{last}"
                self._epoch(place, shares, title, evaluate, device)
                self._save(self._first_place(fit))
                done = ended_early(stop, self.history, self._exchange)
            if self._place is not None and not self._place.batches:
                self._place = None  # the next call may pass other data
            if self.checkpoints is not None:
                self.checkpoints.wait()
        except KeyboardInterrupt:
            if self._exchange is not None:
                raise  # other ranks may be waiting for this one
            self.interrupted = True
            text = f"{len(self.history)} of {last} epochs are finished"
            if self.checkpoints is not None:
                self.checkpoints.wait()
                saved = self.checkpoints.latest()
                text += f"; the latest checkpoint is {saved.name if saved else 'none'}"
            Progress("interrupted:", 0, self.stream).finish(text)
        return self.history

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, without models or optimizers. Call it between steps."""
        return {
            "steps": self.steps,
            "history": [asdict(epoch) for epoch in self.history],
            "order": self._generator.get_state(),
            "place": None if self._place is None else vars(self._place),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state for the next call of `fit` to continue from.

        Raises:
            ResumeError: the state was saved with a different number of schedulers.
        """
        place = None if state["place"] is None else Position(**state["place"])
        if place is not None and self._resumed is not None:
            place.check(self._resumed)
        if len(state["schedulers"]) != len(self.schedulers):
            raise ResumeError(
                f"Trainer: the state has {len(state['schedulers'])} schedulers, and there are "
                f"{len(self.schedulers)}"
            )
        for scheduler, of_scheduler in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(of_scheduler)
        self.steps = state["steps"]
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self._generator.set_state(state["order"])
        self._place = place

    def _resume(self, fit: FitData) -> None:
        if self.checkpoints is None:
            raise ValueError("Trainer: resume=True needs checkpoints")
        self._resumed = fit
        try:
            found = self.checkpoints.load(self.model, self.optimizers, state={"trainer": self})
        finally:
            self._resumed = None
        if found is None or self._rank > 0:
            return
        batches = self._place.batches if self._place else 0
        done = f"{len(self.history)} epochs" + f" and {batches} batches" * bool(batches)
        Progress("resumed", 0, self.stream).finish(f"from {found.path}, {done} are done")

    def _save(self, place: Position) -> None:
        if self.checkpoints is None:
            return
        self._place = place
        own = {"trainer": self}
        self.checkpoints.async_save(self.steps, self.model, self.optimizers, state=own)
        self._place = None

    def _agree(
        self, data: Any, epochs: int, batch_size: int | None, global_batch_size: int | None
    ) -> tuple[FitData, torch.device]:
        """Check the arguments, which must be equal on all ranks; return the data and the device."""
        weight = next(self.model.parameters(), torch.empty(0))
        device = data[0].device if isinstance(data, tuple) and data else weight.device
        self._exchange = exchange_of(dist.group.WORLD, device)
        fit = FitData(data, batch_size, global_batch_size, self._world_size)

        def check() -> None:
            fit.check()
            check_int("Trainer", "epochs", epochs, 0, 2**31 - 1)
            if self._place is not None:
                self._place.check(fit)

        if self._exchange is None:
            check()
            return fit, device
        seed = self._generator.initial_seed()
        plan = f"train on {fit}, {epochs} epochs after {len(self.history)}, seed {seed}"
        self._exchange.agree(f"{plan}, {self.accumulate} batches a step", attempt(check))
        return fit, device

    def _first_place(self, fit: FitData) -> Position:
        """Return the position at the start of the next epoch."""
        facts = {} if self.checkpoints is None else fit.facts
        return Position.begin(self._generator, fit, facts)

    def _begin(self, fit: FitData) -> Position:
        """Return the position where the next epoch begins or continues."""
        if not fit.of_tensors:
            set_epoch(fit.data, len(self.history))
        place, self._place = self._place, None  # stays None if the epoch is interrupted
        if place is None:
            return self._first_place(fit)
        place.find(self._generator, fit, self.stream if self._rank == 0 else io.StringIO())
        return place

    def _shares(self, fit: FitData, device: torch.device) -> Generator[Share, None, None]:
        if fit.of_tensors:
            self._samples = fit.samples
            self._updates = math.ceil(math.ceil(fit.samples / fit.batch) / self.accumulate)
            return of_tensors(fit.data, fit.batch, self._generator, self._rank, self._world_size)
        group = None if self._exchange is None else self._exchange.group
        return of_loader(fit.data, device, Ranks(group, device))

    def _epoch(
        self,
        place: Position,
        shares: Generator[Share, None, None],
        title: str,
        evaluate: Evaluate | None,
        device: torch.device,
    ) -> None:
        self.model.train()
        self._telemetry.bytes_sent(self._exchange)  # do not count bytes sent by evaluation
        group = None if self._exchange is None else self._exchange.group
        losses = Losses(device, group, self._updates)
        stream = self.stream if self._rank == 0 else io.StringIO()
        with Progress(title, self._samples, stream) as progress, contextlib.closing(shares):
            self._spinning.begin()
            self._train(place, shares, losses, progress, title)
            hint = self._spinning.hint()
            self._samples, self._updates = progress.done, losses.steps
            mean = losses.mean(title)
            seconds = progress.seconds
            metrics = {} if evaluate is None else evaluated(self.model, evaluate)
            self._step.raise_errors(self._exchange)
            tables = self._telemetry.read(self.steps, self._exchange, epoch_ends=True)
            rate = progress.done / seconds
            epoch = Epoch(len(self.history) + 1, mean, seconds, rate, metrics, tables)
            self.history.append(epoch)
            record = {"kind": "epoch", "step": self.steps, **asdict(epoch)}
            write_record(self.logs, record, self._exchange)
            shown = "".join(f"  {name} {value:.4f}" for name, value in metrics.items())
            progress.finish(f" loss {epoch.loss:.4f}{shown}  {rate:,.0f} samples/s{hint}")

    def _train(
        self,
        place: Position,
        shares: Generator[Share, None, None],
        losses: Losses,
        progress: Progress,
        title: str,
    ) -> None:
        """Run the remaining steps of an epoch."""
        if place.batches:
            place.reach(shares)
            losses.restore(place.losses)
            progress.go_on(place.samples, place.seconds)
        for batches, following in steps_of(shares, self.accumulate):
            every = self.checkpoint_every
            saves = every is not None and (self.steps + 1) % every == 0 and following is not None
            # Do not prefetch before a checkpoint: no data may be in transit while it is saved.
            loss = self._step.update(self.loss_fn, batches, None if saves else following)
            losses.add(loss, sum(share.rows for share in batches))
            self.steps += 1
            place.batches += len(batches)
            progress.update(sum(share.samples for share in batches), losses.so_far)
            if self.steps % self.log_every == 0:
                self._log_step(losses, progress, title)
            if saves:
                place.samples, place.seconds = progress.done, progress.seconds
                place.losses = losses.state(title)
                self._save(place)

    def _log_step(self, losses: Losses, progress: Progress, title: str) -> None:
        loss, samples, steps, seconds = losses.since_last(title, progress.seconds)
        record = {
            "kind": "step",
            "step": self.steps,
            "epoch": len(self.history) + 1,
            "loss": loss,
            "samples_per_second": samples / seconds,
            "lr": {str(i): float(o.param_groups[0]["lr"]) for i, o in enumerate(self.optimizers)},
            "bytes_sent_per_step": self._telemetry.bytes_sent(self._exchange) / steps,
            "tables": self._telemetry.read(self.steps, self._exchange),
        }
        write_record(self.logs, record, self._exchange)
