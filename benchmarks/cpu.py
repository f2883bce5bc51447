"""Times calls on the CPU, measures the roofs, and compares sides.

A side is sparsekit or a peer. All sides of a case are timed alternately, A B C A B C, because a
machine's speed drifts. A timed call includes the allocation and release of its outputs. Each call
uses the next of several inputs, which together exceed the cache; "in cache" cases have one input.

R1 is the speed of a copy, counting both bytes read and bytes written. R2 is the number of random
64-byte lines read per second from an array as large as the table. Each is the best result among
several implementations, with pages of 4 KiB and of 2 MiB.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import common
from .common import Comparison, Curve
from .peers import native, optional
from .targets import CPU_TARGETS, target_of

Call = Callable[[], Any]


@dataclass(frozen=True)
class Side:
    """Calls that do the same work on different inputs; `setup` runs before each call, untimed."""

    calls: Sequence[Call]
    setup: Call | None = None


class Cpu:
    """The CPU under test; `quick` selects toy sizes, and `brief` selects fewer rounds."""

    def __init__(
        self, quick: bool = False, threads: int | None = None, brief: bool = False
    ) -> None:
        available = len(os.sched_getaffinity(0))
        self.quick = quick
        self.threads = threads or min(2, available)
        # Minimum number of rounds, and the milliseconds to fill with further rounds.
        self.rounds, self.budget_ms = (5, 500) if brief else (7, 2_000)
        # Minimum duration of a sample in milliseconds; shorter calls are repeated within a sample.
        self.least_ms = 0.01 if quick else 1.0
        self.cache_bytes = 1 << 12 if quick else 2 * common.last_cache_bytes()
        self.skipped: dict[str, str] = {}
        self._copy_ms_per_byte: dict[int, list[float]] = {}
        torch.set_num_threads(self.threads)

    # ---- sizes, inputs, peers ----

    def size(self, full: int, quick: int) -> int:
        """Return `full`, or `quick` when using toy sizes."""
        return quick if self.quick else full

    def copies(self, num_bytes: int, most: int = 24) -> int:
        """Return how many inputs of `num_bytes` together exceed the cache, limited to [2, most]."""
        return max(2, min(most, -(-self.cache_bytes // max(1, num_bytes))))

    def has(self, against: str, reason: str | None) -> bool:
        """Return whether a peer can be measured; if not, print and record the reason once."""
        if reason and against not in self.skipped:
            print(f"skipped: {against}: {reason}", flush=True)
            self.skipped[against] = reason
        return reason is None

    def has_module(self, against: str, module: str, package: str = "") -> bool:
        """Return whether a peer's Python module is installed."""
        return self.has(against, optional.missing(module, package))

    @contextmanager
    def using(self, threads: int | None) -> Iterator[None]:
        """Set torch's number of threads within this context; None means the default number."""
        torch.set_num_threads(threads or self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)

    # ---- comparisons ----

    def compare(
        self,
        case: str,
        ours: Side | Sequence[Call],
        peers: Mapping[str, Side | Sequence[Call]],
        line: str = "",
        *,
        threads: int | None = None,
        num_bytes: int | None = None,
        curve: Curve | None = None,
    ) -> Iterator[Comparison]:
        """Time our calls and all peers' calls alternately, and yield a comparison with each peer.

        Args:
            case: description, including sizes; unique within the suite.
            ours: calls, one for each input.
            peers: each peer's calls.
            line: name of the case's target in `targets.py`; empty if it has none.
            threads: number of threads; None means the default number.
            num_bytes: number of bytes that a call must move; adds a comparison with R1.
            curve: position of the case in a plot.
        """
        with self.using(threads):
            times = self.time([ours, *peers.values()])
        rows = dict(zip(peers, times[1:], strict=True))
        if num_bytes is not None:
            rows["R1"] = self.copy_ms(num_bytes, threads)
        for against, theirs in rows.items():
            target = target_of(CPU_TARGETS, line, against)
            yield Comparison(case, against, times[0], theirs, line, target, num_bytes, curve=curve)

    def time(
        self, calls_or_sides: Sequence[Side | Sequence[Call]], rounds: int = 0
    ) -> list[list[float]]:
        """Return milliseconds per call by side and round; rounds=0 runs as many as time allows."""
        sides = [x if isinstance(x, Side) else Side(x) for x in calls_or_sides]
        loops, round_ms = [], 0.0
        for i, side in enumerate(sides):
            # Warm up, since the first call may load code, start threads or grow a heap. A long call
            # is not repeated: warming up hardly affects its time.
            ms = _time(side, i * 7, 1)
            if ms < 500:
                ms = _time(side, i * 7 + 1, 1)
            loops.append(1 if side.setup else max(1, min(10_000, math.ceil(self.least_ms / ms))))
            round_ms += ms * loops[-1]
        if self.quick:
            rounds = 3
        elif not rounds:
            least = self.rounds if round_ms < 3_000 else min(5, self.rounds)
            rounds = max(least, min(31, int(self.budget_ms / round_ms)))
        times: list[list[float]] = [[] for _ in sides]
        for r in range(rounds):
            for i, (side, count) in enumerate(zip(sides, loops, strict=True)):
                # Start the sides at inputs that are far apart, so that no side finds its inputs in
                # the cache because another side has just used them.
                first = r * count + i * len(side.calls) // len(sides)
                times[i].append(_time(side, first, count))
        return times

    # ---- roofs ----

    def copy_ms(self, num_bytes: int, threads: int | None = None) -> list[float]:
        """Return samples of the milliseconds to move `num_bytes` at R1, the speed of a copy."""
        threads = threads or self.threads
        if threads not in self._copy_ms_per_byte:
            best: list[float] = []
            for huge in (False, True):
                size = self.size(256 << 20, 1 << 14)
                source, target = (native.pages(size, huge) for _ in range(2))
                with self.using(threads):
                    times = self.time([[partial(target.copy_, source)]])[0]
                if not best or statistics.median(times) < statistics.median(best):
                    best = times
            self._copy_ms_per_byte[threads] = [ms / (2 * size) for ms in best]
        return [ms * num_bytes for ms in self._copy_ms_per_byte[threads]]

    def gather_sides(self, table_bytes: int, n: int) -> list[list[Call]]:
        """Return sides that gather n random lines from an array of this size, to measure R2."""
        lines = max(1, table_bytes // 64)
        generator = torch.Generator().manual_seed(1)
        count = self.copies(8 * n, most=8)
        inputs = [torch.randint(0, lines, (n,), generator=generator) for _ in range(count)]
        sides: list[list[Call]] = []
        for huge in (False, True):
            array = native.pages(64 * lines, huge).view(torch.float32).view(lines, 16)
            ways: list[Callable[..., object]] = [partial(torch.index_select, array, 0)]
            if native.missing("gather") is None:
                ways.append(partial(native.gather, array))
            sides += [[partial(way, keys) for keys in inputs] for way in ways]
        return sides

    def against_gather(
        self,
        case: str,
        ours: Side | Sequence[Call],
        table_bytes: int,
        n: int,
        line: str = "",
        *,
        threads: int,
        curve: Curve | None = None,
    ) -> Iterator[Comparison]:
        """Alternate our calls with the fastest side of `gather_sides`, which measures R2.

        Args:
            case: as for `compare`.
            ours: calls, one for each input.
            table_bytes: size of the array.
            n: number of lines that a call reads.
            line: as for `compare`.
            threads: number of threads for both sides.
            curve: as for `compare`.
        """
        self.has("R2 by a C++ loop", native.missing("gather"))
        with self.using(threads):
            ways = self.gather_sides(table_bytes, n)
            trial = [statistics.median(times) for times in self.time(ways, rounds=3)]
            best = ways[trial.index(min(trial))]
            times = self.time([ours, best])
        target = target_of(CPU_TARGETS, line, "R2")
        yield Comparison(case, "R2", times[0], times[1], line, target, 64 * n, curve=curve)

    def roofs(self) -> str:
        """Return a line about R1 to print at the end (R2 is omitted: it differs between tables)."""
        rates = [
            f"{1e-6 / statistics.median(ms):,.1f} GB/s with {threads} threads"
            for threads, ms in self._copy_ms_per_byte.items()
        ]
        return f"R1, copy: {', '.join(rates) or 'not needed'}"

    def describe(self) -> dict[str, object]:
        """Describe the machine, the software and R1, so that results can be interpreted."""
        rates = {
            str(threads): 1e3 / statistics.median(ms)
            for threads, ms in self._copy_ms_per_byte.items()
        }
        return {**common.machine(), "threads": self.threads, "r1_bytes_per_s": rates}


def _time(side: Side, first: int, count: int) -> float:
    """Time `count` consecutive calls, starting at call `first`; return milliseconds per call."""
    calls = [side.calls[(first + i) % len(side.calls)] for i in range(count)]
    if side.setup is not None:
        side.setup()
    start = time.perf_counter()
    for call in calls:
        call()
    return 1e3 * (time.perf_counter() - start) / count
