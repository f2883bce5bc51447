"""Each option of a command has its documented default, and reads numbers as numbers."""

import argparse

import pytest

from sparsekit.cli.dispatch import make_parser

# Options of all commands that train.
TRAINING = {"--ranks": 2, "--checkpoint-every": 1000, "--keep": 3}
PROFILE = {"--steps": 10, "--lines": 20}
DEFAULTS = {
    "train ratings": TRAINING
    | {"--epochs": 20, "--batch-size": 1024, "--dim": 32, "--lr": 0.02, "--capacity": 100_000}
    | {"--wire-dtype": "float32"},
    "train wide": TRAINING
    | {"--epochs": 6, "--batch-size": 256, "--optimizer": "adam", "--loss": "bce"},
    # Other tests check the defaults of these models' settings.
    "train dlrm": TRAINING,
    "train deepfm": TRAINING,
    "train autoencoder": TRAINING,
    "train deepconn": {"--checkpoint-every": 1000, "--keep": 3, "--placement": "single"}
    | {"--epochs": 3, "--batch-size": 32, "--length": 200, "--lr": 1e-4},
    "predict": {"--out": "predictions.txt", "--ranks": 1},
    "recommend": {"--out": "recs.tsv", "--k": 10, "--show": 10},
    "scaling": {"--ranks": "1,2", "--threads": 1, "--tables": 26, "--rows": 100_000}
    | {"--dim": 64, "--batch": 8192, "--epochs": 5},
}
DEFAULTS |= {
    f"profile {name.removeprefix('train ')}": options | PROFILE
    for name, options in DEFAULTS.items()
    if name.startswith("train ")
}


def parsers(parser, words=()):
    """Return a dict of each command's words to its parser."""
    found = {" ".join(words): parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found |= parsers(below, (*words, name))
    return found


def with_defaults(parser):
    """Return the options of a parser that have a default other than None and False."""
    return [a for a in parser._actions if a.default not in (None, False, argparse.SUPPRESS)]


def test_defaults():
    found = {
        command: {action.option_strings[-1]: action.default for action in with_defaults(parser)}
        for command, parser in parsers(make_parser()).items()
    }
    assert {command: options for command, options in found.items() if options} == DEFAULTS


@pytest.mark.parametrize("command", DEFAULTS)
def test_numbers_are_read_as_numbers(command):
    """Each option with a number as its default has a type that converts its text to a number."""
    for action in with_defaults(parsers(make_parser())[command]):
        if isinstance(action.default, int | float):
            assert action.type(str(action.default)) == action.default, action.option_strings
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                action.type("many")
