"""``sparsekit bench``: the benchmarks of a clone of the repository."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from .._arguments import Parser
from .common import UsageError


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the help; what follows it is for a parser of its own, see `run`."""
    commands.add_parser(
        "bench",
        help="time the kernels against roofs and peers, in a clone of the repository; what follows "
        "is as for python -m benchmarks, and --help lists it",
    )


def run(arguments: Sequence[str]) -> int:
    """Run the benchmarks, which are no part of the package: they lie beside it, or where we are."""
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / "benchmarks" / "bench_hash_table.py").exists():
            # Last, or ranks that are started would import what lies there instead of this package.
            sys.path.append(str(folder))
            benchmarks = importlib.import_module("benchmarks.__main__")
            return benchmarks.main(arguments, prog="sparsekit bench")
    raise UsageError(
        "bench: the benchmarks are not installed with the package; clone the repository and run "
        "this in it"
    )
