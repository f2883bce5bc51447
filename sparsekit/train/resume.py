"""Saves a trainer's position in its data, and resumes from it."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..errors import ResumeError
from .feed import Share
from .fit_data import FitData
from .progress import Progress


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch.

    Attributes:
        number: number of the epoch, counted from 1.
        loss: mean loss over all samples, without the penalty. The loss of a sample is computed
            before the update that uses it.
        seconds: duration of training in seconds, without evaluation.
        samples_per_second: number of samples trained on per second.
        metrics: result of ``evaluate``.
        tables: statistics of each embedding table, by name; see `Telemetry`.
    """

    number: int
    loss: float
    seconds: float
    samples_per_second: float
    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Position:
    """A position in an epoch, between two steps.

    Attributes:
        order: state of the generator that shuffles tensors, at the start of the epoch.
        random: state of torch's CPU generator, which determines the order of a DataLoader.
        reader: state of the reader, if there is one, at the start of the epoch.
        ranks: number of ranks; 0 if the state was saved by a version that did not record it.
        batches: number of batches finished in this epoch on this rank.
        samples: number of samples in these batches, on all ranks.
        seconds: time spent on these batches.
        losses: state of the losses of these batches; see `Losses.state`.
        data: numbers that identify the data; see `FitData.facts`. Empty if the state was saved by
            a version that did not record them.
    """

    order: torch.Tensor
    random: torch.Tensor
    reader: dict[str, Any] | None = None
    ranks: int = 0
    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def begin(generator: torch.Generator, fit: FitData, facts: dict[str, int]) -> Position:
        """Return the position at the start of an epoch."""
        reader = fit.data.state_dict() if fit.is_reader else None
        random = torch.get_rng_state()
        return Position(generator.get_state(), random, reader, _ranks(), data=facts)

    def check(self, fit: FitData) -> None:
        """Check that the data is the same as when the state was saved.

        Tensors must have the same contents and, in the middle of an epoch, the same batches. For
        loaders that are not readers, only the size is compared, and only in the middle of an epoch.

        Raises:
            ResumeError: the data is different.
        """
        if self.reader is not None:
            if not fit.is_reader:
                raise ResumeError(
                    f"Trainer: the checkpoint is of a run on a reader, and now there is "
                    f"{'a tuple' if fit.of_tensors else type(fit.data).__name__}"
                )
            try:
                fit.data.load_state_dict({**self.reader, "step": self._batches_there(fit)})
            except ValueError as error:
                raise ResumeError(f"Trainer: the checkpoint is of other data: {error}") from error
        compared = ["samples", "checksum"] if "checksum" in self.data else []
        if self._batches_there(fit):
            compared = list(self.data)
        for name in compared:
            if self.data[name] != (now := fit.facts.get(name)):
                raise ResumeError(
                    f"Trainer: the checkpoint is of a run on data with {name}={self.data[name]}, "
                    f"and these have {now}. Pass the same, or load only model and "
                    f"optimizers (Checkpoints.load) and call fit without resume"
                )

    def _batches_there(self, fit: FitData) -> int:
        """Return the number of batches to skip: either all finished batches, or none.

        A loader's batches cannot be skipped if the number of ranks has changed, since that changes
        how samples are split into batches.
        """
        return self.batches if fit.of_tensors or self.ranks in (0, _ranks()) else 0

    def find(self, generator: torch.Generator, fit: FitData, stream: TextIO | None) -> None:
        """Move the data to this position or, if that is impossible, to the start of the epoch.

        In the second case, this object becomes the position at the start of the epoch, and a
        message is written to ``stream``.

        Raises:
            ValueError: the data is a reader other than the saved one.
        """
        generator.set_state(self.order)
        now = _ranks()
        if self.batches and not self._batches_there(fit):
            text = f"the epoch begins again, as batches were those of {self.ranks} ranks, not {now}"
            Progress("resumed:", 0, stream).finish(text)
            self.batches, self.samples, self.seconds, self.losses = 0, 0, 0.0, {}
        self.ranks = now
        if self.reader is not None:
            fit.data.load_state_dict({**self.reader, "step": self.batches})

    def reach(self, shares: Generator[Share, None, None]) -> None:
        """Read and drop the finished batches, unless a reader has already skipped them."""
        if self.reader is not None or not self.batches:
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self.random)
        passed = sum(1 for _ in itertools.islice(shares, self.batches))
        torch.set_rng_state(now)
        if passed < self.batches:
            raise ResumeError(
                f"Trainer: the checkpoint is behind batch {self.batches} of an epoch, which has "
                f"{passed} batches here"
            )


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
