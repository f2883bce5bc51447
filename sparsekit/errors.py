"""Sparsekit's error types, and argument checks."""

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch


class TableFullError(RuntimeError):
    """Raised when a table has too few free rows for the new keys in a call.

    The table is left unchanged. With several ranks, all ranks raise the error, but ranks that have
    enough free rows keep their new keys. This is harmless: the next call finds those keys.

    Attributes:
        layer: name of the layer or table.
        rank: rank of the process whose shard is full.
        size: number of rows in use.
        capacity: number of rows that the table has room for.
        refused: number of distinct new keys in the call; none of them was inserted.
    """

    def __init__(self, layer: str, rank: int, size: int, capacity: int, refused: int) -> None:
        super().__init__(
            f"{layer}: the table on rank {rank} is full: {size} of {capacity} rows are in use and "
            f"the call brought {refused} new keys for {capacity - size} free rows; none was "
            f"inserted. Give it a larger capacity (a layer's max_vocabulary_size_per_gpu, "
            f"or num_embeddings)."
        )
        self.layer = layer
        self.rank = rank
        self.size = size
        self.capacity = capacity
        self.refused = refused

    def __reduce__(self) -> tuple[type, tuple[str, int, int, int, int]]:
        return type(self), (self.layer, self.rank, self.size, self.capacity, self.refused)


class DataFormatError(ValueError):
    """Raised when a data file cannot be read; the message names the file and the position."""


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written or read; the message names the file."""


class ResumeError(ValueError):
    """Raised instead of resuming a run with different data or settings."""


class DivergedError(ArithmeticError):
    """Raised when training has diverged: a loss or prediction is not finite."""


def check_choice(name: str, argument: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of the choices; the message begins with `name`."""
    if value not in choices:
        listed = ", ".join(map(str, choices))
        raise ValueError(f"{name}: {argument} must be one of {listed}; got {value!r}")


def check_int(name: str, argument: str, value: object, least: int, most: int) -> int:
    """Return ``value``, a Python or NumPy integer, as an int; errors begin with `name`.

    Raises:
        TypeError: value is not an integer, or is True or False.
        ValueError: value is outside [least, most].
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be an int, got {value!r}")
    if not least <= number <= most:
        raise ValueError(f"{name}: {argument} must be in [{least}, {most}], got {number}")
    return number


def check_number(name: str, argument: str, value: Any) -> float:
    """Return ``value``, a number or a one-element tensor, as a float; errors begin with `name`.

    Raises:
        TypeError: value is not a number, or is True or False.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} must be a number, got {value!r}")
    return float(value)
