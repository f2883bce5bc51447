"""Runs a command, and reports errors as one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .. import __version__
from .._arguments import Parser
from ..errors import DivergedError
from ..recipes.autoencoder import recommend
from ..recipes.clicks import predict
from ..train.launch import RankError
from . import (
    bench,
    capacity,
    checkpoint,
    data,
    hash,
    info,
    plot,
    profile,
    scaling,
    serve,
    table,
    train,
)
from .common import EXPECTED, discard_output


def run(argv: Sequence[str] | None) -> int:
    """Run the command line; see `sparsekit.cli.main`."""
    command, *arguments = (sys.argv[1:] if argv is None else list(argv)) or [""]
    try:
        if command == "bench":  # the benchmarks parse their own arguments
            return bench.run(arguments)
        if command == "train":
            arguments = train.with_model(arguments)
        parser = make_parser()
        if command.startswith("-") and not parser.knows(command):
            parser.error(f"unrecognized arguments: {command}")
        args = parser.parse_args([command, *arguments] if command else [])
        return args.run(args)
    except EXPECTED as error:
        print(f"sparsekit: {error}", file=sys.stderr)
        return 2
    except (DivergedError, RankError) as error:
        print(f"sparsekit: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The process that was reading our output, for instance `head`, has exited.
        discard_output()
        return 141
    except KeyboardInterrupt:
        print("sparsekit: interrupted", file=sys.stderr)
        return 130


def make_parser() -> Parser:
    """Build the command-line parser, including all commands."""
    parser = Parser(prog="sparsekit", description="Sparse embeddings for PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparsekit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in (
        train,
        predict,
        recommend,
        checkpoint,
        table,
        serve,
        plot,
        profile,
        scaling,
        capacity,
        hash,
        data,
        bench,
        info,
    ):
        each.add(commands)
    return parser
