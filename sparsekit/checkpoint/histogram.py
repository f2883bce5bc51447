"""Counts numbers in fine bins: quantiles then take little memory, however many rows there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

QUANTILES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
# Number of low bits of a float32 that do not affect which fine bin it falls into. The other bits
# are those of the bin's lower edge.
_IGNORED = 11
_FINE_BINS = 1 << 20
_MOST = float(np.finfo(np.float32).max)
# Number of bins in a plot. Their widths are equal, or (nearly) equal on a logarithmic scale if the
# largest number is more than _WIDE times the median.
_BINS = 40
_WIDE = 8


@dataclass(frozen=True)
class Spread:
    """Distribution of a number over the rows of a table.

    Attributes:
        quantiles: the quantiles for the fractions 0, 0.01, 0.1, 0.5, 0.9, 0.99 and 1, by fraction.
            The first and the last are exact, and so are whole numbers up to 8,192; others are too
            low by at most 1 / 4,096 of their value.
        edges: edges of the bins, in ascending order; one more than ``counts``.
        counts: number of rows in each bin.
        logarithmic: whether the bins are spaced logarithmically, apart from one that begins at 0.
    """

    quantiles: dict[float, float]
    edges: list[float]
    counts: list[int]
    logarithmic: bool


class Histogram:
    """Counts numbers >= 0 in fine bins, which take 8 MiB in total.

    A fine bin contains the numbers whose float32 values share their first 21 bits. Floats >= 0 sort
    in the same order as their bits.

    Args:
        whole: true if all numbers are integers.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self._counts = np.zeros(_FINE_BINS, dtype=np.int64)
        self._least, self._greatest = np.inf, 0.0

    def add(self, numbers: torch.Tensor) -> None:
        """Count numbers ``[n]`` of any real dtype; negative ones count as 0."""
        if not len(numbers):
            return
        numbers = numbers.double().clamp_(0, _MOST)
        self._least = min(self._least, float(numbers.min()))
        self._greatest = max(self._greatest, float(numbers.max()))
        bits = numbers.float().clamp_(max=_MOST).view(torch.int32) >> _IGNORED
        np.add.at(self._counts, bits.numpy(), 1)

    def spread(self) -> Spread | None:
        """Return the distribution of the numbers added so far; None if there are none."""
        filled = np.flatnonzero(self._counts)
        if not len(filled):
            return None
        lower = (filled.astype(np.int32) << _IGNORED).view(np.float32).astype(np.float64)
        numbers = lower.clip(self._least, self._greatest)
        counts = self._counts[filled]
        places = np.floor(np.array(QUANTILES) * (counts.sum() - 1))
        found = numbers[np.searchsorted(counts.cumsum(), places, side="right")]
        found[0], found[-1] = self._least, self._greatest
        logarithmic = 0 < _WIDE * found[len(found) // 2] < self._greatest
        edges = self._edges(numbers, logarithmic)
        into = (np.searchsorted(edges, numbers, side="right") - 1).clip(0, len(edges) - 2)
        binned = np.bincount(into, weights=counts, minlength=len(edges) - 1).astype(np.int64)
        quantiles = dict(zip(QUANTILES, found.tolist(), strict=True))
        return Spread(quantiles, edges.tolist(), binned.tolist(), bool(logarithmic))

    def _edges(self, numbers: np.ndarray, logarithmic: bool) -> np.ndarray:
        """Return the bin edges for a plot of these numbers, given in ascending order."""
        least, last = self._least, self._greatest + self.whole
        if last == least:
            return np.array([least, np.nextafter(least, np.inf)])
        if not logarithmic:
            if not self.whole:
                return np.linspace(least, last, _BINS + 1)
            return np.append(np.arange(least, last, np.ceil((last - least) / _BINS)), last)
        positive = numbers[numbers > 0][0]
        if self.whole:  # edges at 1, 2, 3, 4, 6, 8, 12, 16, ...
            powers = 2.0 ** np.arange(np.ceil(np.log2(last)))
            edges = np.unique([*powers, *np.floor(1.5 * powers)])
            edges = np.concatenate([[positive], edges[(edges > positive) & (edges < last)], [last]])
        else:
            edges = np.geomspace(positive, last, _BINS + 1)
        return edges if least > 0 else np.concatenate([[0.0], edges])
