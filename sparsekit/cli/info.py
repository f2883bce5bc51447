"""``sparsekit info``: shows how sparsekit was built."""

from __future__ import annotations

import argparse

from .. import build_info
from .._arguments import Parser


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit info`` to the parser."""
    info = commands.add_parser("info", help="show how sparsekit was built")
    info.set_defaults(run=_info)


def _info(args: argparse.Namespace) -> int:
    for key, value in build_info().items():
        print(f"{key}: {value}")
    return 0
