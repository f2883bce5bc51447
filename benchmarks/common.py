"""One timer, one generator of keys and one form of result for all benchmarks."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import sparsekit


@dataclass(frozen=True)
class Result:
    """A case timed against a peer, both on the same inputs in the same run.

    Times are medians in milliseconds; spread is (longest - shortest) / median.
    """

    case: str
    ms: float
    spread: float
    peer: str
    peer_ms: float
    peer_spread: float

    @property
    def ratio(self) -> float:
        """How many times faster than the peer."""
        return self.peer_ms / self.ms


def time_ms(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and spread of `run` over repeats calls, after two that are not counted."""
    for _ in range(2):
        run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def compare(
    case: str, ours: Callable[[], object], peer: str, theirs: Callable[[], object], repeats: int = 7
) -> Result:
    """Time ours and theirs one after the other."""
    return Result(case, *time_ms(ours, repeats), peer, *time_ms(theirs, repeats))


def zipf_keys(n: int, exponent: float, num_ids: int, seed: int = 0) -> torch.Tensor:
    """Int64 keys ``[n]`` in [0, num_ids), frequency of rank r proportional to r ** -exponent."""
    cumulative = np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -exponent)
    draws = np.random.default_rng(seed).random(n) * cumulative[-1]
    return torch.from_numpy(np.searchsorted(cumulative, draws, side="right"))


def machine() -> dict[str, object]:
    """What a result must be read with."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].split(":")[1].strip() if models else cpu
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "build": sparsekit.build_info(),
    }


def write_json(path: Path, results: list[Result]) -> None:
    """Write the results with the machine they were measured on."""
    rows = [{**asdict(result), "ratio": result.ratio} for result in results]
    path.write_text(json.dumps({"machine": machine(), "results": rows}, indent=1) + "\n")
