"""Converts numbers to categories by cutting their range into buckets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

# Values that represent a missing number.
MISSING = (None, "", "?")


class QuantileBuckets:
    """Maps the numbers in a column to buckets, which can be hashed like categories.

    Bucket i of a column contains the numbers x with ``edges[i - 1] <= x < edges[i]``; a missing
    number is in bucket -1. A number that was not in the data used to choose the edges gets its
    neighbors' bucket. (Hashed as text, it would be an unknown category.)

    Args:
        edges: the edges of each numeric column, by name; finite and in ascending order.

    Raises:
        ValueError: edges are not finite or not in ascending order.
    """

    def __init__(self, edges: Mapping[str, Iterable[float]]) -> None:
        self.edges = {name: np.array(list(cuts), np.float64) for name, cuts in edges.items()}
        for name, cuts in self.edges.items():
            if not (np.isfinite(cuts).all() and (np.diff(cuts) > 0).all()):
                raise ValueError(f"QuantileBuckets: edges[{name!r}] must be finite and rise")

    @classmethod
    def fit(cls, columns: Any, names: Iterable[str], count: int = 32) -> QuantileBuckets:
        """Choose edges from the numbers in training rows.

        If a column has at most `count` distinct numbers, each number gets a bucket. Otherwise, a
        number that makes up at least ``1 / count`` of the rows gets a bucket of its own: zero, for
        example, if most amounts are zero. The other numbers are divided into `count` parts of
        nearly equal size. This makes at most ``3 * count`` buckets. Pass only training rows, not
        the rows to be predicted.

        Args:
            columns: n values per column, as for `__call__`.
            names: names of the numeric columns.
            count: number of parts, >= 1.

        Raises:
            ValueError: a value is not a number; the message gives its position.
        """
        return cls({name: _edges(_numbers(name, columns[name]), count) for name in names})

    def __call__(self, columns: Any) -> dict[str, torch.Tensor]:
        """Return the bucket of each number in each column.

        Args:
            columns: n values for each name in `edges`: an array or tensor of numbers, or a sequence
                of numbers and strings. NaN, None, ``""`` and ``"?"`` are missing numbers.

        Returns:
            The buckets by column name, int64 ``[n]`` in [-1, len(edges)].

        Raises:
            ValueError: a value is not a number; the message gives its position.
        """
        return {name: self._bucket(name, columns[name]) for name in self.edges}

    def _bucket(self, name: str, column: Any) -> torch.Tensor:
        numbers = _numbers(name, column)
        found = np.searchsorted(self.edges[name], numbers, side="right")
        return torch.from_numpy(np.where(np.isnan(numbers), -1, found))


def _numbers(name: str, column: Any) -> np.ndarray:
    """Convert a column to float64 [n], with NaN for missing numbers."""
    if isinstance(column, torch.Tensor):
        column = column.cpu().numpy()
    # Convert an Arrow column; nulls become NaN in a column of numbers, None in one of strings.
    values = np.asarray(column) if hasattr(column, "to_pylist") else column
    if isinstance(values, np.ndarray) and values.dtype.kind in "iuf":
        return values.astype(np.float64)
    numbers = np.empty(len(values), np.float64)
    for i, value in enumerate(values):
        try:
            numbers[i] = math.nan if value in MISSING else float(value)
        except (TypeError, ValueError):
            raise ValueError(f"QuantileBuckets: {name}[{i}] is no number: {value!r:.80}") from None
    return numbers


def _edges(numbers: np.ndarray, count: int) -> np.ndarray:
    if count < 1:
        raise ValueError(f"QuantileBuckets: count must be >= 1, got {count}")
    numbers = np.sort(numbers[np.isfinite(numbers)])
    values, times = np.unique(numbers, return_counts=True)
    if len(values) <= count:
        return values[1:]
    frequent = times * count >= len(numbers)
    rest = numbers[~np.isin(numbers, values[frequent])]
    quantiles = rest[np.arange(1, count) * len(rest) // count] if len(rest) else rest
    # Begin a bucket at each frequent value, and another one at the next value.
    following = values[1:][frequent[:-1]]
    edges = np.unique(np.concatenate([quantiles, values[frequent], following]))
    return edges[edges > values[0]]
