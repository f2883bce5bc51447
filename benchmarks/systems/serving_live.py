"""Measures how fresh served rows are, and how much a log costs its readers and the trainer.

python benchmarks/systems/serving_live.py [--rows 1000000] [--changed 20000] [--seconds 20]

A trainer changes rows in a dim-64 table, and writes deltas with int8 rows. A C++ process follows
them, and looks up 26 bags of 10 keys in this table. Freshness is the time from the end of a
training step to the first lookup that sees its changes. Exits with 1 if its p99 is above a second.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import sparsekit
from sparsekit import optim
from sparsekit.serving import DeltaLog, _library

DIM = 64
GOLDEN = -7046029254386353131  # keys are multiples of this number, so that they spread over 64 bits
STEPS_A_SECOND = 10
MOST_SECONDS = 1.0
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Print the results; return 1 if a requirement is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=int, default=20_000, help="rows a second")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--every", type=float, default=0.5, help="seconds from delta to delta")
    parser.add_argument("--folder", help="where to write (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return _run(Path(folder), args)


def _run(folder: Path, args: argparse.Namespace) -> int:
    layer = sparsekit.DistributedEmbedding("sum", args.rows, DIM, 1, name="rows", seed=1)
    optimizer = optim.SGD(layer.parameters(), lr=0.01)
    with torch.no_grad():
        for keys in torch.arange(args.rows).split(100_000):
            layer((keys * GOLDEN).view(-1, 1, 1))
    begin = time.perf_counter()
    log = DeltaLog(folder / "log", layer, every_seconds=args.every)
    print(f"base of {args.rows:,} rows: {time.perf_counter() - begin:.2f} s")
    begin = time.perf_counter()
    with torch.no_grad():
        layer.weight[0] += 1
    log.flush()
    print(f"delta after a write that is not marked: {1e3 * (time.perf_counter() - begin):.1f} ms")

    reader = _compiled(folder)
    command = [reader, folder / "log", str(args.seconds), str(args.seconds), str(args.rows)]
    process = subprocess.Popen(
        [str(each) for each in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdin is None or process.stdout is None:
        return 1
    lines = [process.stdout.readline() for _ in range(3)]  # lines pin, warm and quiet
    process.stdin.write("\n")
    process.stdin.flush()
    trained, costs, steps = _train(layer, optimizer, log, args)
    rest = process.communicate()[0]
    log.close()
    if process.returncode:
        return 1
    return _report([*lines, *rest.splitlines()], trained, costs, steps)


def _train(
    layer: sparsekit.DistributedEmbedding,
    optimizer: torch.optim.Optimizer,
    log: DeltaLog,
    args: argparse.Namespace,
) -> tuple[dict[int, int], list[float], list[float]]:
    """Train at a fixed pace; return when each step ended, and how long deltas and steps took."""
    trained, costs, steps = {}, [], []
    generator = torch.Generator().manual_seed(1)
    count = args.changed // STEPS_A_SECOND
    start = time.monotonic()
    for step in range(1, int(args.seconds * STEPS_A_SECOND)):
        rows = torch.randint(args.rows, (count,), generator=generator)
        begin = time.perf_counter()
        layer((rows * GOLDEN).view(-1, 1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - begin)
        trained[step] = time.time_ns()
        begin = time.perf_counter()
        if log.step(dense_version=step):
            costs.append(time.perf_counter() - begin)
        time.sleep(max(0.0, start + step / STEPS_A_SECOND - time.monotonic()))
    log.flush()
    return trained, costs, steps


def _compiled(folder: Path) -> Path:
    program, library = folder / "serving_reader", Path(_library.LIBRARY)
    source = ROOT / "benchmarks" / "systems" / "serving_reader.cpp"
    include = ROOT / "csrc" / "serving" / "include"
    command = ["g++", "-std=c++17", "-O2", "-pthread", f"-I{include}", str(source), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True)
    return program


def _report(
    lines: Sequence[str], trained: dict[int, int], costs: Sequence[float], steps: Sequence[float]
) -> int:
    fresh, last = [], 0
    for line in lines:
        name, *numbers = line.split()
        if name == "pin":
            print(f"pin and unpin: {numbers[0]} ns")
        elif name in ("quiet", "live"):
            told = ", ".join(f"{int(number) / 1e3:.1f}" for number in numbers[:3])
            print(f"lookup, {name}: {told} us (p50, p99, p99.9 of {int(numbers[3]):,})")
        elif name == "seen":
            version, at = map(int, numbers)
            fresh += [(at - trained[step]) / 1e9 for step in range(last + 1, version + 1)]
            last = version
    p50, p99 = np.percentile(fresh, [50, 99])
    print(f"freshness: p50 {p50:.3f} s, p99 {p99:.3f} s, of {len(fresh)} steps")
    cost, most = np.percentile(np.array(costs) * 1e3, [50, 99])
    print(f"a delta costs the trainer {cost:.1f} ms (p50), {most:.1f} ms (p99)")
    print(f"a step takes {1e3 * float(np.median(steps)):.1f} ms")
    return int(p99 > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
