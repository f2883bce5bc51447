"""Functions shared by the commands."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .._extras import MissingPackageError
from .._nearest import did_you_mean_file
from ..datasets import DatasetUnavailableError, RatingsFormatError
from ..errors import CheckpointError, DataFormatError, ResumeError
from ..train.config import ConfigError


class UsageError(Exception):
    """An error that the user can fix; it is printed without a traceback."""


EXPECTED = (
    UsageError,
    DatasetUnavailableError,
    RatingsFormatError,
    DataFormatError,
    CheckpointError,
    ResumeError,
    MissingPackageError,
    ConfigError,
)


def discard_output() -> None:
    """Redirect stdout to the null device, so that flushing it cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def number(kind: type, least: float, most: float) -> Callable[[str], float]:
    """Return a function for argparse that parses an int or float in [least, most]."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:  # also true if value is nan
            raise argparse.ArgumentTypeError(f"{text} is not in [{least}, {most}]")
        return value

    parse.__name__ = kind.__name__  # argparse shows this name: "invalid int value"
    return parse


count = number(int, 1, 2**31 - 1)


def check_folder(file: str | None, option: str = "--save", *, folder: bool = False) -> None:
    """Raise UsageError before the work begins if a file or folder cannot be written."""
    if file is None:
        return
    path = Path(file).resolve()
    if folder and path.is_dir():
        path /= "file"
    elif path.is_dir() or (folder and path.exists()):
        raise UsageError(f"{option} {file}: is a {'file' if folder else 'folder'}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{option} {file}: cannot write into {path.parent}")


def check_other_file(option: str, written: str | None, read: str | None) -> None:
    """Raise UsageError before the work begins if the output file is the input file."""
    try:
        same = written is not None and read is not None and os.path.samefile(written, read)
    except OSError:  # one of the files does not exist
        return
    if same:
        raise UsageError(f"{option} {written}: is the file that is read, {read}; choose another")


def check_apart(option: str, file: str | None, other_option: str, other: str | None) -> None:
    """Raise UsageError before the work begins if two options give the same output file."""
    if file is not None and other is not None and os.path.realpath(file) == os.path.realpath(other):
        raise UsageError(f"{option} {file}: is the file of {other_option}; choose another")


def why(error: OSError, path: str) -> str:
    """Describe why a file could not be read; suggest an existing file with a similar name."""
    hint = did_you_mean_file(path) if isinstance(error, FileNotFoundError) else ""
    return f"{error.strerror or error}{hint}"


def told(error: Exception, path: str) -> str:
    """Describe an error about a path; begin with the file unless the error's text names it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    file = str(error.filename or path)
    return f"{file}: {why(error, file)}"


@contextlib.contextmanager
def writing(option: str, file: str | None) -> Iterator[None]:
    """Convert an OSError raised in this context to a UsageError about writing the file."""
    try:
        yield
    except OSError as error:
        if file is None:
            raise
        raise UsageError(f"{option} {file}: {error.strerror or error}") from error


def set_threads(threads: int | None) -> None:
    """Set the number of torch's threads; None means OMP_NUM_THREADS if it is set, else 1."""
    # At the commands' batch sizes, a second thread helps little, and is costly if cores are shared,
    # for instance with other ranks: torch's threads wait for one another by spinning.
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def rank() -> int:
    """Return this process's rank; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Iterable[float]) -> list[float]:
    """Sum each value over all ranks."""
    total = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()
