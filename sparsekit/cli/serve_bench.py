"""``sparsekit serve bench``: times lookups in a snapshot."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from .._arguments import Parser
from .._replacing import replacing
from ..serving import SnapshotError
from ..serving.timing import Load, Times, time_lookups
from ..train.plots import pyplot
from .common import (
    UsageError,
    check_apart,
    check_folder,
    check_other_file,
    count,
    number,
    told,
    writing,
)

_FRACTIONS = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
_STYLES = {"p50": "-", "p99": "--", "p99.9": ":"}


def add(parts: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit serve bench`` to the parser."""
    bench = parts.add_parser(
        "bench",
        help="time lookups in a snapshot",
        description="Time lookups of random keys in all tables of a snapshot: microseconds per "
        "call, warm and cold, by threads and samples per call. A sample has a bag in each table. "
        "Quantiles that need more calls are left out.",
    )
    bench.set_defaults(run=_bench)
    bench.add_argument("path", metavar="FILE", help="a snapshot")
    cores = len(os.sched_getaffinity(0))
    bench.add_argument(
        "--threads", nargs="+", type=number(int, 1, 1024), default=sorted({1, cores}), metavar="N",
        help="threads that call at the same time",
    )  # fmt: skip
    bench.add_argument(
        "--batch", nargs="+", type=count, default=[1, 16, 256], metavar="N",
        help="samples per call",
    )  # fmt: skip
    bench.add_argument("--keys", type=count, default=1, metavar="N", help="keys per bag")
    bench.add_argument(
        "--misses", type=number(float, 0, 1), default=0.0, metavar="FRACTION",
        help="fraction of the keys that have no row",
    )  # fmt: skip
    bench.add_argument(
        "--calls", type=count, default=10_000, metavar="N",
        help="calls of each thread; the first tenth of the warm ones is not counted",
    )  # fmt: skip
    bench.add_argument(
        "--copy", action="store_true", help="copy the file into memory; see docs/serving.md"
    )
    bench.add_argument("--json", metavar="FILE", help="where to write the figures as JSON")
    bench.add_argument("--plot", metavar="FILE", help="where to write the figures as PNG")


def _bench(args: argparse.Namespace) -> int:
    if os.path.isdir(args.path):
        raise UsageError(f"{args.path}: is a folder; of a delta log, name one of its base-*.sks")
    for option in ("json", "plot"):
        check_folder(getattr(args, option), f"--{option}")
        check_other_file(f"--{option}", getattr(args, option), args.path)
    check_apart("--plot", args.plot, "--json", args.json)
    measured: list[Times] = []
    for cold, threads, batch in product((False, True), args.threads, args.batch):
        load = Load(batch, args.keys, args.misses, args.calls, threads, cold)
        try:
            times = time_lookups(args.path, load, copy=args.copy and not cold)
        except (OSError, SnapshotError, ValueError) as error:
            raise UsageError(told(error, args.path)) from error
        measured.append(times)
        if len(measured) == 1:
            print(_heading(args, times.tables))
        print(_line(times), flush=True)
    if args.json is not None:
        with writing("--json", args.json), replacing(args.json) as draft:
            Path(draft).write_text(json.dumps([_as_json(times) for times in measured], indent=1))
    if args.plot is not None:
        with writing("--plot", args.plot), replacing(args.plot) as draft:
            _plot(measured, draft)
    return 0


def _heading(args: argparse.Namespace, tables: int) -> str:
    each = "a key" if args.keys == 1 else f"{args.keys} keys"
    cells = [f"{name} us" for name in _FRACTIONS] + ["calls/s", "keys/s"]
    return (
        f"{args.path}: a sample has a bag of {each} in each of {tables} tables\n"
        f"{'':6}{'threads':>8}{'batch':>8}" + "".join(f"{cell:>14}" for cell in cells)
    )


def _line(times: Times) -> str:
    load = times.load
    cells = ["" if value is None else f"{value:,.1f}" for value in _quantiles(times).values()]
    cells += [f"{times.calls_per_second:,.0f}", f"{times.keys_per_second:,.0f}"]
    kind = "cold" if load.cold else "warm"
    return f"{kind:6}{load.threads:8}{load.batch:8}" + "".join(f"{cell:>14}" for cell in cells)


def _quantiles(times: Times) -> dict[str, float | None]:
    """Return the quantiles in microseconds; None for those that need more calls."""
    few = 1 / len(times.microseconds)
    return {
        name: times.at(fraction) if 1 - fraction >= few else None
        for name, fraction in _FRACTIONS.items()
    }


def _as_json(times: Times) -> dict[str, Any]:
    return {
        **times.load._asdict(),
        "tables": times.tables,
        "microseconds": _quantiles(times),
        "calls_per_second": times.calls_per_second,
        "keys_per_second": times.keys_per_second,
    }


def _plot(measured: Sequence[Times], out: str | os.PathLike[str]) -> None:
    """Plot the quantiles against the batch size: warm lookups on the left, cold on the right."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for each, cold in zip(axes, (False, True), strict=True):
        for color, threads in enumerate(sorted({times.load.threads for times in measured})):
            lines = [t for t in measured if (t.load.cold, t.load.threads) == (cold, threads)]
            for name, style in _STYLES.items():
                points = [(t.load.batch, _quantiles(t)[name]) for t in lines]
                points = [point for point in points if point[1] is not None]
                label = f"{name}, {threads} thread{'s' * (threads > 1)}"
                each.plot(
                    [batch for batch, _ in points],
                    [value for _, value in points],
                    style,
                    marker="o",
                    color=f"C{color}",
                    label=label,
                )
        each.set(title="cold" if cold else "warm", xlabel="samples per call", xscale="log")
        each.set(yscale="log")
    axes[0].set_ylabel("microseconds per call")
    axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=110, format="png")
    pyplot().close(figure)
