"""Functions that the commands share."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from .._nearest import did_you_mean_file
from ..datasets import DatasetUnavailableError, RatingsFormatError
from ..errors import CheckpointError, DataFormatError, ResumeError


class UsageError(Exception):
    """A mistake that the user can put right; shown without a traceback."""


EXPECTED = (
    UsageError,
    DatasetUnavailableError,
    RatingsFormatError,
    DataFormatError,
    CheckpointError,
    ResumeError,
)


def discard_output() -> None:
    """Let what is left to flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def number(kind: type, least: float, most: float) -> Callable[[str], float]:
    """Makes the parser of an argument that is an int or a float in [least, most]."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:  # true of nan as well
            raise argparse.ArgumentTypeError(f"{text} is not in [{least}, {most}]")
        return value

    parse.__name__ = kind.__name__  # argparse names it in "invalid int value"
    return parse


def check_folder(file: str | None, option: str = "--save", *, folder: bool = False) -> None:
    """Raise before the work that a file or folder cannot be written, which would show after it."""
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
    """Raise before the work if a file would be overwritten that is read, whatever its names are."""
    try:
        same = written is not None and read is not None and os.path.samefile(written, read)
    except OSError:  # one is not there
        return
    if same:
        raise UsageError(f"{option} {written}: is the file that is read, {read}; choose another")


def check_apart(option: str, file: str | None, other_option: str, other: str | None) -> None:
    """Raise before the work if two results would be written to one file."""
    if file is not None and other is not None and os.path.realpath(file) == os.path.realpath(other):
        raise UsageError(f"{option} {file}: is the file of {other_option}; choose another")


def why(error: OSError, path: str) -> str:
    """Explains why a file could not be read, and suggests which one was meant."""
    hint = did_you_mean_file(path) if isinstance(error, FileNotFoundError) else ""
    return f"{error.strerror or error}{hint}"


@contextlib.contextmanager
def writing(option: str, file: str) -> Iterator[None]:
    """Raise UsageError that names the option where a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{option} {file}: {error.strerror or error}") from error


def set_threads(threads: int | None) -> None:
    """Compute with ``--threads`` threads; None: as OMP_NUM_THREADS says, or one."""
    # Batches of this size gain little from a second thread, and lose much where cores are shared,
    # with other ranks for instance: torch's threads wait for one another by spinning.
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def rank() -> int:
    """The number of this process among the ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Iterable[float]) -> list[float]:
    """Each value's sum over all ranks."""
    total = torch.tensor(list(values), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()
