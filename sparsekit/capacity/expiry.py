"""Predicts hit rates and rows of tables whose rows expire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..tables.life import SWEEPS_PER_TTL
from .sample import KeySample, Lookups

# Powers of two that stand for all values of ttl, if none are asked for.
_POWERS = 40


class Expiry:
    """Counts the keys that come back too late, for several values of ttl in one pass.

    A key has a row if the sweep of the latest period before its lookup has left it, which only the
    time since its last lookup decides.

    Args:
        ttls: values of ttl, ascending; None for all powers of two.

    Attributes:
        rows: estimate of the most rows in use at the end of a period, ``[len(ttls)]``, from the
            ends of the runs of lookups.
    """

    def __init__(self, ttls: Sequence[int] | None) -> None:
        self._all = ttls is None
        self._ttls = np.array([2**i for i in range(_POWERS)] if ttls is None else ttls, np.int64)
        self._every = np.maximum(1, self._ttls // SWEEPS_PER_TTL)
        self._misses, self.rows = np.zeros((2, len(self._ttls)))

    def run(self, lookups: Lookups, sample: KeySample) -> None:
        """Look keys up; the sample is that after these lookups."""
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
        """Return each ttl, its rows and its misses; without powers of two above the clock."""
        shown = len(self._ttls)
        if self._all:
            shown = int(np.searchsorted(self._ttls, clock))
        columns = self._ttls[:shown], self.rows[:shown], self._misses[:shown]
        return list(zip(*(column.tolist() for column in columns), strict=True))
