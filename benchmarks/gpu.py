"""Times calls on a GPU, measures the roofs, and compares calls with roofs and peers.

R1 is the speed of a copy within the device, counting both bytes read and bytes written. R2 is the
number of random 64-byte lines read per second from an array as large as the table.
"""

import gc
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import sparsekit

from .common import Comparison, machine
from .targets import GPU_TARGETS, target_of


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call, on the device's clock ("events") and on the wall clock.

    The wall clock starts and stops while the device is idle. It includes the host's launches and
    waits, so it is the relevant clock for a call that waits for a result.
    """

    events: list[float]
    wall: list[float]

    @property
    def ms(self) -> float:
        """Return the median time on the device's clock."""
        return statistics.median(self.events)

    def on(self, clock: str) -> list[float]:
        """Return the samples from the given clock, "events" or "wall"."""
        return self.wall if clock == "wall" else self.events


class Gpu:
    """The GPU under test or, to check that all benchmarks run, the CPU with toy sizes."""

    repeats = 7

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.quick = quick
        self.on_gpu = device.type == "cuda"
        self.generator = torch.Generator(device).manual_seed(0)
        self.gather_roofs: dict[int, float] = {}
        self.skipped: dict[str, str] = {}
        # Both tensors exceed the L2 cache. Before each timed call, `_flush` is written. This
        # removes the call's input from the cache, and takes long enough for the host to queue the
        # call. Then `_unwritten` is read, so that the cache writes back the lines of `_flush`
        # before the timed call, not during it.
        self._flush = torch.empty(1 << 10 if quick else 1 << 29, dtype=torch.uint8, device=device)
        self._unwritten = torch.zeros(1 << 8 if quick else 1 << 26, device=device)
        self.copy_roof = self._measure_copy()

    # ---- clocks ----

    def time(self, run: Callable[[], object], setup: Callable[[], object] | None = None) -> Timing:
        """Time `run`; `setup` runs before each call, untimed."""
        for _ in range(2):
            self._prepare(setup)
            run()
        device, wall = [], []
        for _ in range(self.repeats):
            self._prepare(setup)
            device.append(self._device_ms(run))
        for _ in range(self.repeats):
            self._prepare(setup)
            self._synchronize()
            wall.append(self._wall_ms(run))
        return Timing(device, wall)

    def _prepare(self, setup: Callable[[], object] | None) -> None:
        if setup is not None:
            setup()
        self._flush.zero_()
        self._unwritten.sum()

    def _device_ms(self, run: Callable[[], object]) -> float:
        if not self.on_gpu:
            return self._wall_ms(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def _wall_ms(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        self._synchronize()
        return 1e3 * (time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    # ---- roofs ----

    def _measure_copy(self) -> float:
        """Measure R1 in bytes per second, as the best result over several sizes."""
        best = 0.0
        for size in (1 << 10,) if self.quick else (1 << 28, 1 << 30, 1 << 32):
            size = self.fit(size, bytes_each=2)
            source = torch.zeros(size, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            timing = self.time(partial(target.copy_, source))
            best = max(best, 2e3 * size / timing.ms)
        return best

    def gather_roof(self, table_bytes: int) -> float:
        """Measure R2 in lines per second for an array of this size, as the best of several ops."""
        lines = max(1, table_bytes // 64)
        if lines not in self.gather_roofs:
            table = torch.zeros(lines, 16, device=self.device)
            n = self.size(16 << 20, 1_000)
            keys = self.randint(lines, n)
            # The last two ops sum the lines, so they write almost nothing.
            offsets = torch.arange(0, n + 1, 64, device=self.device)
            keys = keys[: int(offsets[-1])]
            ways: list[Callable[[], object]] = [
                lambda: torch.index_select(table, 0, keys),
                lambda: sparsekit.ops.gather_rows(table, keys),
                lambda: sparsekit.ops.embedding_bag(table, keys, offsets),
                lambda: F.embedding_bag(keys, table, offsets, mode="sum", include_last_offset=True),
            ]
            self.gather_roofs[lines] = max(1e3 * len(keys) / self.time(way).ms for way in ways)
        return self.gather_roofs[lines]

    # ---- comparisons ----

    def against_r1(self, case: str, ours: Timing, num_bytes: int, target: str = "") -> Comparison:
        """Compare with R1: the time to move these bytes at the speed of a copy."""
        roof_ms = 1e3 * num_bytes / self.copy_roof
        return self._compare(case, ours, "R1", Timing([roof_ms], [roof_ms]), target, num_bytes)

    def against_r2(
        self, case: str, ours: Timing, lines: int, table_bytes: int, target: str = ""
    ) -> Comparison:
        """Compare with R2: the time to read random lines from an array of this size."""
        roof_ms = 1e3 * lines / self.gather_roof(table_bytes)
        return self._compare(case, ours, "R2", Timing([roof_ms], [roof_ms]), target, 64 * lines)

    def against(
        self, case: str, ours: Timing, peer: str, theirs: Timing, target: str = "", *,
        wall: bool = False,
    ) -> Iterator[Comparison]:  # fmt: skip
        """Compare with a peer on the device's clock and, if `wall`, on the wall clock too."""
        for clock in ("events", "wall") if wall else ("events",):
            yield self._compare(case, ours, peer, theirs, target, None, clock)

    def _compare(
        self, case: str, ours: Timing, against: str, theirs: Timing, target: str,
        num_bytes: int | None, clock: str = "events",
    ) -> Comparison:  # fmt: skip
        return Comparison(
            case, against, ours.on(clock), theirs.on(clock), target,
            target_of(GPU_TARGETS, target, against), num_bytes, clock,
        )  # fmt: skip

    # ---- inputs ----

    def size(self, full: int, quick: int) -> int:
        """Return `full`, or `quick` when using toy sizes."""
        return quick if self.quick else full

    def fit(self, count: int, bytes_each: float) -> int:
        """Return `count`, halved until that many items leave some memory free."""
        # First free modules with hooks, since they are in reference cycles; then free torch's
        # cached memory.
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            while count > 1 and count * bytes_each > 0.8 * free:
                count //= 2
        return count

    def randint(self, high: int, n: int) -> torch.Tensor:
        """Return int64 ``[n]``, uniform in [0, high)."""
        return torch.randint(0, high, (n,), generator=self.generator, device=self.device)

    def randn(self, *shape: int) -> torch.Tensor:
        """Return normal random numbers in float32."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def distinct_keys(self, start: int, end: int) -> torch.Tensor:
        """Return the keys at positions start to end - 1 of a fixed sequence of distinct keys."""
        return torch.arange(start, end, device=self.device) * 0x1E3779B97F4A7C15

    def zipf(self, n: int, exponent: float, num_ids: int) -> torch.Tensor:
        """Draw zipf ids, int64 ``[n]`` in [0, num_ids); frequent ids are not adjacent."""
        ranks = torch.arange(1, num_ids + 1, dtype=torch.float64, device=self.device)
        cumulative = ranks.pow_(-exponent).cumsum_(0)
        draws = torch.rand(n, generator=self.generator, device=self.device, dtype=torch.float64)
        rank = torch.searchsorted(cumulative, draws * cumulative[-1]).clamp_(max=num_ids - 1)
        return rank * 2654435761 % num_ids  # prime, so each popularity rank gets its own id

    def array_module(self) -> Any:
        """Return the module cupy on a GPU, or None if it is not installed; numpy on the CPU."""
        if not self.on_gpu:
            return np
        if find_spec("cupy") is None:
            return None
        return import_module("cupy")

    def roofs(self) -> str:
        """Return lines about R1 and R2 to print at the end."""
        lines = [f"R1, copy: {self.copy_roof / 1e9:,.0f} GB/s"]
        for table_bytes, roof in self.gather_roofs.items():
            lines.append(
                f"R2, 64-byte lines of {64 * table_bytes / 1e6:,.0f} MB: {roof / 1e6:,.0f} M/s"
            )
        return "\n".join(lines)

    def describe(self) -> dict[str, object]:
        """Describe the machine, the software and R1, so that results can be interpreted."""
        info = {
            **machine(),
            "device": "cpu",
            "cuda": torch.version.cuda,
            "r1_bytes_per_s": self.copy_roof,
            "r2_lines_per_s": {str(64 * n): roof for n, roof in self.gather_roofs.items()},
        }
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            info["device"] = properties.name
            info["memory_bytes"] = properties.total_memory
            info["driver"] = _driver()
        cupy = self.array_module()
        info["cupy"] = None if cupy is None else cupy.__version__
        return info


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
