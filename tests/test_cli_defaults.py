"""Each option of a command has its documented default, and reads numbers as numbers."""

import argparse
import dataclasses
import os

import pytest

from sparsekit.cli.dispatch import make_parser
from sparsekit.recipes.clicks.config import DeepFMConfig, DLRMConfig, RunConfig

# Options of all commands that train.
TRAINING = {"--ranks": 2, "--checkpoint-every": 1000, "--keep": 3}
PROFILE = {"--steps": 10, "--lines": 20}
DEFAULTS = {
    "train ratings": TRAINING
    | {"--epochs": 20, "--batch-size": 1024, "--dim": 32, "--lr": 0.02}
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
    "capacity": {"--policy": ("lru", "lfu", "ttl"), "--admission": (1, 2), "--sample": 32768}
    | {"--ranks": 1},
    "serve bench": {"--threads": sorted({1, len(os.sched_getaffinity(0))})}
    | {"--batch": [1, 16, 256], "--keys": 1, "--calls": 10_000},
    "serve demo": {"--seconds": 10, "--every": 0.1},
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


# Ranges of options that are numbers. Options not listed here must be from 1 to 2**31 - 1.
MOST = 2**31 - 1
RANGES = {
    "forget --keys": (-(2**63), 2**63 - 1),
    "--ranks": (1, 1024),
    "--threads": (1, 1024),
    "--lr": (1e-12, 1e12),
    "--length": (4, 100_000),
    "--sample": (1, 2**24),
    "--k": (1, 2**20),
    "--show": (0, 2**31),
    "--world": (1, 4096),
    "--modulo": (2, 2**63 - 1),
    "autoencoder --dim": (1, 2**16),
    "scaling --threads": (1, MOST),
    "bench --misses": (0, 1),
    "demo --seconds": (0.1, 86400),
    "demo --every": (0.001, 60),
}


def test_ranges_of_numbers():
    checked = 0
    for command, parser in parsers(make_parser()).items():
        for action in parser._actions:
            name = action.option_strings[-1] if action.option_strings else ""
            beyond = {"int": "9" * 19, "float": "1e300"}.get(getattr(action.type, "__name__", ""))
            if beyond is None or name in ("--seed", "--rows") or action.type is int:
                continue
            of_command = f"{command.split()[-1]} {name}"
            with pytest.raises(argparse.ArgumentTypeError) as caught:
                action.type(beyond)
            low, high = RANGES.get(of_command, RANGES.get(name, (1, MOST)))
            assert f"{beyond} is not in [{low}, {high}]" == str(caught.value), of_command
            assert (action.type(str(low)), action.type(str(high))) == (low, high)
            checked += 1
    assert checked > 90


def test_defaults_of_settings():
    found = dataclasses.asdict(RunConfig(DLRMConfig()))
    assert found == {
        "model": {"rows": None, "dim": 16, "bottom": (64,), "top": (128, 64)}
        | {"cross_layers": 3, "cross_rank": 64},
        "table": dict.fromkeys(("on_full", "storage", "max_resident_bytes", "max_rows"))
        | dict.fromkeys(("low_watermark", "score", "ttl", "admission")),
        "data": {"train": (), "validation": (), "test": (), "format": "csv", "label": "label"}
        | {"dense": (), "sparse": (), "separator": None},
        "optimizer": {"name": "lazy_adam", "lr": 0.002, "dense_lr": 0.001, "lr_scale": 1.0}
        | {"warmup_steps": 0},
        "trainer": {"epochs": 3, "global_batch_size": 1024, "accumulate": 1, "clip_norm": None}
        | {"bfloat16": False, "patience": None, "log_every": 20, "tensorboard": False},
    }
    assert dataclasses.asdict(DeepFMConfig()) == {"rows": None, "dim": 16, "deep": (128, 64)}
