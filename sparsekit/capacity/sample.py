"""Samples keys by hash, and records the lookups that contain them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..tables.hash_table import HashTable
from ..tables.key_hash import mixed

# Makes the sampling hash independent of the hash that orders equal scores.
_SALT = 0x5851F42D4C957F2D
_SIGN = -(2**63)
# Number of slots in the bitmap used to estimate the number of distinct keys.
_PLACES = 1 << 22


class Lookups(NamedTuple):
    """Sampled keys from consecutive lookups, with one entry per distinct key per lookup.

    Attributes:
        slots: index of the entry's key among the sampled keys, int64 ``[n]``.
        clock: number of the lookup, from 1, int64 ``[n]``, ascending.
        times: occurrences of the key in the lookup, int64 ``[n]``.
        before: occurrences of the key in earlier lookups, int64 ``[n]``.
        previous: number of the key's previous lookup, or 0, int64 ``[n]``.
        first: index of the first entry of the entry's lookup, int64 ``[n]``.
        end: index after the last entry of the entry's lookup, int64 ``[n]``.
    """

    slots: np.ndarray
    clock: np.ndarray
    times: np.ndarray
    before: np.ndarray
    previous: np.ndarray
    first: np.ndarray
    end: np.ndarray


class KeySample:
    """Samples the keys whose hash is below a limit, halving the limit when there are too many.

    Keys are chosen by hash rather than by occurrence, so every lookup of a chosen key is seen, and
    at most a fixed number of keys are kept, which bounds memory: Waldspurger, Park, Garthwaite and
    Ahmad, "Efficient MRC Construction with SHARDS", FAST 2015, section 3.

    Args:
        most: maximum number of keys to keep.

    Attributes:
        rate: fraction of the hashes that are kept, a power of two in (0, 1].
        scale: fraction of the distinct keys so far that are kept; by chance, it differs from the
            rate.
        found: estimated number of distinct keys; each new key adds 1 / rate, with the rate at that
            time.
        total: occurrences of each kept key, int64 ``[most]``.
        last: number of each kept key's last lookup, int64 ``[most]``.
        ties: order of the kept keys if their scores are equal, int64 ``[most]``, below 2^31.
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
        """Count int64 keys ``[n]``, chosen or not, among the distinct keys."""
        self._marks[(mixed(keys) & (_PLACES - 1)).numpy()] = True

    def distinct(self) -> float:
        """Return the number of distinct keys so far; estimated if the rate is below 1.

        Uses linear counting: Whang, Vander-Zanden and Taylor, "A Linear-Time Probabilistic Counting
        Algorithm for Database Applications", ACM TODS 15, 1990. The standard error is 0.06% for ten
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
        # Flipping the sign bit makes signed comparison order the words as unsigned numbers.
        return (mixed(keys ^ _SALT) ^ _SIGN) < int(self.rate * 2**64) + _SIGN

    def make_room(self, keys: torch.Tensor) -> np.ndarray | None:
        """Lower the rate until there is room for more keys.

        Args:
            keys: int64 ``[n]``, distinct chosen keys.

        Returns:
            The slots that are kept, int64 ``[k]``, ascending: slot ``kept[i]`` becomes slot ``i``.
            None if all are kept.
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
        """Insert chosen keys (there must be room), and return their slots, int64 ``[n]``."""
        known = len(self)
        slots = self._index.find_or_insert(keys).numpy()
        if known < len(self):
            new = mixed(self._index.keys()[known:])
            self.ties[known : len(self)] = ((new >> 33) & (2**31 - 1)).numpy()
        return slots

    def see(self, keys: torch.Tensor, clock: np.ndarray, times: np.ndarray) -> Lookups:
        """Insert keys (there must be room), and return their lookups.

        Args:
            keys: int64 ``[n]``, chosen keys in order of lookups; distinct within each lookup.
            clock: number of each key's lookup, int64 ``[n]``.
            times: occurrences of each key in its lookup, int64 ``[n]``.
        """
        slots = self.insert(keys)
        # Find each key's earlier occurrences and previous lookup in this call: sort by key, then
        # lookup.
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
        """Add lookups to `total` and `last`; call this after `see`."""
        # Each key's last entry wins.
        self.total[lookups.slots] = lookups.before + lookups.times
        self.last[lookups.slots] = lookups.clock


def distinct(
    keys: torch.Tensor, clock: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Find the distinct keys of each lookup.

    Args:
        keys: int64 ``[n]``, in order of lookups.
        clock: number of each key's lookup, int64 ``[n]``.

    Returns:
        The first position of each distinct key in a lookup, int64 ``[u]``, ascending; the key's
        occurrences in that lookup, int64 ``[u]``; and the number of distinct keys up to and
        including each position, int64 ``[n]``.
    """
    # Different keys with equal 64-bit words would be counted as one, but that is improbable.
    words = mixed(keys) ^ mixed(clock ^ _SALT)
    _, numbers, times = ops.unique(words)
    so_far = np.maximum.accumulate(numbers.numpy())  # numbers are in order of first occurrence
    return torch.from_numpy(np.flatnonzero(np.diff(so_far, prepend=-1))), times, so_far + 1
