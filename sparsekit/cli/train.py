"""``sparsekit train``: trains models from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._arguments import Parser
from ..recipes.autoencoder import command as autoencoder
from ..recipes.clicks import command as clicks
from ..recipes.deepconn import command as deepconn
from ..recipes.ratings import command as ratings
from ..recipes.wide import command as wide
from .training import TrainingParser

DEFAULT_MODEL = "ratings"


def add(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``sparsekit train`` to the parser."""
    train = commands.add_parser(
        "train",
        help="train a model",
        description=f"Train a model; without its name, {DEFAULT_MODEL}.",
        epilog=f"`sparsekit train MODEL --help` lists its options; those of {DEFAULT_MODEL} may "
        "follow `train` at once.",
    )
    models = train.add_subparsers(required=True, metavar="MODEL", parser_class=TrainingParser)
    add_models(models)


def add_models(models: argparse._SubParsersAction[TrainingParser]) -> None:
    """Add one command per model."""
    for each in (ratings, wide, clicks, autoencoder, deepconn):
        each.add(models)


def with_model(arguments: Sequence[str]) -> list[str]:
    """Insert the default model before the arguments if they do not name a model."""
    if arguments and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help")):
        return list(arguments)
    return [DEFAULT_MODEL, *arguments]
