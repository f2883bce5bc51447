"""Chooses keys by a hash, and records the lookups that have them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..tables.hash_table import HashTable
from ..tables.key_hash import mixed

# Makes the hash by which keys are chosen independent of the one that orders equal scores.
_SALT = 0x5851F42D4C957F2D
_SIGN = -(2**63)
# Places of the marks by which distinct keys are counted.
_PLACES = 1 << 22


class Lookups(NamedTuple):
    """Chosen keys of consecutive lookups: an entry for each distinct key of each lookup.

    Attributes:
        slots: number of the entry's key among the chosen keys, int64 ``[n]``.
        clock: number of the lookup, from 1, int64 ``[n]``, ascending.
        times: how often the lookup has the key, int64 ``[n]``.
        before: how often earlier lookups have had the key, int64 ``[n]``.
        previous: the last earlier lookup that has had the key, or 0, int64 ``[n]``.
        first: index of the first entry of the entry's lookup, int64 ``[n]``.
        end: index behind the last entry of the entry's lookup, int64 ``[n]``.
    """

    slots: np.ndarray
    clock: np.ndarray
    times: np.ndarray
    before: np.ndarray
    previous: np.ndarray
    first: np.ndarray
    end: np.ndarray


class KeySample:
    """Keys whose hash is below a limit, which is halved whenever they become too many.

    The keys are chosen by hash and not by occurrence, so that of a chosen key every lookup is seen;
    a fixed number of them bounds the memory: SHARDS, by Waldspurger, Park, Garthwaite and Ahmad,
    "Efficient MRC Construction with SHARDS", FAST 2015, section 3.

    Args:
        most: largest number of keys to keep.

    Attributes:
        rate: fraction of the hashes that is kept, a power of two in (0, 1].
        scale: fraction of the distinct keys so far that is kept, which differs from the rate by
            chance.
        found: estimated number of distinct keys: new keys, divided by the rate at their time.
        total: how often each kept key has come, int64 ``[most]``.
        last: the last lookup that had it, int64 ``[most]``.
        ties: order of keys with equal scores in a table, int64 ``[most]``, below 2^31.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.rate = self.scale = 1.0
        self.found = 0.0
        self._marks = np.zeros(_PLACES, bool)
        self._index = HashTable(most, device="cpu", name="sampled keys")
        self.total, self.last, self.ties = (np.zeros(most, np.int64) for _ in range(3))

    def __len__(self) -> int:
        return len(self._index)

    def mark(self, keys: torch.Tensor) -> None:
        """Count int64 keys ``[n]`` among the distinct keys, whether they are chosen or not."""
        self._marks[(mixed(keys) & (_PLACES - 1)).numpy()] = True

    def distinct(self) -> float:
        """Return the number of distinct keys that have been marked; estimated below a rate of 1.

        Linear counting: Whang, Vander-Zanden and Taylor, "A Linear-Time Probabilistic Counting
        Algorithm for Database Applications", ACM TODS 15, 1990. Its standard error is 0.06% for ten
        million keys.
        """
        if self.rate == 1:
            return len(self)
        free = max(1, _PLACES - np.count_nonzero(self._marks))
        return _PLACES * math.log(_PLACES / free)

    def chosen(self, keys: torch.Tensor) -> torch.Tensor:
        """Return a mask of the int64 keys ``[n]`` whose hash is below the limit."""
        if self.rate == 1:
            return torch.ones_like(keys, dtype=torch.bool)
        # Flipping the sign orders the words as unsigned numbers.
        return (mixed(keys ^ _SALT) ^ _SIGN) < int(self.rate * 2**64) + _SIGN

    def make_room(self, keys: torch.Tensor) -> np.ndarray | None:
        """Lower the rate until there is room for more keys.

        Args:
            keys: int64 ``[n]``, distinct keys that are chosen.

        Returns:
            The slots that stay, int64 ``[k]``, ascending: slot ``kept[i]`` becomes slot ``i``. None
            if all stay.
        """
        keys = keys[self._index.find(keys) < 0]
        known = kept = self._index.keys()
        while len(kept) + len(keys) > self._most:
            self.rate /= 2
            kept, keys = kept[self.chosen(kept)], keys[self.chosen(keys)]
        if len(kept) == len(known):
            return None
        slots = self.chosen(known).nonzero()[:, 0].numpy()
        self._index = HashTable(self._most, device="cpu", name="sampled keys")
        self._index.find_or_insert(kept)
        for state in (self.total, self.last, self.ties):
            state[: len(slots)] = state[slots]
            state[len(slots) :] = 0
        return slots

    def insert(self, keys: torch.Tensor) -> np.ndarray:
        """Insert chosen keys for which there is room, and return their slots, int64 ``[n]``."""
        known = len(self)
        slots = self._index.find_or_insert(keys).numpy()
        if known < len(self):
            new = mixed(self._index.keys()[known:])
            self.ties[known : len(self)] = ((new >> 33) & (2**31 - 1)).numpy()
        return slots

    def see(self, keys: torch.Tensor, clock: np.ndarray, times: np.ndarray) -> Lookups:
        """Insert keys for which there is room, and return their lookups.

        Args:
            keys: int64 ``[n]``, chosen keys; distinct in each lookup, in the order of lookups.
            clock: number of each key's lookup, int64 ``[n]``.
            times: how often the lookup has the key, int64 ``[n]``.
        """
        slots = self.insert(keys)
        # Sums and predecessors within these lookups: by key, then in the order of lookups.
        order = np.argsort(slots, kind="stable")
        ordered, amounts, clocks = slots[order], times[order], clock[order]
        sums = np.cumsum(amounts) - amounts
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        sizes = np.diff(np.append(starts, len(ordered)))
        before, previous = np.empty_like(times), np.empty_like(clock)
        new = int(np.count_nonzero(self.last[ordered[starts]] == 0))
        self.found += new / self.rate
        if self.rate < 1:
            self.scale = (np.count_nonzero(self.last) + new) / self.distinct()
        before[order] = sums - np.repeat(sums[starts], sizes) + self.total[ordered]
        earlier = np.roll(clocks, 1)
        earlier[starts] = self.last[ordered[starts]]
        previous[order] = earlier
        first = np.flatnonzero(np.diff(clock, prepend=-1))
        entries = np.diff(np.append(first, len(clock)))
        return Lookups(
            *(slots, clock, times, before, previous),
            *(np.repeat(first, entries), np.repeat(first + entries, entries)),
        )

    def advance(self, lookups: Lookups) -> None:
        """Record that lookups have been, after `see`."""
        # The last entry of a key stays.
        self.total[lookups.slots] = lookups.before + lookups.times
        self.last[lookups.slots] = lookups.clock


def distinct(
    keys: torch.Tensor, clock: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Find the distinct keys of each lookup.

    Args:
        keys: int64 ``[n]``, in the order of lookups.
        clock: number of each key's lookup, int64 ``[n]``.

    Returns:
        The position at which each distinct key of a lookup first comes, int64 ``[u]``, ascending;
        how often the lookup has it, int64 ``[u]``; and how many there are up to and with each
        position, int64 ``[n]``.
    """
    # Equal words of different keys would be counted as one, which 64 bits make improbable.
    words = mixed(keys) ^ mixed(clock ^ _SALT)
    _, numbers, times = ops.unique(words)
    so_far = np.maximum.accumulate(numbers.numpy())  # numbers are in order of first occurrence
    return torch.from_numpy(np.flatnonzero(np.diff(so_far, prepend=-1))), times, so_far + 1
