"""What all benchmarks share: the form of a result, inputs, and the stamp of the machine.

A result compares a case of ours with one roof or one peer, on the same inputs in the same run. A
roof counts as a peer that takes the time the roof allows, so one ratio serves all.
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
# What else may be measured, and so belongs to the stamp.
PACKAGES = ("numpy", "pandas", "libboost-headers", "fbgemm-gpu-cpu", "torchrec", "xxhash")


def median_and_spread(samples: list[float]) -> tuple[float, float]:
    """Median and (upper - lower quartile) / median; one sample has no spread."""
    if len(samples) == 1:
        return samples[0], 0.0
    low, median, high = statistics.quantiles(samples, n=4)
    return median, (high - low) / median


@dataclass(frozen=True)
class Curve:
    """Where a case lies in a plot: a figure, a series in it, what x is, and how many items."""

    figure: str
    series: str
    x_name: str
    x: float
    items: int


@dataclass(frozen=True)
class Comparison:
    """A case against one roof or one peer.

    Samples are milliseconds a call, in the order in which they were taken; those of the CPU were
    taken in turns, so sample i of ours and sample i of the peer saw the machine in one state. A
    roof may have one sample only. `line` names what `targets.py` may have a target for. With the
    clock "collectives" samples are not times: each is how many of those a step began.
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
        """Median of ours."""
        return median_and_spread(self.samples)[0]

    @property
    def against_ms(self) -> float:
        """Median of the roof or the peer."""
        return median_and_spread(self.against_samples)[0]

    @property
    def ratio(self) -> float:
        """How many times as fast as the roof or the peer."""
        return self.against_ms / self.ms

    @property
    def met(self) -> bool | None:
        """Whether the target is met, if there is one."""
        return None if self.target is None else self.ratio >= self.target

    def row(self) -> dict[str, object]:
        """The form in a JSON file."""
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
        """A line of the table that is printed while the benchmarks run."""
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
    """Float64 ``[num_ids]``: the sum of r ** -exponent up to each rank r."""
    return np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -exponent)


def zipf_keys(n: int, exponent: float, num_ids: int, seed: int = 0) -> torch.Tensor:
    """Int64 keys ``[n]`` in [0, num_ids), frequency of rank r proportional to r ** -exponent."""
    cumulative = zipf_cumulative(exponent, num_ids)
    draws = np.random.default_rng(seed).random(n) * cumulative[-1]
    return torch.from_numpy(np.searchsorted(cumulative, draws, side="right"))


def random_keys(n: int, seed: int = 0) -> torch.Tensor:
    """Int64 keys ``[n]`` over the whole range; with tens of millions a repeat is most unlikely."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)


def assert_same_sums(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equality up to the rounding of long sums, measured by the largest one."""
    difference = float((actual - expected).abs_().max()) if len(actual) else 0.0
    largest = float(expected.abs().max()) if len(expected) else 0.0
    assert difference <= 1e-4 * largest + 1e-5, f"off by {difference}; the largest is {largest}"


@cache
def machine() -> dict[str, object]:
    """What a result must be read with."""
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
    """Size of the last cache level, 32 MiB where the system does not say."""
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
    """The commit of this clone, with a mark if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--match="]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
