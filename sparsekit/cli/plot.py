"""``sparsekit plot``: plots a training run."""

from __future__ import annotations

import argparse
from pathlib import Path

from .._arguments import Parser
from ..train.plots import plot_run
from .common import UsageError, check_folder, check_other_file, why


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit plot`` to the parser."""
    plot = commands.add_parser(
        "plot",
        help="draw loss, metrics, speed and tables of a run",
        description="Draw what `sparsekit train … --log-to RUN` has logged: loss, metrics, samples "
        "a second, rows, load and skew of the tables, and which rows come and go.",
    )
    plot.set_defaults(run=_plot)
    plot.add_argument("folder", metavar="RUN", help="folder that was given to --log-to")
    plot.add_argument("--out", metavar="FILE", help="PNG to write (default: RUN/plot.png)")


def _plot(args: argparse.Namespace) -> int:
    check_folder(args.out, "--out")
    check_other_file("--out", args.out, f"{args.folder}/metrics.jsonl")
    out = Path(args.folder) / "plot.png" if args.out is None else Path(args.out)
    try:
        plot_run(args.folder, out)
    except OSError as error:
        raise UsageError(f"{error.filename or args.folder}: {why(error, args.folder)}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(out)
    return 0
