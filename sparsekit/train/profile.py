"""Profiles training steps: the time of each op, and the bytes that it sends to other ranks."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, record_function

from ..distributed import Exchange


@dataclass(frozen=True)
class Op:
    """Profile of an op, summed over all ranks.

    Attributes:
        name: name of a torch or sparsekit op or of a GPU kernel; or ``"exchange: PURPOSE"`` for
            communication by layers, for dense gradients or for a placement (see `DeepCoNN`).
        calls: number of calls.
        seconds: time in the op itself, excluding the ops that it calls. This is GPU time if the op
            used the GPU, otherwise CPU time.
        share: the op's fraction of the total seconds of all ops.
        bytes_moved: number of bytes sent to other ranks.
    """

    name: str
    calls: int
    seconds: float
    share: float
    bytes_moved: int


@dataclass
class Profile:
    """Result of `profiled`, filled in when the context ends.

    Attributes:
        ops: all ops, the slowest first; equal on all ranks.
        ranks: number of ranks.
    """

    ops: list[Op] = field(default_factory=list)
    ranks: int = 1

    @property
    def bytes_moved(self) -> int:
        """Return the total number of bytes sent between ranks."""
        return sum(op.bytes_moved for op in self.ops)

    @property
    def seconds(self) -> float:
        """Return the total seconds of all ops on all ranks."""
        return sum(op.seconds for op in self.ops)

    def table(self, most: int = 20) -> str:
        """Format a table of the slowest ops and of all ops that send bytes to other ranks.

        Args:
            most: number of slowest ops to list; ops that send bytes are always listed, and one line
                sums up the others.
        """
        shown = [op for i, op in enumerate(self.ops) if i < most or op.bytes_moved]
        rest = [op for op in self.ops if op not in shown]
        lines = [f"{'op':44}{'calls':>8}{'time':>12}{'share':>8}{'bytes moved':>16}"]
        lines += [_line(op.name, [op]) for op in shown]
        if rest:
            lines.append(_line(f"{len(rest)} others", rest))
        lines.append(_line("all", self.ops))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _line(name: str, ops: Sequence[Op]) -> str:
    name = name if len(name) <= 42 else f"{name[:41]}…"
    milliseconds = 1e3 * sum(op.seconds for op in ops)
    return (
        f"{name:44}{sum(op.calls for op in ops):8,}{milliseconds:9,.1f} ms"
        f"{sum(op.share for op in ops):8.1%}{sum(op.bytes_moved for op in ops):16,}"
    )


@contextlib.contextmanager
def profiled(trace: str | os.PathLike[str] | None = None) -> Iterator[Profile]:
    """Profile the code in this context, for instance some training steps.

    All ranks must enter and leave the context together; each gets the sums over all ranks. Bytes
    are counted only in sparsekit's own communication: keys, vectors and their gradients, and dense
    gradients if the ranks share memory. Otherwise DistributedDataParallel averages the dense
    gradients, and their bytes are not counted. Run one or two steps first as a warm-up.

    Args:
        trace: path of a Chrome trace to write, for chrome://tracing or ui.perfetto.dev. Rank r > 0
            inserts ``.rank{r}`` before the suffix.

    Yields:
        A `Profile` that is filled in when the context ends.

    Raises:
        RuntimeError: another profile is still running.
        OSError: the trace cannot be written.
    """
    if Exchange.watch is not None:
        raise RuntimeError("sparsekit: profiled has been entered before, and not left")
    moved: Counter[str] = Counter()

    def watch(exchange: Exchange, sent: int) -> contextlib.AbstractContextManager[Any]:
        name = f"exchange: {exchange.purpose}"
        moved[name] += sent
        return record_function(name)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profile = Profile()
    Exchange.watch = watch
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            yield profile
    finally:
        Exchange.watch = None
    own = [
        (event.key, event.count, event.self_cpu_time_total, event.self_device_time_total)
        for event in profiler.key_averages()
    ]
    ranks: list[Any] = [(own, moved)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (own, moved))
    profile.ops, profile.ranks = _ops(ranks), len(ranks)
    if trace is not None:
        path, rank = Path(trace), dist.get_rank() if dist.is_initialized() else 0
        if rank:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        path.touch()  # raise now: torch would only log a failed write
        profiler.export_chrome_trace(str(path))


def _ops(ranks: Sequence[tuple[list[tuple[str, int, float, float]], Counter[str]]]) -> list[Op]:
    # For each op: number of calls, microseconds on the CPU, and microseconds on the device.
    sums: defaultdict[str, tuple[int, float, float]] = defaultdict(lambda: (0, 0.0, 0.0))
    moved: Counter[str] = Counter()
    for events, sent in ranks:
        moved.update(sent)
        for name, calls, cpu, device in events:
            before = sums[name]
            sums[name] = before[0] + calls, before[1] + cpu, before[2] + device
    taken = 2 if any(each[2] > 0 for each in sums.values()) else 1
    total = sum(each[taken] for each in sums.values()) or 1.0
    found = [
        Op(name, sums[name][0], sums[name][taken] / 1e6, sums[name][taken] / total, moved[name])
        for name in {*sums, *moved}
    ]
    return sorted(found, key=lambda op: (-op.seconds, op.name))
