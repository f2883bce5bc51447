"""``sparsekit data``: generates data files for experiments."""

from __future__ import annotations

import argparse
import sys

from .._arguments import Parser
from ..data import write_criteo_sample
from ..train.progress import Progress
from .common import check_folder, number, writing


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit data`` to the parser."""
    data = commands.add_parser(
        "data", help="generate files of data", description="Generate files of data."
    )
    kinds = data.add_subparsers(required=True, metavar="KIND")
    sample = kinds.add_parser(
        "criteo-sample",
        help="a file in Criteo's format",
        description="Write a file in the format of Criteo's click logs: label, 13 integers, 26 "
        "categories with the cardinalities of Criteo 1TB, by a zipf law. Equal arguments give "
        "equal bytes, and more rows begin with those of fewer.",
    )
    sample.set_defaults(run=_criteo_sample)
    sample.add_argument("--rows", type=number(int, 0, 2**40), required=True, help="lines")
    sample.add_argument(
        "--out", metavar="FILE", required=True, help="where to write; gzip if it ends in .gz"
    )
    sample.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0, help="which file")
    sample.add_argument(
        "--multi-hot",
        action="store_true",
        help="MLPerf's number of keys in each category, 1 to 100, separated by commas",
    )


def _criteo_sample(args: argparse.Namespace) -> int:
    check_folder(args.out, "--out")
    with Progress(args.out, args.rows, sys.stdout, unit="rows") as progress:
        with writing("--out", args.out):
            write_criteo_sample(
                args.out, args.rows, args.seed, args.multi_hot, on_rows=progress.update
            )
        rate = args.rows / progress.seconds
        progress.finish(f"{args.rows:,} rows in {progress.seconds:.1f} s, {rate:,.0f} rows/s")
    return 0
