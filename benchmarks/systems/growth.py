"""Compares a growing table with one that is large from the start: step times and memory.

    python -m benchmarks.systems.growth [--rows 10000000] [--dim 64] [--optimizer LazyAdam]
        [--out FOLDER]

Each table is trained in its own process, and each step has only new keys, so every key needs a row.
Exits with 1 if the vectors differ. A plot of step times is written to FOLDER.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import sparsekit

KEYS = 50_000  # new keys per step
FIRST_ROWS = 1_000
LINE = "{:<10}{:>12}{:>12}{:>12}{:>10}{:>14}{:>14}{:>14}"


def _memory(name: str) -> int:
    """Return this process's memory in bytes: VmRSS (current) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:")) * 1024


def train(grows: bool, rows: int, dim: int, optimizer_name: str) -> dict[str, Any]:
    """Train a table on all keys; each key occurs in only one step."""
    options: dict[str, Any] = {"on_full": "grow"} if grows else {}
    first = FIRST_ROWS if grows else rows
    layer = sparsekit.Embedding(first, dim, name="table", **options)
    optimizer = getattr(sparsekit.optim, optimizer_name)(layer.parameters())
    times, base = [], _memory("VmRSS")
    for begin in range(0, rows, KEYS):
        keys = torch.arange(begin, min(begin + KEYS, rows)) * 7919
        start = time.perf_counter()
        layer(keys).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(1000 * (time.perf_counter() - start))
    bits = hashlib.sha256()
    for part in layer.weight.detach()[:rows].split(1 << 20):
        bits.update(part.numpy())
    return {
        "times": times,
        "peak": _memory("VmHWM") - base,
        "final": _memory("VmRSS") - base,
        "bits": bits.hexdigest(),
    }


def _plot(runs: dict[str, Any], out: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4))
    for name, run in runs.items():
        places = [(i + 1) * KEYS / 1e6 for i in range(len(run["times"]))]
        axes.plot(places, run["times"], label=name, linewidth=1)
    axes.set(xlabel="rows in use, millions", ylabel="step, ms", title=title, ylim=(0, None))
    axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "growth.png", dpi=120, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--optimizer", default="LazyAdam")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", choices=("grown", "large"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of is not None:
        print(json.dumps(train(args.of == "grown", args.rows, args.dim, args.optimizer)))
        return 0
    runs = {}
    for name in ("grown", "large"):
        command = [sys.executable, "-m", "benchmarks.systems.growth", *sys.argv[1:], "--of", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        runs[name] = json.loads(done.stdout)
    print(f"{args.rows:,} rows of dim {args.dim}, {args.optimizer}, {KEYS:,} new keys a step")
    print(LINE.format(
        "table", "median ms", "99% ms", "longest ms", "all s", "peak MB", "last MB", "peak / last"
    ))  # fmt: skip
    for name, run in runs.items():
        times = run["times"][1:]  # the first step warms up
        print(LINE.format(
            name, f"{statistics.median(times):.1f}", f"{sorted(times)[len(times) * 99 // 100]:.1f}",
            f"{max(times):.1f}", f"{sum(times) / 1000:.2f}", f"{run['peak'] / 1e6:.0f}",
            f"{run['final'] / 1e6:.0f}", f"{run['peak'] / run['final']:.2f}",
        ))  # fmt: skip
    if args.out is not None:
        _plot(runs, args.out, f"{args.rows:,} rows of {args.dim}, {args.optimizer}")
    same = runs["grown"]["bits"] == runs["large"]["bits"]
    print("vectors are the same, bit for bit" if same else "VECTORS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
