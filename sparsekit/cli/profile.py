"""``sparsekit profile``: shows where training spends its time, and how much data ranks exchange."""

from __future__ import annotations

import argparse

from .._arguments import Parser
from . import train
from .common import check_folder, count
from .training import TrainingParser


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit profile`` to the parser."""
    profile = commands.add_parser(
        "profile",
        help="show where the time of training steps goes",
        description="Profile some training steps of a model: of each op the calls, the time "
        "without the ops that it calls, its share, and the bytes that it moves from rank to rank; "
        "of all ranks together.",
        epilog="`sparsekit profile MODEL --help` lists its options, which are those of `sparsekit "
        "train MODEL` and a few more.",
    )
    models = profile.add_subparsers(required=True, metavar="MODEL", parser_class=TrainingParser)
    train.add_models(models)
    for name, model in models.choices.items():
        model.description = (
            f"Profile some steps of `sparsekit train {name}`, which has the same options."
        )
        model.set_defaults(train=model.get_default("run"), run=_profile)
        of_profile = model.add_argument_group("profile")
        of_profile.add_argument(
            "--steps", type=count, default=10, help="training steps to profile, after 3 of warm-up"
        )
        of_profile.add_argument(
            "--lines", type=count, default=20, help="ops to show; those that move bytes always are"
        )
        of_profile.add_argument(
            "--trace",
            metavar="FILE",
            help="where to write a Chrome trace, for chrome://tracing or ui.perfetto.dev; rank 1 "
            "writes FILE with .rank1 in front of its suffix",
        )


def _profile(args: argparse.Namespace) -> int:
    check_folder(args.trace, "--trace")
    return args.train(args)
