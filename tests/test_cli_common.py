"""Tests of checks and helpers that the commands share."""

import argparse
import os
import sys

import pytest
import torch
import torch.distributed as dist

from sparsekit.cli import common, training
from sparsekit.cli.common import (
    UsageError,
    check_apart,
    check_folder,
    check_other_file,
    number,
    set_threads,
    why,
    writing,
)


def test_numbers_in_a_range():
    parse = number(int, 1, 5)
    assert [parse("1"), parse("5")] == [1, 5]
    for text in ("0", "6"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"^{text} is not in \[1, 5\]$"):
            parse(text)
    assert parse.__name__ == "int"
    with pytest.raises(argparse.ArgumentTypeError, match="nan is not in"):
        number(float, 0, 1)("nan")


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Make a file, a folder, a pipe, and a link to a file in a folder that does not exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("no/file")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "folder", "message"),
    [
        (None, False, None), ("new", False, None), ("file", False, None), ("pipe", False, None),
        (None, True, None), ("new", True, None), ("folder", True, None),
        ("folder", False, "^--out folder: is a folder$"),
        ("", False, "^--out : is a folder$"),
        ("file", True, "^--out file: is a file$"),
        ("pipe", True, "^--out pipe: is a file$"),
        ("no/file", False, "^--out no/file: cannot write into .*/no$"),
        ("no/folder", True, "^--out no/folder: cannot write into .*/no$"),
        ("link", False, "^--out link: cannot write into .*/no$"),
    ],
)  # fmt: skip
def test_where_files_and_folders_can_be_written(there, file, folder, message):
    if message is None:
        check_folder(file, "--out", folder=folder)
    else:
        with pytest.raises(UsageError, match=message):
            check_folder(file, "--out", folder=folder)


@pytest.mark.parametrize(
    ("file", "folder", "place"), [("file", False, "."), ("folder", True, "folder")]
)
def test_folders_that_may_not_be_written(there, monkeypatch, file, folder, place):
    asked = []
    monkeypatch.setattr(os, "access", lambda *arguments: asked.append(arguments))
    with pytest.raises(
        UsageError, match=rf"^--save {file}: cannot write into {(there / place).resolve()}$"
    ):
        check_folder(file, folder=folder)
    assert asked == [((there / place).resolve(), os.W_OK)]


def test_the_file_that_is_read_is_not_written(there):
    for written, read in ((None, "file"), ("file", None), ("new", "file"), ("file/x", "file")):
        check_other_file("--out", written, read)
    os.link("file", "same")
    message = "^--out same: is the file that is read, file; choose another$"
    with pytest.raises(UsageError, match=message):
        check_other_file("--out", "same", "file")


def test_two_files_are_not_one(there):
    for one, other in ((None, "new"), ("new", None), ("new", "newer"), (None, None)):
        check_apart("--out", one, "--save", other)
    os.symlink("folder", "alias")
    with pytest.raises(UsageError, match=r"^--out alias/x: is the file of --save; choose another$"):
        check_apart("--out", "alias/x", "--save", "folder/x")


def test_why_a_file_cannot_be_read(there):
    missing = FileNotFoundError(2, "No such file or directory")
    assert why(missing, "flie") == "No such file or directory; did you mean file?"
    assert why(PermissionError(13, "Permission denied"), "flie") == "Permission denied"
    assert why(OSError("odd"), "flie") == "odd"


@pytest.mark.parametrize(("error", "said"), [(OSError("odd"), "odd"), (OSError(5, "bad"), "bad")])
def test_files_that_fail_name_their_option(error, said):
    with pytest.raises(UsageError, match=f"^--save x: {said}$"), writing("--save", "x"):
        raise error
    with pytest.raises(UsageError, match=f"^--data x: {said}$"), training.reading("--data", "x"):
        raise error
    with pytest.raises(OSError, match=said), writing("--trace", None):
        raise error
    with pytest.raises(ZeroDivisionError), writing("--save", "x"), training.reading("--data", "x"):
        raise ZeroDivisionError


def test_a_model_is_saved_only_where_it_is_asked_for():
    class Model:
        def save(self, path):
            raise OSError(28, f"No space left for {path}")

    training.save(argparse.Namespace(save=None), Model())
    with pytest.raises(UsageError, match=r"^--save x: No space left for x$"):
        training.save(argparse.Namespace(save="x"), Model())


@pytest.mark.parametrize(
    ("environment", "threads", "expected"),
    [(None, None, [1]), (None, 3, [3]), ("2", None, []), ("2", 3, [3]), ("", None, [])],
)
def test_threads(monkeypatch, environment, threads, expected):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    set_threads(threads)
    assert asked == expected


def test_ranks(monkeypatch):
    assert (common.rank(), common.world_size()) == (0, 1)
    assert common.sum_over_ranks(iter([0.1, 2])) == [0.1, 2]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 7)
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.mul_(7))
    assert (common.rank(), common.world_size()) == (3, 7)
    assert common.sum_over_ranks([0.25, 2]) == [1.75, 14]


def test_discarded_output_goes_nowhere(tmp_path, monkeypatch):
    with (tmp_path / "out").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        common.discard_output()
        print("x", flush=True)
    assert (tmp_path / "out").read_text() == ""
