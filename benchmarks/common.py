"""Defines the results, inputs and machine description that all benchmarks share.

A result compares sparsekit with a roof or a peer in one case, on the same inputs in the same run. A
peer is another library. A roof is a limit of the hardware, such as the speed of a copy; it is
treated like a peer that runs at this limit.
"""

import os
import platform
import statistics
import subprocess
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

import sparsekit

ROOT = Path(__file__).resolve().parents[1]
# The peers' packages; the description of the machine includes their versions.
PACKAGES = ("numpy", "pandas", "libboost-headers", "fbgemm-gpu-cpu", "torchrec", "xxhash")


def median_and_spread(samples: list[float]) -> tuple[float, float]:
    """Return the median, and (upper - lower quartile) / median, which is 0 for one sample."""
    if len(samples) == 1:
        return samples[0], 0.0
    low, median, high = statistics.quantiles(samples, n=4)
    return median, (high - low) / median


@dataclass(frozen=True)
class Curve:
    """A case's position in a plot: figure, series, the x axis's name, x, and the item count."""

    figure: str
    series: str
    x_name: str
    x: float
    items: int


@dataclass(frozen=True)
class Comparison:
    """Comparison of a case with one roof or one peer.

    Samples are milliseconds per call, in the order of measurement. On the CPU, our calls and the
    peer's calls are timed alternately, so samples with the same index were taken at about the same
    time. A roof may have a single sample. `line` is the name of the case's target in `targets.py`,
    if any. With the clock "collectives", samples are collectives per step instead of times.
    """

    case: str
    against: str
    samples: list[float]
    against_samples: list[float]
    line: str = ""
    target: float | None = None
    bytes: int | None = None
    clock: str = "wall"
    curve: Curve | None = None

    @property
    def ms(self) -> float:
        """Return the median of our samples."""
        return median_and_spread(self.samples)[0]

    @property
    def against_ms(self) -> float:
        """Return the median of the roof's or the peer's samples."""
        return median_and_spread(self.against_samples)[0]

    @property
    def ratio(self) -> float:
        """Return our speed divided by the speed of the roof or the peer."""
        return self.against_ms / self.ms

    @property
    def met(self) -> bool | None:
        """Return whether the target is met; None if there is no target."""
        return None if self.target is None else self.ratio >= self.target

    def row(self) -> dict[str, object]:
        """Return the comparison as a row for the JSON file."""
        ms, spread = median_and_spread(self.samples)
        against_ms, against_spread = median_and_spread(self.against_samples)
        return {
            "case": self.case,
            "line": self.line,
            "against": self.against,
            "clock": self.clock,
            "ms": ms,
            "spread": spread,
            "against_ms": against_ms,
            "against_spread": against_spread,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
            "bytes": self.bytes,
            "curve": self.curve and asdict(self.curve),
            "samples": self.samples,
            "against_samples": self.against_samples,
        }

    def text(self) -> str:
        """Format the comparison as a line to print while the benchmarks run."""
        row = self.row()
        target = "" if self.target is None else f"{self.target:>7.2f}x"
        verdict = {None: "", True: "  met", False: "  NOT MET"}[self.met]
        clock = "" if self.clock == "wall" else f"[{self.clock}] "
        return (
            f"{clock + self.case:<72}{self.ms:>10.3f}{row['spread']:>6.0%}  {self.against:<28}"
            f"{self.against_ms:>10.3f}{row['against_spread']:>6.0%}{self.ratio:>8.2f}x"
            f"{target}{verdict}"
        )


HEADER = (
    f"{'case':<72}{'ms':>10}{'spread':>6}  {'against':<28}{'ms':>10}{'spread':>6}{'ratio':>9}"
    f"{'target':>8}"
)


@cache
def zipf_cumulative(exponent: float, num_ids: int) -> np.ndarray:
    """Return the cumulative sums of r ** -exponent for r = 1 to num_ids, float64 ``[num_ids]``."""
    return np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -exponent)


def zipf_keys(n: int, exponent: float, num_ids: int, seed: int = 0) -> torch.Tensor:
    """Draw keys ``[n]`` in [0, num_ids); key k is drawn with weight (k + 1) ** -exponent."""
    cumulative = zipf_cumulative(exponent, num_ids)
    draws = np.random.default_rng(seed).random(n) * cumulative[-1]
    return torch.from_numpy(np.searchsorted(cumulative, draws, side="right"))


def random_keys(n: int, seed: int = 0) -> torch.Tensor:
    """Draw keys ``[n]`` from the whole range of int64; duplicates are very unlikely."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)


def assert_same_sums(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that sums are equal up to rounding, with a tolerance relative to the largest sum."""
    difference = float((actual - expected).abs_().max()) if len(actual) else 0.0
    largest = float(expected.abs().max()) if len(expected) else 0.0
    assert difference <= 1e-4 * largest + 1e-5, f"off by {difference}; the largest is {largest}"


@cache
def machine() -> dict[str, object]:
    """Describe the machine and the software, so that results can be interpreted."""
    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = None
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "cache_bytes": last_cache_bytes(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": packages,
        "build": sparsekit.build_info(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def last_cache_bytes() -> int:
    """Return the size of the last-level cache, or 32 MiB if the system does not report it."""
    sizes = [_read(str(p)) for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size")]
    kib = [int(size[:-1]) for size in sizes if size.endswith("K")]
    return max(kib, default=32 << 10) << 10


def _cpu() -> str:
    lines = [x for x in _read("/proc/cpuinfo").splitlines() if x.startswith("model name")]
    return lines[0].split(":")[1].strip() if lines else platform.processor()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _commit() -> str:
    """Return this clone's commit, with the suffix "-dirty" if files have been changed."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--match="]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
