"""Compares the speed of raw-key lookups in a snapshot with that of lookups by row number.

    python -m benchmarks.systems.serving_lookup [--rows N] [--calls N] [--file FILE]

Writes a snapshot of 26 tables of different sizes: 10 million int8 rows of dim 64 in all. Times warm
calls that pool a bag in each table, from one thread and from two, alternating with peers that are
given row numbers: FBGEMM's int8 op and nn.EmbeddingBag, one thread per caller. Also times opening
the file, and calls while it is not in memory. Exits with 1 if opening takes 10 ms or more, or if
the median call with raw keys takes more than 1.3 times as long as FBGEMM's.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers import fbgemm
from sparsekit.serving import Snapshot
from sparsekit.serving.timing import Load, Times, time_lookups
from sparsekit.serving.writer import SnapshotWriter

TABLES, DIM = 26, 64
# Samples per call, and keys per bag.
SHAPES = ((1, 1), (1, 10), (64, 1), (64, 10))
ROUNDS = 3
MOST_RATIO, MOST_OPEN_MS = 1.3, 10.0


def sizes_of(rows: int) -> list[int]:
    """Return each table's number of rows, about `rows` in all, with a quarter in the largest."""
    sizes = np.geomspace(1, 2650, TABLES)
    return [int(size) for size in np.maximum(1, sizes * rows / sizes.sum())]


def write(path: Path, sizes: Sequence[int]) -> None:
    """Write a snapshot with random int8 rows."""
    draw = np.random.default_rng(0)
    with SnapshotWriter(path) as snapshot:
        tables = [
            snapshot.table(f"table {t}", DIM, rows="int8", miss="zeros", combiner="sum")
            for t in range(len(sizes))
        ]
        for t, (table, size) in enumerate(zip(tables, sizes, strict=True)):
            for first in range(0, size, 1 << 17):
                keys = np.arange(first, min(size, first + (1 << 17))) * 7919 + t
                table.append(keys, draw.standard_normal((len(keys), DIM), dtype=np.float32))


