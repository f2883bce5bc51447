"""Numbers as categories."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

# Texts that stand for a missing number.
MISSING = (None, "", "?")


class QuantileBuckets:
    """Cuts numeric columns into buckets, whose numbers can be hashed as categories are.

    Bucket i of a column has the numbers x with ``edges[i - 1] <= x < edges[i]``; a missing one is
    in bucket -1. A number that no row had before falls among its neighbours, where its text would
    be a category of its own.

    Args:
        edges: name of each numeric column -> its edges, rising and finite.

    Raises:
        ValueError: edges that do not rise.
    """

    def __init__(self, edges: Mapping[str, Iterable[float]]) -> None:
        self.edges = {name: np.array(list(cuts), np.float64) for name, cuts in edges.items()}
        for name, cuts in self.edges.items():
            if not (np.isfinite(cuts).all() and (np.diff(cuts) > 0).all()):
                raise ValueError(f"QuantileBuckets: edges[{name!r}] must be finite and rise")

    @classmethod
    def fit(cls, columns: Any, names: Iterable[str], count: int = 32) -> QuantileBuckets:
        """Choose edges by the numbers in some rows; those to be predicted are no part of them.

        A column of at most `count` distinct numbers gets a bucket for each. In others a number that
        makes up ``1 / count`` of the rows has a bucket of its own, as the zeros of an amount that
        few people have; the rest are cut into `count` parts of nearly equal size. That is at most
        ``3 * count`` buckets.

        Args:
            columns: name -> n numbers or their texts; see `__call__`.
            names: the numeric ones.
            count: >= 1.

        Raises:
            ValueError: a value that is no number, named with its position.
        """
        return cls({name: _edges(_numbers(name, columns[name]), count) for name in names})

    def __call__(self, columns: Any) -> dict[str, torch.Tensor]:
        """The bucket of each number.

        Args:
            columns: name -> n values for each name in `edges`: an array or a tensor of numbers, or
                a sequence of numbers and texts. NaN, None, ``""`` and ``"?"`` are missing.

        Returns:
            Name -> int64 ``[n]`` in [-1, len(edges)].

        Raises:
            ValueError: a value that is no number, named with its position.
        """
        return {name: self._bucket(name, columns[name]) for name in self.edges}

    def _bucket(self, name: str, column: Any) -> torch.Tensor:
        numbers = _numbers(name, column)
        found = np.searchsorted(self.edges[name], numbers, side="right")
        return torch.from_numpy(np.where(np.isnan(numbers), -1, found))


def _numbers(name: str, column: Any) -> np.ndarray:
    """float64 [n], NaN where a number is missing."""
    if isinstance(column, torch.Tensor):
        column = column.cpu().numpy()
    # An Arrow column of numbers has NaN for null then, one of text None.
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
    # A frequent value begins a bucket, and so does the next one.
    following = values[1:][frequent[:-1]]
    edges = np.unique(np.concatenate([quantiles, values[frequent], following]))
    return edges[edges > values[0]]
