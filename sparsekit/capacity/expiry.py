"""Predicts hit rates and row counts of tables whose rows expire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..tables.life import SWEEPS_PER_TTL
from .sample import KeySample, Lookups

# Number of powers of two that are simulated if no ttl values are given.
_POWERS = 40


class Expiry:
    """Counts the keys that return after their rows have expired, for several ttls in one pass.

    A key has a row if the last sweep before its lookup kept the row. This depends only on the times
    of the key's lookups.

    Args:
        ttls: ttl values, ascending; None for all powers of two.

    Attributes:
        rows: estimated maximum number of rows in use just before a sweep, ``[len(ttls)]``; updated
            at the end of each `run`.
    """

    def __init__(self, ttls: Sequence[int] | None) -> None:
        self._all = ttls is None
        self._ttls = np.array([2**i for i in range(_POWERS)] if ttls is None else ttls, np.int64)
        self._every = np.maximum(1, self._ttls // SWEEPS_PER_TTL)
        self._misses, self.rows = np.zeros((2, len(self._ttls)))

    def run(self, lookups: Lookups, sample: KeySample) -> None:
        """Look up keys; `sample` must already include these lookups."""
        if len(lookups.slots) == 0:
            return
        known, clock = lookups.previous > 0, int(lookups.clock[-1])
        came, then = lookups.clock[known] - 1, lookups.previous[known]
        first_come = len(known) - len(came)
        last = np.sort(sample.last[: len(sample)])
        for i, (ttl, every) in enumerate(zip(self._ttls, self._every, strict=True)):
            late = 0 if ttl >= clock else np.count_nonzero(then < came // every * every - ttl)
            self._misses[i] += (first_come + late) / sample.rate
            alive = len(last) - np.searchsorted(last, max(1, clock + 1 - every - ttl))
            self.rows[i] = max(self.rows[i], alive / sample.scale)

    def points(self, clock: int) -> list[tuple[int, float, float]]:
        """Return each ttl with its rows and misses; omit default ttls not below the clock."""
        shown = len(self._ttls)
        if self._all:
            shown = int(np.searchsorted(self._ttls, clock))
        columns = self._ttls[:shown], self.rows[:shown], self._misses[:shown]
        return list(zip(*(column.tolist() for column in columns), strict=True))
