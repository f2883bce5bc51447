"""Simulates a table that evicts, scaled down to a sample of its keys."""

from __future__ import annotations

import copy

import numpy as np

from .policy import Policy
from .sample import KeySample, Lookups

# Minimum number of entries to process together.
_ENTRIES = 64
# Score of a row that must be kept.
_STAYS = np.iinfo(np.int64).max


class Miniature:
    """A table for a sample of the keys, with proportionally fewer rows.

    A sample of the keys affects a table with proportionally fewer rows just as all keys affect the
    full table: Waldspurger, Saemundsson, Ahmad and Park, "Cache Modeling and Optimization using
    Miniature Simulations", USENIX ATC 2017. A lookup that would bring the table over its budget
    first sweeps down to the low watermark, as layers do.

    Between two sweeps, many lookups can be processed at once: a key has a row if it has occurred
    often enough since it lost its last row.

    Args:
        policy: a policy with a score.
        rows: rows of the full table, not of the miniature; if infinite, the miniature never sweeps.
        low_watermark: fraction of the rows that a sweep keeps.
        most: maximum number of keys in the sample.

    Attributes:
        misses: estimated number of keys without a row, over all lookups.
    """

    def __init__(self, policy: Policy, rows: float, low_watermark: float, most: int) -> None:
        self.policy, self.rows = policy, rows
        self.misses = 0.0
        self._halve_every = policy.halve_every
        self._low_watermark = low_watermark
        self._period = 0  # how many times counts have been halved
        # For each key: its occurrences when it last lost its row, and the number to subtract from
        # its occurrences to get its LFU count.
        self._since = np.zeros(most, np.int64)
        self._uncounted = np.zeros(most if policy.score == "lfu" else 0, np.int64)
        self._held = np.zeros(0, np.int64)  # slots of the keys that have rows

    @property
    def held(self) -> int:
        """Number of sampled keys that have rows."""
        return len(self._held)

    def limited(self, rows: int) -> Miniature:
        """Return a copy with the given number of rows."""
        made = copy.deepcopy(self)
        made.rows = rows
        return made

    def held_after(self, lookups: Lookups) -> int:
        """Return how many keys would have rows after these lookups if there were no sweep."""
        return len(self._held) + int(self._find(lookups, 0, len(lookups.slots))[1].sum())

    def keep(self, slots: np.ndarray) -> None:
        """Drop the keys that have left the sample; see `KeySample.make_room`."""
        for state in (self._since, self._uncounted):
            if len(state):
                state[: len(slots)] = state[slots]
                state[len(slots) :] = 0
        numbers = np.full(len(self._since), -1)
        numbers[slots] = np.arange(len(slots))
        numbers = numbers[self._held]
        self._held = numbers[numbers >= 0]

    def run(self, lookups: Lookups, sample: KeySample) -> None:
        """Look up keys.

        Args:
            lookups: the lookups.
            sample: the sample as it was before these lookups.
        """
        budget = self.rows if self.rows == np.inf else max(1, round(self.rows * sample.scale))
        total, last = sample.total.copy(), sample.last.copy()
        begin, width, misses = 0, _ENTRIES, 0
        while begin < len(lookups.slots):
            self._age(int(lookups.clock[begin]), total)
            end = self._end(lookups, begin, width)
            absent, inserted = self._find(lookups, begin, end)
            in_use = len(self._held) + np.cumsum(inserted)
            swept = -1
            if in_use[-1] > budget:  # continue to the end of the lookup that exceeds the budget
                swept = begin + int(np.argmax(in_use > budget))
                end = int(lookups.end[swept])
            here = slice(begin, end)
            slots, inserted = lookups.slots[here], inserted[: end - begin]
            misses += int(absent[: end - begin].sum())
            total[slots] = lookups.before[here] + lookups.times[here]
            last[slots] = lookups.clock[here]
            if swept >= 0:
                first = int(lookups.first[swept]) - begin
                self._held = np.concatenate([self._held, slots[:first][inserted[:first]]])
                new = slots[first:][inserted[first:]]
                self._sweep(budget, len(new), int(lookups.clock[swept]), total, last, sample.ties)
            else:
                new = slots[inserted]
            self._held = np.concatenate([self._held, new])
            begin, width = end, max(_ENTRIES, 2 * (end - begin))
        self.misses += misses / sample.rate

    def _end(self, lookups: Lookups, begin: int, width: int) -> int:
        """Return where to stop: at the end of a lookup, but before counts are halved."""
        end = int(lookups.end[min(begin + width, len(lookups.slots)) - 1])
        if every := self._halve_every:
            halved = (int(lookups.clock[begin]) // every + 1) * every
            end = min(end, int(np.searchsorted(lookups.clock, halved)))
        return end

    def _find(self, lookups: Lookups, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which keys have no row before their lookup, and which of those are given one."""
        here = slice(begin, end)
        come = lookups.before[here] - self._since[lookups.slots[here]]
        absent = come < self.policy.admission
        return absent, absent & (come + lookups.times[here] >= self.policy.admission)

    def _age(self, clock: int, total: np.ndarray) -> None:
        """Halve the counts of keys with rows, if a halving is due."""
        every = self._halve_every
        if every == 0 or clock // every == self._period:
            return
        halvings = min(63, clock // every - self._period)
        held, self._period = self._held, clock // every
        counts = (total[held] - self._uncounted[held]) >> halvings
        self._uncounted[held] = total[held] - counts

    def _sweep(
        self,
        budget: float,
        new: int,
        clock: int,
        total: np.ndarray,
        last: np.ndarray,
        ties: np.ndarray,
    ) -> None:
        """Drop the rows with the lowest scores, except those used in this lookup."""
        left = max(0, min(round(self._low_watermark * budget), int(budget) - new))
        held = self._held
        scores = last[held]
        words = (total[held] - self._uncounted[held] if len(self._uncounted) else scores) << 31
        words |= ties[held]
        words[scores == clock] = _STAYS
        count = len(held) - left
        if count < len(held):
            order = np.argpartition(words, count - 1)
            gone, kept = order[:count], order[count:]
        else:
            gone, kept = np.arange(count), np.arange(0)
        pinned = words[gone] == _STAYS
        if pinned.any():  # drop only the others
            gone, kept = gone[~pinned], np.concatenate([kept, gone[pinned]])
        dropped = held[gone]
        self._since[dropped] = total[dropped]
        if len(self._uncounted):
            self._uncounted[dropped] = total[dropped]
        self._held = held[kept]
