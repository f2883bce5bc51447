"""Decides which new keys get a row in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import check_int, check_number
from . import saved_state as saved
from .hash_table import HashTable
from .key_hash import mixed

# Rows of a count-min sketch: with a probability of at most e^-4, an estimate is too high by more
# than e / width times the sum of all counts (Cormode and Muthukrishnan 2005).
_DEPTH = 4
_INT64 = torch.int64
# Smallest capacity for exact counts.
_LEAST_COUNTS = 1024

_compact = torch.ops.sparsekit.compact_rows.default
_renumber = saved.builtin_of(torch.ops.sparsekit.hash_table_renumber_)
_move = saved.builtin_of(torch.ops.sparsekit.move_rows_)


@dataclass(frozen=True)
class MinCount:
    """Admits a key once it has occurred `count` times in training, including repeats in a batch.

    Args:
        count: number of times, at least 1. Batches are counted as a whole, over all ranks: a key is
            admitted in the batch that brings its count to this number.
        sketch_bytes: size, on each rank, of a count-min sketch for approximate counts; at least 64,
            rounded down to a power of two. An estimate is never too low; with a probability of at
            most 2%, it is too high by more than ``44 / sketch_bytes`` times the sum of all counts.
            None counts exactly, using about 60 to 120 bytes for each key not yet admitted.
        expire_after: an exact count that has not grown for this many units of the table's clock is
            dropped; None for never.

    Raises:
        TypeError, ValueError: an argument is not an int or is out of range, or expire_after is
            given for a sketch.
    """

    count: int
    sketch_bytes: int | None = None
    expire_after: int | None = None

    def __post_init__(self) -> None:
        check_int("MinCount", "count", self.count, 1, 2**31 - 1)
        if self.sketch_bytes is not None:
            check_int("MinCount", "sketch_bytes", self.sketch_bytes, 64, 2**40)
            if self.expire_after is not None:
                raise ValueError(
                    f"MinCount: expire_after={self.expire_after} needs exact counts, and a sketch "
                    f"does not know its keys"
                )
        elif self.expire_after is not None:
            check_int("MinCount", "expire_after", self.expire_after, 1, 2**62)


@dataclass(frozen=True)
class Probability:
    """Admits a key with a given probability in each batch that contains it.

    A hash of the key, the seed and the table's clock decides, so the choice does not depend on the
    number of ranks.

    Args:
        p: the probability, in (0, 1].
        seed: a different seed gives different choices; in [0, 2^63).

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.
    """

    p: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < check_number("Probability", "p", self.p) <= 1:
            raise ValueError(f"Probability: p must be in (0, 1], got {self.p}")
        check_int("Probability", "seed", self.seed, 0, 2**63 - 1)

    def admits(self, keys: torch.Tensor, now: int) -> torch.Tensor:
        """Return a mask of the int64 keys ``[n]`` that are admitted at clock `now`."""
        salt = mixed(torch.tensor([self.seed ^ (now << 1)], dtype=_INT64, device=keys.device))
        # The upper 53 bits, which a float64 holds exactly.
        draws = (mixed(keys ^ salt) >> 11) & (2**53 - 1)
        return draws.to(torch.float64) < self.p * 2**53


class ExactCounts:
    """Exact counts of how often keys without a row have occurred.

    A count of 0 means the same as no count. Such counts, and expired ones, are removed when the
    index is full.

    Args:
        device: device of the counts.
        expire_after: see `MinCount`.

    Attributes:
        index: maps keys to rows of `words`; it grows.
        words: int64 ``[capacity, 2]``: each row's count, and the clock when it last grew.
    """

    kind = "exact"

    def __init__(self, device: torch.device, expire_after: int | None) -> None:
        self._expire_after = expire_after
        self._make(_LEAST_COUNTS, device)

    def add(self, keys: torch.Tensor, counts: torch.Tensor, now: int) -> torch.Tensor:
        """Add to the counts of distinct int64 keys ``[n]``; return the sums."""
        if len(self.index) + len(keys) > self.index.capacity:
            self._reserve(len(keys), now)
        rows = self.index.find_or_insert(keys)
        words = self.words[rows]
        sums = words[:, 0] * self._alive(words, now) + counts
        self.words[rows] = torch.stack([sums, torch.full_like(sums, now)], 1)
        return sums

    def removal(self, gone: torch.Tensor) -> list[partial[Any]]:
        """Return calls, for `run_all`, that remove any counts of int64 keys ``[n]``."""
        rows = self.index.find(gone)
        return [partial(torch.Tensor.index_fill_, self.words, 0, rows[rows >= 0], 0)]

    def erasure(self, gone: torch.Tensor) -> list[partial[Any]]:
        """Return calls, for `run_all`, that remove int64 keys ``[n]`` along with their counts.

        The calls take time proportional to the total number of counts.
        """
        buckets, hash_seed, size = self.index.tensors()
        rows = self.index.find(gone).unique()
        rows, in_use = rows[rows >= 0], len(self.index)
        if len(rows) == 0:
            return []
        new_rows, left = _compact(rows, in_use), in_use - len(rows)
        return [
            partial(_renumber, buckets, hash_seed, new_rows),
            partial(_move, [self.words], new_rows, left, [torch.tensor(0, device="cpu")]),
            partial(torch.Tensor.fill_, size, left),
        ]

    @property
    def form(self) -> tuple[torch.dtype, tuple[int | None, ...]]:
        """The dtype and the shape of a `state`; None stands for any size."""
        return _INT64, (None, 3)

    def state(self) -> torch.Tensor:
        """Return keys, counts and clocks, int64 ``[n, 3]``."""
        words = self.words[: len(self.index)]
        return torch.cat([self.index.keys().unsqueeze(1), words], 1)[words[:, 0] > 0]

    def load(self, state: torch.Tensor) -> None:
        """Replace all counts with those in a `state`."""
        self._make(max(_LEAST_COUNTS, 2 * len(state)), self.words.device)
        self.words[self.index.find_or_insert(state[:, 0].contiguous())] = state[:, 1:]

    def _make(self, capacity: int, device: torch.device) -> None:
        self.index = HashTable(capacity, device=device, name="counts of keys")
        self.words = torch.zeros(capacity, 2, dtype=_INT64, device=device)

    def _alive(self, words: torch.Tensor, now: int) -> torch.Tensor:
        """Return a mask of the counts that have not expired."""
        if self._expire_after is None:
            return torch.ones_like(words[:, 1], dtype=torch.bool)
        return words[:, 1] >= now - self._expire_after

    def _reserve(self, new: int, now: int) -> None:
        """Make room for new keys: remove zero and expired counts; keep half of the places free."""
        state = self.state()
        state = state[self._alive(state[:, 1:], now)]
        self._make(max(self.index.capacity, 2 * (len(state) + new)), self.words.device)
        self.words[self.index.find_or_insert(state[:, 0].contiguous())] = state[:, 1:]


class Sketch:
    """A count-min sketch of how often keys without a row have occurred."""

    kind = "sketch"

    def __init__(self, sketch_bytes: int, device: torch.device) -> None:
        width = 1 << ((sketch_bytes // (4 * _DEPTH)).bit_length() - 1)
        self.words = torch.zeros(_DEPTH, width, dtype=torch.int32, device=device)

    def add(self, keys: torch.Tensor, counts: torch.Tensor, now: int) -> torch.Tensor:
        """Add to the counts of distinct int64 keys ``[n]``; return estimates of the sums."""
        sums = []
        for row, words in enumerate(self.words):
            places = mixed(keys ^ mixed(torch.full_like(keys, row + 1))) & (len(words) - 1)
            # Counts stop growing long before they could overflow.
            words.index_add_(0, places, counts.clamp(max=2**20).to(torch.int32))
            words.clamp_(max=2**30)
            sums.append(words[places])
        return torch.stack(sums).amin(0).to(_INT64)

    def removal(self, gone: torch.Tensor) -> list[partial[Any]]:
        """Return no calls: a sketch does not know its keys."""
        return []

    erasure = removal

    @property
    def form(self) -> tuple[torch.dtype, tuple[int | None, ...]]:
        """The dtype and the shape of a `state`."""
        return torch.int32, tuple(self.words.shape)

    def state(self) -> torch.Tensor:
        """Return the counts, int32 ``[4, width]``."""
        return self.words.clone()

    def load(self, state: torch.Tensor) -> None:
        """Replace all counts with those in `state`."""
        self.words.copy_(state)

    def load_all(self, states: Sequence[torch.Tensor]) -> None:
        """Replace all counts with those in several ranks' sketches, all of the same width.

        Each key is counted in only one of the sketches, so the largest estimate is not too low.
        """
        most, width = largest_counts(states), self.words.shape[1]
        # Keys that share a counter in a wide sketch also share one in a narrow sketch.
        wide = most.repeat(1, max(1, width // most.shape[1]))
        self.load(wide.reshape(_DEPTH, -1, width).amax(1))


def largest_counts(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elementwise maximum of sketches; its estimates are never below theirs."""
    return torch.stack(list(states)).amax(0)


def form_of(kind: str, size: int) -> tuple[torch.dtype, tuple[int, int]]:
    """Return the dtype and shape of a `state` with `size` keys, or of a sketch of width `size`."""
    return (_INT64, (size, 3)) if kind == ExactCounts.kind else (torch.int32, (_DEPTH, size))


def size_of(kind: str, state: torch.Tensor) -> int:
    """Return the number of keys in a `state`, or the width of a sketch; see `form_of`."""
    return state.shape[0 if kind == ExactCounts.kind else 1]


def counts_of(
    policy: MinCount | Probability | None, device: torch.device
) -> ExactCounts | Sketch | None:
    """Return the counts that a policy needs, initially empty; None if it needs none."""
    if not isinstance(policy, MinCount):
        return None
    if policy.sketch_bytes is None:
        return ExactCounts(device, policy.expire_after)
    return Sketch(policy.sketch_bytes, device)
