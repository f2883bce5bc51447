"""The command ``sparsekit``, a module for each of its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .. import __version__
from .._arguments import Parser
from ..errors import DivergedError
from ..train.launch import RankError
from . import bench, checkpoint, data, hash, info, plot, predict, profile, recommend, scaling, train
from .common import EXPECTED, discard_output

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; None means those of the process.

    Returns:
        The exit code: 0; 1 when training has diverged or a rank has failed; 2 for what the user can
        put right; 130 after Ctrl-C.
    """
    command, *arguments = (sys.argv[1:] if argv is None else list(argv)) or [""]
    try:
        if command == "bench":  # what follows is for the benchmarks, which have their own parser
            return bench.run(arguments)
        if command == "train":
            arguments = train.with_model(arguments)
        parser = _parser()
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
        # The reader of our output, `head` for one, has gone.
        discard_output()
        return 141
    except KeyboardInterrupt:
        print("sparsekit: interrupted", file=sys.stderr)
        return 130


def _parser() -> Parser:
    parser = Parser(prog="sparsekit", description="Sparse embeddings for PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparsekit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for each in (
        train,
        predict,
        recommend,
        checkpoint,
        plot,
        profile,
        scaling,
        hash,
        data,
        bench,
        info,
    ):
        each.add(commands)
    return parser
