"""A trainer's position in its data, as saved in a checkpoint."""

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
    """Figures of one epoch.

    Attributes:
        number: counted from 1.
        loss: mean over all samples, each with the weights at its step; without the penalty.
        seconds: time of training without evaluation.
        samples_per_second: speed of training.
        metrics: what evaluate returned.
        tables: name -> figures of each embedding table; see `Telemetry`.
    """

    number: int
    loss: float
    seconds: float
    samples_per_second: float
    metrics: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Position:
    """A position between two steps of an epoch.

    Attributes:
        order: state, at the start of the epoch, of the generator that orders tensors.
        random: state of torch's CPU generator, from which a DataLoader takes its order.
        reader: state of the reader, if any, at the start of the epoch.
        ranks: number of ranks; 0 in old states, which lack it.
        batches: batches done in this epoch, on this rank.
        samples: samples of all ranks in them.
        seconds: time spent on them.
        losses: their losses; see `Losses.state`.
        data: facts that identify the data; see `FitData.facts`. Empty in old states.
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
        """Return the position at the beginning of an epoch."""
        reader = fit.data.state_dict() if fit.is_reader else None
        random = torch.get_rng_state()
        return Position(generator.get_state(), random, reader, _ranks(), data=facts)

    def check(self, fit: FitData) -> None:
        """Refuse data other than this position's, before anything is trained on them.

        Tensors must have the same contents and, in mid-epoch, the same batches. Loaders other than
        readers are compared by size, in mid-epoch only.

        Raises:
            ResumeError: the data differ.
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
        if not self.data:
            return
        now = fit.facts
        compared = ["samples", "checksum"] if "checksum" in self.data else []
        if self._batches_there(fit):
            compared = list(self.data)
        for name in compared:
            if self.data[name] != now.get(name):
                raise ResumeError(
                    f"Trainer: the checkpoint is of a run on data with {name}={self.data[name]}, "
                    f"and these have {now.get(name)}. Pass the same, or load only model and "
                    f"optimizers (Checkpoints.load) and call fit without resume"
                )

    def _batches_there(self, fit: FitData) -> int:
        """Return how many of this position's batches fit's data share.

        A loader's batches change with the number of ranks.
        """
        return self.batches if fit.of_tensors or self.ranks in (0, _ranks()) else 0

    def find(self, generator: torch.Generator, fit: FitData, stream: TextIO | None) -> None:
        """Make the data begin at this position's batch, or at the first of the epoch.

        If the batches differ, a position in mid-epoch becomes the beginning of that epoch, and a
        line in stream says so.

        Raises:
            ValueError: the data are another reader.
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
        """Skip batches already done, if the data cannot begin in the middle."""
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
