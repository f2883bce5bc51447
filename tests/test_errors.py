"""Tests of sparsekit's errors, checks of arguments, suggestions of names, and argument parser."""

import argparse
import os
import pickle
import sys

import numpy as np
import pytest
import torch

from sparsekit import _nearest
from sparsekit._arguments import Parser
from sparsekit._extras import MissingPackageError, needed
from sparsekit._nearest import did_you_mean, did_you_mean_file
from sparsekit.errors import TableFullError, check_choice, check_int, check_number


def test_a_full_table_says_what_it_has():
    error = pickle.loads(pickle.dumps(TableFullError("users", 1, 7, 10, 5)))
    assert type(error) is TableFullError
    assert vars(error) == {
        "layer": "users", "rank": 1, "size": 7, "capacity": 10, "refused": 5
    }  # fmt: skip
    assert str(error).startswith(
        "users: the table on rank 1 is full: 7 of 10 rows are in use and the call brought 5 new "
        "keys for 3 free rows; none was inserted."
    )


def test_choices():
    check_choice("Layer", "mode", "a", ("a", None))
    check_choice("Layer", "mode", None, ("a", None))
    message = r"^Layer: mode must be one of a, None; got 'b'$"
    with pytest.raises(ValueError, match=message):
        check_choice("Layer", "mode", "b", ("a", None))


@pytest.mark.parametrize("value", [2, 5, np.int8(3), torch.tensor(4)])
def test_ints_in_their_range(value):
    found = check_int("Layer", "dim", value, 2, 5)
    assert type(found) is int
    assert found == value


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1, ValueError, r"must be in \[2, 5\], got 1"),
        (6, ValueError, r"must be in \[2, 5\], got 6"),
        (np.int64(9), ValueError, r"must be in \[2, 5\], got 9"),
        (3.0, TypeError, r"must be an int, got 3\.0"),
        ("3", TypeError, r"must be an int, got '3'"),
        (None, TypeError, r"must be an int, got None"),
        (True, TypeError, r"must be an int, got True"),
    ],
)
def test_what_is_no_int_in_its_range(value, error, message):
    with pytest.raises(error, match=f"^Layer: dim {message}$"):
        check_int("Layer", "dim", value, 2, 5)


@pytest.mark.parametrize("value", [2, 2.5, np.float32(0.5), torch.tensor(3), torch.tensor([1.5])])
def test_numbers(value):
    found = check_number("Layer", "lr", value)
    assert type(found) is float
    assert found == float(value)


@pytest.mark.parametrize("value", [None, "1", True, 1j, torch.ones(2), torch.tensor(True), [1]])
def test_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"^Layer: lr must be a number, got "):
        check_number("Layer", "lr", value)


def test_the_nearest_name():
    assert did_you_mean("itme", ["user", "item", "item"]) == "; did you mean item?"
    assert did_you_mean("item", ["user", " item"]) == "; did you mean ' item'?"
    assert did_you_mean("zzz", ["user", "item"]) == did_you_mean("x", []) == ""


def test_the_nearest_file(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "clicks.csv").touch()
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    for wrong, right in (
        ("data/click.csv", "data/clicks.csv"),
        ("dtaa/clicks.csv", "data"),
        ("dtaa/deep/clicks.csv", "data"),
        (f"{tmp_path}/data/click.csv", f"{tmp_path}/data/clicks.csv"),
        ("dtaa", "data"),
    ):
        assert did_you_mean_file(wrong) == f"; did you mean {right}?"
    for wrong in ("data/zzz", "link", "data/clicks.csv/x", "/no/such/place", ""):
        assert did_you_mean_file(wrong) == ""
    monkeypatch.setattr(_nearest, "_MOST_FILES", 0)
    assert did_you_mean_file("dtaa") == ""

    def denied(path):
        raise PermissionError

    monkeypatch.setattr(os, "scandir", denied)
    assert did_you_mean_file("dtaa") == ""


def test_packages_that_are_missing_are_named(monkeypatch):
    assert needed("json", "reading") is sys.modules["json"]
    for module, package, extra in (
        ("yaml", "pyyaml", "train"), ("pyarrow.parquet", "pyarrow", "data")
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, module, None)
        message = rf"^reading needs {package}: pip install 'sparsekit-torch\[{extra}\]'$"
        with pytest.raises(MissingPackageError, match=message):
            needed(module, "reading")


@pytest.fixture
def parser():
    parser = Parser(prog="tool")
    parser.add_argument("--rows", type=int, default=5, help="rows of a table")
    parser.add_argument("--name", help="of a table")
    parser.add_argument("--fast", action="store_true", help="go fast")
    commands = parser.add_subparsers()
    train = commands.add_parser("train")
    train.add_argument("--epochs", choices=["one", "many"])
    return parser


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rwos=3"], "tool: unrecognized arguments: --rwos=3; did you mean --rows? (see tool --"),
        (["trian"], "; did you mean train? (see tool --help)"),
        (
            ["train", "--eopchs"],
            "tool train: unrecognized arguments: --eopchs; did you mean --epoc",
        ),
        (["train", "--epochs", "mnay"], "invalid choice: 'mnay' (choose from 'one', 'many'); did"),
        (["train", "x"], "tool train: unrecognized arguments: x (see tool train --help)"),
        (["--rows", "many"], "tool: argument --rows: invalid int value: 'many' (see tool --help)"),
    ],
)
def test_errors_of_arguments_are_one_line(parser, capsys, arguments, said):
    with pytest.raises(SystemExit, match=r"^2$"):
        parser.parse_args(arguments)
    printed, error = capsys.readouterr()
    assert printed == ""
    assert said in error
    assert error.count("\n") == 1


def test_defaults_in_the_help(parser):
    text = " ".join(parser.format_help().split())
    assert "rows of a table (default: 5)" in text
    assert "of a table --fast go fast" in text.replace("--name NAME ", "")
    plain = Parser(formatter_class=argparse.HelpFormatter)
    plain.add_argument("--rows", default=5, help="rows")
    assert "default" not in plain.format_help()


def test_options_that_a_parser_knows(parser):
    assert parser.knows("--rows")
    assert parser.knows("--ro")
    assert parser.knows("-h")
    assert not parser.knows("--rowss")
    assert not parser.knows("train")
