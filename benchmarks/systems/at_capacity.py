"""Compares steps of tables at their budget, which drop rows, with steps of tables that never fill.

    python -m benchmarks.systems.at_capacity [--steps 60] [--threads 1]

26 tables have nominal sizes of 5,000 to 200,000 ids, dim 16. Batches have 2,048 samples, with one
key per table. Keys follow a zipf law over twice the nominal size, and the popular keys drift. The
budget of a table at capacity is half its nominal size. All tables are updated in backward by
LazyAdam, alone and in a DLRM. Sides take turns. Exits with 1 if a step of the DLRM is less than 0.7
times as fast as with tables that never fill.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

import sparsekit
from sparsekit.models import DLRM

from ..bench_group import Keyed

TABLES, DIM, BATCH, DENSE = 26, 16, 2048, 13
IDS = np.geomspace(5_000, 200_000, TABLES).astype(int)
WARM_UP = 80  # steps until all tables at capacity are full
SIDES: dict[str, dict[str, Any]] = {
    "never full": {},
    "LRU": {"on_full": "evict"},
    "LRU, sweeps to 95%": {"on_full": "evict", "low_watermark": 0.95},
    "LFU": {"on_full": "evict", "score": "lfu"},
    "LFU, sweeps to 95%": {"on_full": "evict", "score": "lfu", "low_watermark": 0.95},
}
LEAST = 0.7

Step = Callable[[Keyed], None]


def batches() -> Iterator[Keyed]:
    """Yield a batch for each step."""
    names = [f"t{t}" for t in range(TABLES)]
    draw = np.random.default_rng(0)
    laws = [np.cumsum(np.arange(1, 2 * ids + 1) ** -1.05) for ids in IDS]
    offsets = torch.arange(TABLES * BATCH + 1)
    step = 0
    while True:
        keys = [
            (np.searchsorted(law, draw.random(BATCH) * law[-1]) + 5 * step) % len(law)
            for law in laws
        ]
        yield Keyed(names, torch.from_numpy(np.concatenate(keys) * 2654435761 % (1 << 40)), offsets)
        step += 1


def _rows(options: dict[str, Any]) -> dict[str, int]:
    """Return each table's number of rows; the default budget is 0.9 of this number."""
    share = 2.2 if not options else 0.5 / 0.9
    return {f"t{t}": round(share * ids) for t, ids in enumerate(IDS)}


def tables_alone(options: dict[str, Any]) -> Step:
    """Return a step of the tables without a model."""
    layers = {
        name: sparsekit.DistributedEmbedding("sum", rows, DIM, 1, 1, name=name, **options)
        for name, rows in _rows(options).items()
    }
    group = sparsekit.EmbeddingGroup(layers, output="concatenated")
    optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=1e-3)
    sparsekit.optim.fuse_in_backward(optimizer, group)
    grad = torch.ones(BATCH, TABLES * DIM)

    def step(keys: Keyed) -> None:
        group(keys).backward(grad)
        optimizer.step()

    return step


def model(options: dict[str, Any]) -> Step:
    """Return a training step of a small DLRM."""
    rows = _rows(options)
    dlrm = DLRM(
        list(rows), DENSE, rows=rows, dim=DIM, bottom=(64,), top=(128, 64), cross_rank=64, **options
    )
    sparse = sparsekit.optim.LazyAdam(dlrm.embeddings.parameters(), lr=1e-3)
    sparsekit.optim.fuse_in_backward(sparse, dlrm.embeddings)
    others = [p for name, p in dlrm.named_parameters() if not name.startswith("embeddings.")]
    dense = torch.optim.Adam(others, lr=1e-3)
    numbers, labels = torch.randn(BATCH, DENSE), torch.rand(BATCH).round()

    def step(keys: Keyed) -> None:
        logits = dlrm(numbers, keys)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        sparse.step()
        dense.step()
        dense.zero_grad()

    return step


def milliseconds(make: Callable[[dict[str, Any]], Step], steps: int) -> dict[str, list[float]]:
    """Return the process time of each side's steps after the tables have filled."""
    sides = {name: make(options) for name, options in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number, batch in zip(range(WARM_UP + steps), batches(), strict=False):
        for name, step in sides.items():
            start = time.process_time()
            step(batch)
            if number >= WARM_UP:
                times[name].append(1000 * (time.process_time() - start))
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for the tables alone and one for the model; return 1 if the model is slow."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="steps to time (default: 60)")
    parser.add_argument("--threads", type=int, default=1, help="threads (default: 1)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    slow = False
    for what, make in (("tables alone", tables_alone), ("DLRM", model)):
        times = milliseconds(make, given.steps)
        print(f"\n{what:<22}{'mean ms':>10}{'median ms':>12}{'as fast, mean':>16}")
        for name, of_side in times.items():
            mean = statistics.mean(of_side)
            speed = statistics.mean(times["never full"]) / mean
            print(f"{name:<22}{mean:>10.2f}{statistics.median(of_side):>12.2f}{speed:>15.2f}x")
            slow |= make is model and speed < LEAST
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
