"""Compares predicted hit rates with those of real tables, and times the prediction.

    python -m benchmarks.systems.capacity [--speed] [--plot FILE]

Predicts hit rates at five sizes for LRU, LFU, admission at 2, and ttl, and looks up the same keys
in real tables. The keys are first a zipf stream whose popular keys drift, then the values in the
Adult census data, in three epochs with different row orders. Then, or with --speed alone, it times
a feature with ten million keys, and reports how much the process's memory grows. Exits with 1 if a
prediction is off by more than a point, or memory grows by more than 100 MB.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

import sparsekit
from benchmarks.systems import lifecycle
from sparsekit.capacity import CapacityCurve, measured
from sparsekit.capacity.report import Feature, plot
from sparsekit.datasets import adult

MOST_ERROR, MOST_BYTES = 0.01, 100e6
ROWS = {"zipf": (8192, 16384, 32768, 65536, 131072), "Adult": (500, 1000, 2000, 5000, 10000)}
TTLS = {"zipf": (5, 20, 50, 100, 200), "Adult": (2, 5, 20, 50, 100)}
# The timed feature: zipf keys with drifting popularity, until DISTINCT distinct keys have occurred.
IDS, EXPONENT, BATCH, BLOCK, DISTINCT = 10**8, 1.05, 4096, 1 << 20, 10**7


def people() -> Iterator[torch.Tensor]:
    """Yield the keys for each lookup, taken from 256 rows of the Adult data."""
    everyone = adult()
    texts = [np.char.add(f"{name}=", values) for name, values in everyone.columns.items()]
    keys = sparsekit.hashing.xxh64(np.stack(texts, 1).ravel()).view(len(everyone), -1)
    for epoch in range(3):
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(256):
            yield keys[rows].flatten()


def compare(name: str, lookups: list[torch.Tensor], sample: int) -> Feature:
    """Print predicted hit rates beside measured ones, and return both."""
    curve = CapacityCurve(rows=ROWS[name], ttls=TTLS[name], sample=sample)
    for keys in lookups:
        curve.add(keys)
    found = curve.read()
    rates = measured(found, lookups)
    print(
        f"{name}: {found.distinct:,} distinct keys, of which 1 in {1 / found.rate:g} is looked at"
    )
    print(f"{'':20}{'rows':>10}{'predicted':>12}{'measured':>12}{'error':>10}")
    errors = []
    for point, rate in zip(found.points, rates, strict=True):
        policy = f"ttl {point.policy.ttl}" if point.policy.ttl else str(point.policy)
        errors.append(abs(point.hit_rate - rate))
        print(f"{policy:20}{point.rows:10,}{point.hit_rate:12.4f}{rate:12.4f}{errors[-1]:10.4f}")
    print(f"largest error {max(errors):.4f}\n", flush=True)
    return Feature(found, 0.0, rates)


def stream() -> Iterator[np.ndarray]:
    """Yield blocks of keys forever."""
    rng = np.random.default_rng(0)
    drift = 0
    while True:
        draws = ((IDS ** (1 - EXPONENT) - 1) * rng.random(BLOCK) + 1) ** (1 / (1 - EXPONENT))
        yield draws.astype(np.int64) + drift
        drift += 5 * BLOCK // BATCH


def time_it() -> bool:
    """Print speed and memory growth for many keys; return whether the growth is small enough."""
    warm = CapacityCurve(rows=[1000], sample=1000)
    for start in range(0, 2_000_000, 10_000):
        warm.add(torch.arange(start, start + 10_000))
    warm.read()
    blocks = stream()
    next(blocks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    curve, keys, spent, on_cpu, seen = CapacityCurve(), 0, 0.0, 0.0, 0
    while seen < DISTINCT:
        lookups = torch.from_numpy(next(blocks)).split(BATCH)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for lookup in lookups:
            curve.add(lookup)
        if keys % (16 * BLOCK) == 0:
            found = curve.read()
            seen = found.distinct
        spent += time.perf_counter() - begin
        on_cpu += time.process_time() - begin_cpu
        keys += BLOCK
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(
        f"{keys:,} keys, {seen:,} distinct: {keys / spent / 1e6:.1f} million keys/s, "
        f"{keys / on_cpu / 1e6:.1f} by CPU time; memory grew by {grown / 1e6:.0f} MB"
    )
    return grown <= MOST_BYTES


def main() -> int:
    """Print the tables; return 1 if a prediction is too far off or memory grew too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--speed", action="store_true", help="only time a feature")
    parser.add_argument("--plot", metavar="FILE", help="PNG to write, of the comparison")
    args = parser.parse_args()
    torch.set_num_threads(1)
    held = time_it()
    if args.speed:
        return 0 if held else 1
    found = {
        "zipf": compare("zipf", list(lifecycle.stream()), 1 << 15),
        "Adult": compare("Adult", list(people()), 1 << 14),
    }
    if args.plot is not None:
        plot(found, args.plot)
    for name, feature in found.items():
        pairs = zip(feature.curve.points, feature.measured or (), strict=True)
        close = all(abs(point.hit_rate - rate) <= MOST_ERROR for point, rate in pairs)
        print(f"{'holds' if close else 'FAILS'}: {name} is predicted within a point")
        held = held and close
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
