"""Supplies a trainer with batches, and counts the samples of each batch over all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..data import Batch, Prefetcher
from ..data.batch import KeyedJaggedTensor


class Share(NamedTuple):
    """A rank's share of a batch.

    Attributes:
        batch: this rank's samples.
        rows: number of this rank's samples; may be 0.
        samples: number of samples on all ranks together.
    """

    batch: Any
    rows: int
    samples: int


def of_tensors(
    data: tuple[torch.Tensor, ...],
    batch_size: int,
    generator: torch.Generator,
    rank: int,
    world_size: int,
) -> Generator[Share, None, None]:
    """Shuffle the rows of tensors, cut them into batches, and yield this rank's shares."""
    # Draw on the CPU, even if torch's default device is another one.
    order = torch.randperm(len(data[0]), generator=generator, device="cpu")
    for positions in order.to(data[0].device).split(batch_size):
        mine = positions.tensor_split(world_size)[rank]
        yield Share(tuple(tensor[mine] for tensor in data), len(mine), len(positions))


def of_loader(
    loader: Iterable[Any], device: torch.device, ranks: Ranks
) -> Generator[Share, None, None]:
    """Yield this rank's batches from a loader, reading ahead in another thread.

    The ranks add up the samples of a batch while they train on the previous batch.

    Raises:
        RuntimeError: (on all ranks) a rank has run out of batches before the others, or cannot
            read a batch.
    """
    # Another thread would not help with a list on the CPU, which is already in memory.
    if not (isinstance(loader, Prefetcher) or (isinstance(loader, list) and device.type == "cpu")):
        loader = Prefetcher(loader, device=device)
    batches = iter(loader)  # closing this generator also ends the prefetcher's thread
    step = 1
    ahead = ranks.read(batches)
    while (share := ranks.finish(ahead, step)) is not None:
        ahead = ranks.read(batches)
        yield share
        step += 1


def set_epoch(loader: Any, epoch: int) -> None:
    """Pass the epoch's number to a loader that needs it; readers count epochs themselves."""
    for shuffled in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        set_epoch = getattr(shuffled, "set_epoch", None)
        if callable(set_epoch):  # has no effect on workers that are already running
            set_epoch(epoch)


class Ranks:
    """Counts the samples of each batch over the ranks of a group; no group means a single rank."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device

    def read(self, batches: Iterator[Any]) -> _Ahead:
        """Read a batch, and start adding up its samples over all ranks."""
        batch, rows = None, 0
        error: Exception | None = None
        try:
            batch = next(batches)
            rows = rows_of(batch)
        except StopIteration as end:
            error = end
        except Exception as raised:
            if self._group is None:
                raise
            error = raised  # raise it only after the other ranks have been told
        if self._group is None:
            return _Ahead(batch, rows, error, torch.empty(0), None)
        ended = isinstance(error, StopIteration)
        facts = [rows, not ended, error is not None and not ended]
        counts = torch.tensor(facts, dtype=torch.int64, device=self._device)
        work = dist.all_reduce(counts, group=self._group, async_op=True)
        return _Ahead(batch, rows, error, counts, work)

    def finish(self, ahead: _Ahead, step: int) -> Share | None:
        """Finish counting and return this rank's share of the batch; None after the last batch."""
        ended = isinstance(ahead.error, StopIteration)
        if ahead.work is None:
            return None if ended else Share(ahead.batch, ahead.rows, ahead.rows)
        ahead.work.wait()
        samples, there, failed = ahead.counts.tolist()
        if failed:
            if ahead.error is not None and not ended:
                raise ahead.error
            raise RuntimeError(
                f"Trainer: {failed} of the other ranks could not read the batch of step {step}"
            )
        ranks = dist.get_world_size(self._group)
        if there not in (0, ranks):
            raise RuntimeError(
                f"Trainer: {there} of {ranks} ranks have a batch of step {step}; all loaders must "
                f"yield equally many batches, as the readers of sparsekit.data do"
            )
        return None if ended else Share(ahead.batch, ahead.rows, samples)


class _Ahead(NamedTuple):
    batch: Any
    rows: int
    error: Exception | None
    counts: torch.Tensor
    work: Any  # the pending all-reduce, a dist.Work; None on a single rank


def rows_of(batch: Any) -> int:
    """Return the number of samples in a batch.

    Raises:
        TypeError: the batch has a type whose samples cannot be counted.
    """
    if isinstance(batch, Batch):
        return batch.rows
    if isinstance(batch, torch.Tensor) and batch.dim():
        return len(batch)
    if isinstance(batch, KeyedJaggedTensor):
        return batch.stride()
    if isinstance(batch, dict | list | tuple) and batch:
        return rows_of(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])
    raise TypeError(
        f"Trainer: a batch must be a Batch, a tensor, or a tuple, list or dict that begins with "
        f"one, got {type(batch).__name__}"
    )


def steps_of(
    shares: Generator[Share, None, None], accumulate: int
) -> Iterator[tuple[list[Share], Share | None]]:
    """Yield the batches of each step, with the first batch of the next step (None at the end)."""
    batches = list(itertools.islice(shares, accumulate))
    while batches:
        following = list(itertools.islice(shares, accumulate))
        yield batches, following[0] if following else None
        batches = following
