"""``sparsekit bench``: runs the benchmarks in a clone of the repository."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from .._arguments import Parser
from .common import UsageError


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command to the help; the benchmarks parse its arguments themselves."""
    commands.add_parser(
        "bench",
        help="time the kernels against roofs and peers, in a clone of the repository; what follows "
        "is as for python -m benchmarks, and --help lists it",
    )


def run(arguments: Sequence[str]) -> int:
    """Run the benchmarks, which must be next to the package or in the current folder."""
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / "benchmarks" / "bench_hash_table.py").exists():
            # Append the clone to the path: at the front, it would make child ranks import sparsekit
            # from there.
            sys.path.append(str(folder))
            benchmarks = importlib.import_module("benchmarks.__main__")
            return benchmarks.main(arguments, prog="sparsekit bench")
    raise UsageError(
        "bench: the benchmarks are not installed with the package; clone the repository and run "
        "this in it"
    )
