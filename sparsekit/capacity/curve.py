"""Predicts a table's hit rates at several sizes, from one pass over its keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..errors import check_int, check_number
from ..tables.options import TableOptions
from .expiry import Expiry
from .miniature import Miniature
from .policy import Policy
from .sample import KeySample, distinct

POLICIES = tuple(Policy(score, count) for count in (1, 2) for score in ("lru", "lfu"))
# Maximum number of automatically chosen sizes per policy; each is double the previous one.
_SIZES = 5
# Minimum number of rows in a miniature: a smaller one says little about a large table.
_LEAST_ROWS = 512
# Number of keys to process together: the number of keys so far divided by _PART, but at least
# _LEAST_KEYS and at most _MOST_KEYS.
_LEAST_KEYS, _PART, _MOST_KEYS = 1 << 14, 16, 1 << 17
# Number of keys to collect before the first pass. Each lookup's overhead counts as _LOOKUP keys.
_FIRST, _LOOKUP = 1 << 20, 64


class Point(NamedTuple):
    """A predicted hit rate.

    Attributes:
        policy: the table's policy.
        rows: the table's rows over all ranks: its budget (``max_rows``) or, with a ttl, the most
            rows in use at a time.
        hit_rate: fraction of the keys that have a row before their lookup. A key counts once for
            each lookup, as in `Telemetry`.
    """

    policy: Policy
    rows: int
    hit_rate: float


class Curve(NamedTuple):
    """Predictions for one feature's table.

    Attributes:
        lookups: number of lookups.
        keys: number of keys, counting repeats in a lookup once.
        distinct: estimated number of distinct keys.
        most_at_once: maximum number of distinct keys in a lookup; a table must hold all of them at
            once.
        rate: fraction of the keys used for the estimates; 1 if they are exact.
        points: predictions, by policy, in ascending order of rows. For a policy without a ttl, the
            last point is for a table that never sweeps.
    """

    lookups: int
    keys: int
    distinct: int
    most_at_once: int
    rate: float
    points: tuple[Point, ...]


class CapacityCurve:
    """Predicts hit rates for tables of any size from a sample of the keys in their lookups.

    Memory is fixed, whatever the number of keys. With up to `sample` distinct keys, predictions are
    exact for a single table whose lookups are all in training. With more keys, they are sampled by
    hash, and a miniature of each table is simulated; see `KeySample` and `Miniature` for
    references. The sample's misses are divided by an exact count of all keys, since keys that occur
    in every lookup hardly ever miss, but are unlikely to be sampled. This is the SHARDS-adj
    correction from FAST 2015, section 3.2.

    Args:
        policies: policies to predict hit rates for; each must have a score.
        rows: table sizes in rows; None for up to five powers of two, below the number of distinct
            keys.
        ttls: ttl values in lookups; None for all powers of two below the number of lookups; empty
            for none.
        low_watermark: the tables' low watermark.
        sample: maximum number of keys in the sample.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.

    Example:
        >>> curve = CapacityCurve(rows=[1000])
        >>> for batch in batches:
        ...     curve.add(batch)  # int64 keys of one lookup
        >>> curve.read().points
    """

    def __init__(
        self,
        policies: Sequence[Policy] = POLICIES,
        rows: Sequence[int] | None = None,
        ttls: Sequence[int] | None = None,
        low_watermark: float = TableOptions.low_watermark,
        sample: int = 1 << 15,
    ) -> None:
        name = type(self).__name__
        sample = check_int(name, "sample", sample, 1, 2**24)
        if not 0 < check_number(name, "low_watermark", low_watermark) <= 1:
            raise ValueError(f"{name}: low_watermark must be in (0, 1], got {low_watermark}")
        for policy in policies:
            if policy.ttl is not None:
                raise ValueError(f"{name}: policies have a score, got ttl={policy.ttl}; see ttls")
        self._rows, self._ttls = (
            None
            if given is None
            else sorted({check_int(name, argument, one, 1, 2**62) for one in given})
            for argument, given in (("rows", rows), ("ttls", ttls))
        )
        self._sample = KeySample(sample)
        self._unlimited = [
            Miniature(policy, math.inf, low_watermark, sample) for policy in dict.fromkeys(policies)
        ]
        self._limited: list[list[Miniature]] = [[] for _ in self._unlimited]
        self._largest = [0] * len(self._unlimited)  # rows of the largest table filled so far
        self._expiry = Expiry(self._ttls)
        self._waiting: list[torch.Tensor] = []
        self._waiting_size = 0
        self._lookups = self._keys = self._occurrences = self._most_at_once = 0

    def add(self, keys: torch.Tensor) -> None:
        """Add the keys of one training lookup, including repeats.

        Args:
            keys: int64 ``[n]``, on any device. They are copied.

        Raises:
            TypeError, ValueError: keys is not an int64 tensor, or not 1-D.
        """
        if keys.dtype != torch.int64:
            raise TypeError(f"CapacityCurve: keys must be int64, got {keys.dtype}")
        if keys.dim() != 1:
            raise ValueError(f"CapacityCurve: keys must be 1-D, got the shape {list(keys.shape)}")
        self._waiting.append(keys.detach().to("cpu", copy=True))
        self._waiting_size += len(keys) + _LOOKUP
        if self._waiting_size >= (self._piece_size() if self._lookups else _FIRST):
            self._run()

    def read(self) -> Curve:
        """Return the predictions for the lookups so far."""
        self._run()
        points = []
        # Correct for a sample that has, by chance, too many or too few keys.
        keys = self._keys * self._sample.found / max(1.0, self._sample.distinct())
        for unlimited, limited in zip(self._unlimited, self._limited, strict=True):
            misses = dict.fromkeys(self._rows or (), unlimited.misses)
            misses |= {int(table.rows): table.misses for table in limited}
            misses.setdefault(self._rows_of(unlimited), unlimited.misses)
            points += [
                Point(unlimited.policy, rows, _hit_rate(misses[rows], keys))
                for rows in sorted(misses)
            ]
        points += [
            Point(Policy(None, ttl=ttl), max(1, round(rows)), _hit_rate(missed, keys))
            for ttl, rows, missed in self._expiry.points(self._lookups)
        ]
        distinct, rate = round(self._sample.distinct()), self._sample.rate
        return Curve(self._lookups, self._keys, distinct, self._most_at_once, rate, tuple(points))

    def _rows_of(self, unlimited: Miniature) -> int:
        """Return a number of rows large enough that a table never sweeps."""
        rows, sample = unlimited.held / self._sample.scale, self._sample
        if sample.rate < 1:  # add four standard errors to the estimate
            rows += 4 * math.sqrt(unlimited.held) / sample.scale
            rows = min(rows, 1.01 * sample.distinct())
        return max(1, math.ceil(rows))

    @torch.no_grad()
    def _run(self) -> None:
        """Process the waiting keys."""
        waiting, self._waiting, self._waiting_size = self._waiting, [], 0
        pieces: list[list[torch.Tensor]] = [[]]
        size = 0
        for keys in waiting:
            pieces[-1].append(keys)
            size += len(keys) + _LOOKUP
            if size >= self._piece_size():
                pieces.append([])
                size = 0
        if self._lookups == 0:
            # Find the sampling rate first: if keys were simulated at a higher rate, most would be
            # dropped later.
            for piece in filter(None, pieces):
                keys = torch.cat(piece)
                self._make_room(keys[self._sample.chosen(keys)], reserve=True)
        for piece in filter(None, pieces):
            self._look_up(piece)

    def _piece_size(self) -> int:
        return min(_MOST_KEYS, max(_LEAST_KEYS, self._occurrences // _PART))

    def _make_room(self, keys: torch.Tensor, reserve: bool = False) -> None:
        """Make room in the sample for chosen keys; if `reserve`, also insert those still chosen."""
        unique, _, _ = ops.unique(keys)
        kept = self._sample.make_room(unique)
        if kept is not None:
            for table in itertools.chain(self._unlimited, *self._limited):
                table.keep(kept)
        if reserve:
            self._sample.insert(unique[self._sample.chosen(unique)])

    def _look_up(self, piece: list[torch.Tensor]) -> None:
        lengths = torch.tensor([len(keys) for keys in piece], dtype=torch.int64, device="cpu")
        numbers = torch.arange(len(piece), device="cpu") + self._lookups + 1
        self._lookups += len(piece)
        if int(lengths.sum()) == 0:
            return
        keys, clock = torch.cat(piece), numbers.repeat_interleave(lengths)
        self._occurrences += len(keys)
        first, times, so_far = distinct(keys, clock)
        self._sample.mark(keys[first])
        self._keys += len(first)
        ends = so_far[lengths[lengths > 0].cumsum(0).numpy() - 1]
        self._most_at_once = max(self._most_at_once, int(np.diff(ends, prepend=0).max()))

        sample = self._sample
        chosen, times = _of_sample(sample, keys, first, times)
        self._make_room(keys[chosen])
        chosen, times = _of_sample(sample, keys, chosen, times)
        lookups = sample.see(keys[chosen], clock[chosen].numpy(), times.numpy())
        for i, (unlimited, limited) in enumerate(zip(self._unlimited, self._limited, strict=True)):
            self._add_tables(i, unlimited.held_after(lookups))
            for table in (*limited, unlimited):
                table.run(lookups, sample)
        sample.advance(lookups)
        self._expiry.run(lookups, sample)

    def _add_tables(self, i: int, held: int) -> None:
        """Add the tables that are about to fill up for the first time; drop the smallest ones."""
        # Until now, these tables have behaved like the one that never fills up.
        limited, sample = self._limited[i], self._sample
        sizes = [2**power for power in range(62)] if self._rows is None else self._rows
        for rows in sizes:
            if rows > self._largest[i] and round(rows * sample.scale) < held:
                limited.append(self._unlimited[i].limited(rows))
                self._largest[i] = rows
        if self._rows is None:
            least = max(self._most_at_once, 1 if sample.rate == 1 else _LEAST_ROWS / sample.scale)
            limited[:] = [table for table in limited if table.rows >= least][-_SIZES:]


def _of_sample(
    sample: KeySample, keys: torch.Tensor, places: torch.Tensor, times: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `places` and `times` of those keys that are sampled."""
    here = sample.chosen(keys[places])
    return places[here], times[here]


def _hit_rate(misses: float, keys: float) -> float:
    return min(1.0, max(0.0, 1 - misses / keys)) if keys else 0.0
