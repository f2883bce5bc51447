"""Rows that keys share until they are admitted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import check_int
from .hash_table import HashTable
from .key_hash import mixed

# Fallback rows have the smallest int64 keys, which no other row may have.
_FIRST_KEY = -(2**63)


@dataclass(frozen=True)
class Fallback:
    """Rows that keys share, for reading and training, until `admission` gives them their own.

    A hash of the key selects the row. Fallback rows are ordinary rows of the table, except that
    they are never dropped, and that `items` leaves them out. Their keys are the smallest int64
    numbers, which lookups must not contain.

    Args:
        rows: number of rows over all ranks, at least 1.

    Raises:
        TypeError, ValueError: rows is not an int or is out of range.
    """

    rows: int

    def __post_init__(self) -> None:
        check_int("Fallback", "rows", self.rows, 1, 2**31 - 1)

    def keys(self, device: torch.device) -> torch.Tensor:
        """Return the keys of the fallback rows, int64 ``[rows]``."""
        return torch.arange(self.rows, device=device) + _FIRST_KEY

    def key_of(self, keys: torch.Tensor) -> torch.Tensor:
        """Return, for each int64 key, the key of its fallback row."""
        return mixed(keys) % self.rows + _FIRST_KEY

    def has(self, keys: torch.Tensor) -> torch.Tensor:
        """Return a mask of the keys that belong to fallback rows."""
        return keys < _FIRST_KEY + self.rows

    def check(self, name: str, keys: torch.Tensor) -> None:
        """Raise ValueError if any of a user's keys belongs to a fallback row."""
        if bool((own := self.has(keys)).any()):
            raise ValueError(
                f"{name}: key {int(keys[own][0])} is one of the {self.rows} smallest int64 "
                f"numbers, which are keys of the rows of {self}"
            )


def fallback_rows(fallback: Fallback | None, index: HashTable) -> list[torch.Tensor]:
    """Return the fallback rows in a list, -1 for other ranks' rows; empty if there are none."""
    return [] if fallback is None else [index.find(fallback.keys(index.tensors()[0].device))]


def count_fallbacks(
    fallback: Fallback | None, keys: torch.Tensor, occurrences: torch.Tensor | None
) -> int:
    """Return how many of the keys that a lookup inserts belong to fallback rows."""
    if fallback is None:
        return 0
    asked = fallback.has(keys)
    if occurrences is not None:
        asked &= occurrences > 0
    return len(keys[asked].unique())
