"""Base class of all readers. It shuffles rows, divides them among ranks and makes batches."""

from __future__ import annotations

import math
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from .._nearest import did_you_mean_file
from ..errors import DataFormatError, check_choice, check_int
from .batch import Batch, concatenate, joined
from .columns import Columns

__all__ = ["Reader"]

OnError = Literal["raise", "skip"]
# A malformed row: its index among the requested rows, and a description of the fault.
Fault = tuple[int, str]


class Chunk(ABC):
    """Rows from a data set, in memory."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: np.ndarray) -> tuple[Batch | None, list[Fault]]:
        """Return the rows at these indices (int64), or None and a list of the malformed rows."""

    @abstractmethod
    def label_fault(self, row: int, reason: str) -> str:
        """Return an error message about a row's label: its location in the file, and the reason."""


class Unit(ABC):
    """A part of a data set that can be read separately; shuffling also permutes the units.

    Attributes:
        counts_fast: whether `count` is much faster than `chunks`.
    """

    counts_fast = True

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yield the unit's rows in chunks small enough for the reader's memory limit."""

    def count(self) -> int:
        """Return the number of rows, including malformed ones."""
        return sum(map(len, self.chunks()))

    def look(self) -> None:  # noqa: B027  (nothing to do)
        """Do the slow part of `count` in advance; can be called in any thread."""


class Reader(IterableDataset):
    """Base class of readers: an IterableDataset that yields `Batch`.

    Iterate over it, or pass it to `Prefetcher` or to ``DataLoader(reader, batch_size=None)``. With
    torch.distributed, each rank reads a share of the rows, and each worker of a DataLoader reads a
    share of its rank's rows. All ranks and workers yield the same number of batches, so the last
    batches may be short or empty; layers accept such batches. Rows must be counted before the
    first batch, unless there is one rank without workers, or the format stores the number of rows
    (Parquet).

    Attributes:
        columns: the columns to read, and how to convert them.
        skipped: number of malformed rows skipped so far, with ``on_error="skip"``.
    """

    columns: Columns
    _features: list[str]  # names of the features, in the order used in batches

    def __init__(
        self,
        units: Sequence[Unit],
        files: Sequence[Path],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        on_error: OnError,
        rank: int | None,
        world_size: int | None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_choice(name, "on_error", on_error, ("raise", "skip"))
        self.batch_size = check_int(name, "batch_size", batch_size, 1, 2**31 - 1)
        self.seed = check_int(name, "seed", seed, 0, 2**63 - 1)
        self.shuffle = bool(shuffle)
        self.skipped = 0
        self._on_error = on_error
        self._units = units
        self._rows: list[int | None] = [None] * len(units)
        self._files = [[file.name, file.stat().st_size] for file in files]
        self._ranks = _check_ranks(name, rank, world_size)
        self._epoch = 0
        self._step = 0  # number of batches yielded so far in this epoch
        self._resumed = 0  # step where the next iteration begins
        self._labels: tuple[float, ...] | None = None  # set by `limit_labels`

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order of shuffled rows.

        A completed iteration advances the reader to the next epoch. With a DataLoader's workers,
        call this method before each epoch, since the workers use copies of the reader.
        """
        self._epoch = check_int(type(self).__name__, "epoch", epoch, 0, 2**31 - 1)
        self._step = self._resumed = 0

    def limit_labels(self, least: float, most: float, *, between: bool = True) -> None:
        """Treat rows whose labels are invalid as malformed rows; see ``on_error``.

        Args:
            least: the smallest valid label.
            most: the largest valid label.
            between: whether values between ``least`` and ``most`` are valid, too.
        """
        self._labels = least, most, between

    def count_rows(self) -> int:
        """Count the rows, including malformed ones; the first call reads the whole data set."""
        missing = [unit for unit, rows in zip(self._units, self._rows, strict=True) if rows is None]
        if missing:
            with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
                list(pool.map(lambda unit: unit.look(), missing))
        return sum(map(self._count, range(len(self._units))))

    @property
    def counts_fast(self) -> bool:
        """Return whether `count_rows` is much faster than reading an epoch; False for pipes."""
        return all(unit.counts_fast for unit in self._units)

    def steps_per_epoch(self, num_workers: int = 0) -> int:
        """Return the number of batches per epoch on each rank; counts the rows if necessary."""
        shards = self._rank_and_world_size()[1] * max(1, num_workers)
        return max(1, num_workers) * self._steps(shards)

    def state_dict(self) -> dict[str, Any]:
        """Return the iteration's position as numbers and strings, for JSON or torch.save.

        The position is just after the last yielded batch. Each worker of a DataLoader has its own
        position. To resume with workers, use a loader that collects their states, such as
        torchdata's StatefulDataLoader.
        """
        return {
            "epoch": self._epoch,
            "step": self._step,
            "skipped": self.skipped,
            "shards": self._shard()[1],
            **self._plan(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume: the next iteration begins just after the batch where `state` was taken.

        Raises:
            ValueError: the state did not come from a reader, its step is beyond the end of the
                files, or that reader was set up differently: with other files, another order or,
                for a state taken within an epoch, another batch size or number of ranks or workers.
        """
        name = type(self).__name__
        try:
            saved = {key: state[key] for key in self._plan()}
            place = [operator.index(state[key]) for key in ("epoch", "step", "skipped", "shards")]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name}: not the state of a reader: {error!r}") from error
        epoch, step, skipped, shards = place
        if min(place) < 0:
            raise ValueError(f"{name}: not the state of a reader: {state!r}")
        for key, now in self._plan().items():
            if saved[key] != now and (step or key != "batch_size"):
                raise ValueError(
                    f"{name}: the state was saved with {key}={saved[key]!r}, and this reader has "
                    f"{now!r}"
                )
        if step and shards != self._shard()[1]:
            raise ValueError(
                f"{name}: the state was saved in mid-epoch with {shards} ranks and workers, and "
                f"now there are {self._shard()[1]}"
            )
        if step and not self._reaches(epoch, step):
            raise ValueError(
                f"{name}: the state is of step {step}, but an epoch has only {self._steps(shards)}"
            )
        self._epoch, self._step, self._resumed, self.skipped = epoch, step, step, skipped

    def _reaches(self, epoch: int, step: int) -> bool:
        """Return whether an epoch has at least ``step`` batches; count only as far as necessary."""
        shards = self._shard()[1]
        if shards > 1:
            return step <= self._steps(shards)
        passed = 0
        for number in self._order(epoch):
            if passed > (step - 1) * self.batch_size:
                break
            passed += self._count(number)
        return passed > (step - 1) * self.batch_size

    def _count(self, number: int) -> int:
        """Return the number of rows in a unit."""
        rows = self._rows[number]
        if rows is None:
            rows = self._rows[number] = self._units[number].count()
        return rows

    def __iter__(self) -> Iterator[Batch]:
        shard, shards = self._shard()
        first, last, steps = 0, None, None
        if shards > 1:
            total = self.count_rows()
            first, last = total * shard // shards, total * (shard + 1) // shards
            steps = self._steps(shards)
        self._step, self._resumed = self._resumed, 0
        for batch in self._batches(first + self._step * self.batch_size, last):
            self._step += 1
            yield batch
        while steps is not None and self._step < steps:
            self._step += 1
            yield self._empty()
        self._epoch, self._step = self._epoch + 1, 0

    def __getstate__(self) -> dict[str, Any]:
        # Store the rank, since torch.distributed is not initialized in a worker process.
        return {**self.__dict__, "_ranks": self._rank_and_world_size()}

    def _empty(self) -> Batch:
        """Return a batch with no rows."""
        label = None if self.columns.label is None else torch.empty(0)
        return Batch(label, torch.empty(0, len(self.columns.dense)), joined(self._features, []))

    def _plan(self) -> dict[str, Any]:
        """Return all settings that determine which rows are in which batch."""
        return {
            "files": self._files,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            **self.columns.settings(),
        }

    def _rank_and_world_size(self) -> tuple[int, int]:
        if self._ranks is None and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._ranks or (0, 1)

    def _shard(self) -> tuple[int, int]:
        """Return the index of this process's share of the rows, and the number of shares."""
        rank, world_size = self._rank_and_world_size()
        worker = get_worker_info()
        if worker is None:
            return rank, world_size
        return rank * worker.num_workers + worker.id, world_size * worker.num_workers

    def _steps(self, shards: int) -> int:
        return math.ceil(math.ceil(self.count_rows() / shards) / self.batch_size)

    def _batches(self, first: int, last: int | None) -> Iterator[Batch]:
        """Yield batches of rows [first, last) in the epoch's order."""
        parts: list[Batch] = []
        have = 0
        for chunk, rows in self._pieces(first, last):
            while len(rows):
                some, rows = rows[: self.batch_size - have], rows[self.batch_size - have :]
                parts.append(self._read(chunk, some))
                have += len(some)
                if have == self.batch_size:
                    yield concatenate(parts)
                    parts, have = [], 0
        if parts:
            yield concatenate(parts)

    def _pieces(self, first: int, last: int | None) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Yield rows [first, last) in the epoch's order, as chunks and indices of rows in them."""
        passed = 0
        for number in self._order(self._epoch):
            if last is not None and passed >= last:
                return
            # Skip rows by counting them, which is faster than parsing them.
            if passed < first:
                rows = self._count(number)
                if passed + rows <= first:
                    passed += rows
                    continue
            for which, chunk in enumerate(self._units[number].chunks()):
                order = self._order_of_chunk(number, which, len(chunk))
                begin, end = first - passed, len(chunk) if last is None else last - passed
                passed += len(chunk)
                if begin < len(chunk) and end > 0:
                    yield chunk, order[max(begin, 0) : end]

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self._units))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self._units)).tolist()

    def _order_of_chunk(self, unit: int, chunk: int, rows: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(rows)
        return np.random.default_rng([self.seed, self._epoch, unit, chunk]).permutation(rows)

    def _read(self, chunk: Chunk, rows: np.ndarray) -> Batch:
        while True:
            batch, faults = chunk.read(rows)
            # Check the labels. As long as some row is malformed, there is no batch to check.
            if batch is not None and self._labels is not None and batch.label is not None:
                faults = self._wrong_labels(chunk, rows, batch.label.numpy())
            if faults and self._on_error == "raise":
                raise DataFormatError(faults[0][1])
            if batch is not None and not faults:
                return batch
            self.skipped += len(faults)
            rows = np.delete(rows, [place for place, _ in faults])

    def _wrong_labels(self, chunk: Chunk, rows: np.ndarray, label: np.ndarray) -> list[Fault]:
        least, most, between = self._labels or (-math.inf, math.inf, True)
        right = (label >= least) & (label <= most)
        if not between:
            right = (label == least) | (label == most)
        places = np.flatnonzero(~right).tolist()
        if not places:
            return []
        wanted = f"in [{least:g}, {most:g}]" if between else f"{least:g} or {most:g}"
        first = places[0]
        text = chunk.label_fault(int(rows[first]), f"the label must be {wanted}")
        return [(place, text) for place in places]


def _check_ranks(name: str, rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"{name}: rank={rank} and world_size={world_size} go together")
    world_size = check_int(name, "world_size", world_size, 1, 2**31 - 1)
    return check_int(name, "rank", rank, 0, world_size - 1), world_size


def list_files(
    name: str, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], pipes: bool = False
) -> list[Path]:
    """Check the paths given to a reader, and return them as a list.

    Raises:
        ValueError: there are no paths.
        FileNotFoundError, IsADirectoryError: a path is not a file.
        DataFormatError: a path is a device, or a pipe that the reader does not support.
    """
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not paths:
        raise ValueError(f"{name}: files is empty")
    for path in map(Path, paths):
        if path.is_dir():
            raise IsADirectoryError(f"{name}: {path} is a folder; pass the files in it")
        if not path.exists():
            raise FileNotFoundError(f"{name}: {path} does not exist{did_you_mean_file(path)}")
        if not path.is_file() and not (pipes and path.is_fifo()):
            raise DataFormatError(f"{path}: is no regular file, from which alone {name} reads")
    return [Path(path) for path in paths]