def timed(load: Load, call: Callable[[Any], Any], inputs: Sequence[Sequence[Any]]) -> Times:
    """Time a peer's calls, each with its own input, in one thread per sequence of inputs."""
    taken = [np.zeros(len(each), np.int64) for each in inputs]

    def run(thread: int) -> None:
        torch.set_num_threads(1)  # the setting is per thread
        for i, given in enumerate(inputs[thread]):
            begin = time.perf_counter_ns()
            call(given)
            taken[thread][i] = time.perf_counter_ns() - begin

    threads = [threading.Thread(target=run, args=(t,)) for t in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = np.concatenate([each[len(each) // 10 :] for each in taken])
    return Times(load, TABLES, np.sort(times) / 1000)


def int8_op(module: Any) -> Callable[[Any], Any]:
    """Return a function that calls an FBGEMM module's op without the module's Python code."""
    op = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
    names = (
        "weights_host", "weights_uvm", "weights_placements", "weights_offsets", "weights_tys",
        "D_offsets", "total_D", "max_int2_D", "max_int4_D", "max_int8_D", "max_float16_D",
        "max_float32_D",
    )  # fmt: skip
    first = [getattr(module, name) for name in names]
    return lambda given: op(*first, *given, 0, None, 0, None, None, module.row_alignment)


def rows_for(sizes: Sequence[int], load: Load, seed: int) -> list[list[Any]]:
    """Return row numbers for each call of each thread, int64 ``[tables, batch * keys]``."""
    draw, count = np.random.default_rng(seed), load.batch * load.keys
    return [
        [np.stack([draw.integers(0, size, count) for size in sizes]) for _ in range(load.calls)]
        for _ in range(load.threads)
    ]


def compare(path: Path, sizes: Sequence[int], load: Load, peers: dict[str, Any]) -> float | None:
    """Print all times, and return the ratio of ours to FBGEMM's; None without FBGEMM."""
    offsets = torch.arange(0, load.batch * load.keys * TABLES + 1, load.keys, dtype=torch.int32)
    bounds = torch.arange(0, load.batch * load.keys + 1, load.keys)
    medians: dict[str, list[float]] = {}
    best: dict[str, Times] = {}
    for number in range(ROUNDS):
        sides = {
            "raw keys, mapped": time_lookups(path, load, number),
            "raw keys, copied": time_lookups(path, load, number, copy=True),
        }
        rows = rows_for(sizes, load, number)
        if "FBGEMM int8" in peers:
            ready = [
                [(torch.from_numpy(each.ravel().astype(np.int32)), offsets) for each in calls]
                for calls in rows
            ]
            sides["FBGEMM int8"] = timed(load, peers["FBGEMM int8"], ready)
        layers = peers["EmbeddingBag"]

        def pool(given: torch.Tensor, layers: Any = layers) -> None:
            for layer, keys in zip(layers, given, strict=True):
                layer(keys, bounds[:-1])

        with torch.no_grad():
            plain = [[torch.from_numpy(each) for each in calls] for calls in rows]
            sides["EmbeddingBag"] = timed(load, pool, plain)
        for name, times in sides.items():
            medians.setdefault(name, []).append(times.at(0.5))
            if times.at(0.5) == min(medians[name]):
                best[name] = times
    for name, times in best.items():
        figures = "".join(f"{times.at(each):10.1f}" for each in (0.5, 0.99, 0.999))
        print(f"{load.threads:3}{load.batch:6}{load.keys:6}  {name:18}{figures}", end="")
        print(f"{times.keys_per_second / 1e6:12.1f}", flush=True)
    if "FBGEMM int8" not in best:
        return None
    ours = min(best["raw keys, mapped"].at(0.5), best["raw keys, copied"].at(0.5))
    return ours / best["FBGEMM int8"].at(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--calls", type=int, default=10_000, help="calls of a thread, at most")
    parser.add_argument("--file", type=Path, help="snapshot to use; written if it does not exist")
    args = parser.parse_args()
    sizes = sizes_of(args.rows)
    with tempfile.TemporaryDirectory() as folder:
        path = args.file or Path(folder) / "tables.sks"
        if not path.exists():
            write(path, sizes)
        return measure(path, sizes, args.calls)


def measure(path: Path, sizes: Sequence[int], most_calls: int) -> int:
    opened = []
    for _ in range(11):
        begin = time.perf_counter()
        snapshot = Snapshot(path)
        opened.append(1000 * (time.perf_counter() - begin))
        snapshot.close()
    open_ms = statistics.median(opened)
    rows = sum(sizes)
    print(f"{rows:,} rows of {DIM} in {TABLES} tables, {path.stat().st_size / 1e6:,.0f} MB")
    print(f"opening: {open_ms:.2f} ms (median of {len(opened)})")
    layers = [
        torch.nn.EmbeddingBag(size, DIM, mode="sum", _weight=torch.zeros(size, DIM))
        for size in sizes
    ]
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
    peers: dict[str, Any] = {"EmbeddingBag": layers}
    if (why := fbgemm.missing()) is None:
        peers["FBGEMM int8"] = int8_op(fbgemm.int8_tables([(size, DIM) for size in sizes]))
    else:
        print(f"left out: FBGEMM: {why}")
    print(
        "\nthreads, samples, keys per bag; microseconds per call: p50, p99, p99.9; million keys/s"
    )
    ratios = []
    for threads in (1, 2):
        for batch, keys in SHAPES:
            calls = max(300, min(most_calls, 2_000_000 // (TABLES * batch * keys)))
            load = Load(batch, keys, calls=calls, threads=threads)
            if (ratio := compare(path, sizes, load, peers)) is not None:
                ratios.append(ratio)
                print(f"{'':17}raw keys / FBGEMM: {ratio:.2f}")
    print("\ncold: the file is not in memory")
    for batch, keys in SHAPES[:2]:
        times = time_lookups(path, Load(batch, keys, calls=1000, cold=True))
        figures = "".join(f"{times.at(each):10.1f}" for each in (0.5, 0.99, 0.999))
        print(f"{1:3}{batch:6}{keys:6}  {'raw keys, mapped':18}{figures}")
    worst = max(ratios, default=0.0)
    return int(open_ms >= MOST_OPEN_MS or worst > MOST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
