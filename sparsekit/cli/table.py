"""``sparsekit table``: describes the tables in a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from .._arguments import Parser
from ..checkpoint.folder import chain
from ..checkpoint.table_figures import table_figures
from ..checkpoint.table_lines import findings, lines
from ..train.plots import plot_tables
from ..train.progress import Progress
from .checkpoints import checkpoint_at
from .common import UsageError, check_apart, check_folder, number, writing


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit table`` to the parser."""
    table = commands.add_parser(
        "table",
        help="tell what the tables of a run or checkpoint have, and what may be wrong with them",
        description="Tell of each table: rows, load, norms, ages, scores, vectors with nan or inf, "
        "rows that were never updated, vectors that are alike, bytes.",
    )
    table.set_defaults(run=_table)
    table.add_argument(
        "path", metavar="PATH", help="a checkpoint, or the folder of --checkpoint or --save"
    )
    table.add_argument(
        "--table",
        action="append",
        metavar="NAME",
        help="a table to tell of (default: all); may be given several times",
    )
    table.add_argument(
        "--modulo", type=number(int, 2, 2**63 - 1), metavar="N",
        help="keys are hashes modulo N: tell how many ids share one",
    )  # fmt: skip
    table.add_argument("--json", metavar="FILE", help="where to write the figures as JSON")
    table.add_argument("--plot", metavar="FILE", help="where to draw the distributions as PNG")


def _table(args: argparse.Namespace) -> int:
    check_folder(args.json, "--json")
    check_folder(args.plot, "--plot")
    check_apart("--plot", args.plot, "--json", args.json)
    links = chain(checkpoint_at(args.path))
    total = sum(file.bytes for _, manifest in links for file in manifest.files.values())
    try:
        with Progress("verify", total, sys.stderr, "bytes") as progress:
            tables = table_figures(links[-1][0], args.table, args.modulo, progress.update)
    except ValueError as error:  # there is no such table, or a key is too large
        raise UsageError(f"{args.path}: {error}") from None
    for line in lines(tables):
        print(line)
    if args.json is not None:
        figures = {}
        for table in tables:
            more = {"load": table.load, "findings": findings(table)}
            figures[table.name] = {**dataclasses.asdict(table), **more}
        with writing("--json", args.json):
            Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot is not None:
        with writing("--plot", args.plot):
            plot_tables(tables, args.plot)
    return 0
