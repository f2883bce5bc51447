"""Finds rows that have changed since the last checkpoint by comparing row fingerprints.

Optimizers, `assign` and user code all write to rows, so we compare contents instead of tracking
writes. A change to a single 8-byte word is always detected. Any other change is missed with a
probability of 2^-31. The key of each row is kept too: a row that now has another key counts as
changed, and a key that no longer has a row counts as removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .manifest import Base
from .snapshot import TableShard
from .tensor_file import Column, carried, column_of

# Size in bytes of a block of rows, small enough that intermediate results stay in the cache.
_BLOCK = 1 << 18


class Fingerprints:
    """One fingerprint per row of a table, computed from its vector and all its states."""

    def __init__(self, rows: int) -> None:
        self.of_rows = np.zeros(rows, dtype=np.uint64)

    def update(
        self, tensors: Sequence[torch.Tensor], rows: int, of_other_keys: np.ndarray
    ) -> np.ndarray:
        """Compute the fingerprints of rows ``[0, rows)``, and find the rows that have changed.

        Args:
            tensors: on any device, each with at least ``rows`` rows.
            rows: number of rows in use.
            of_other_keys: rows that now have different keys, and so count as changed: int64,
                ascending.

        Returns:
            Indices of the rows that have changed: int64, in ascending order.
        """
        if rows > len(self.of_rows):  # the table has grown
            added = np.zeros(max(rows, 2 * len(self.of_rows)) - len(self.of_rows), dtype=np.uint64)
            self.of_rows = np.concatenate([self.of_rows, added])
        widths = [math.prod(t.shape[1:]) * t.dtype.itemsize for t in tensors]
        words = [-(-width // 8) for width in widths]
        factors = np.random.default_rng(0x5EED).integers(
            0, 2**64, size=(2, sum(words)), dtype=np.uint64, endpoint=False
        )
        factors |= np.uint64(1)
        step = max(1, _BLOCK // (8 * sum(words)))
        changed: list[np.ndarray] = []
        room = np.zeros((step, sum(words)), dtype=np.uint64)
        as_bytes = room.view(np.uint8)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            at = 0
            for tensor, width, span in zip(tensors, widths, words, strict=True):
                part = carried(tensor[begin : begin + count].cpu())
                flat = np.ascontiguousarray(part).reshape(count, -1).view(np.uint8)
                as_bytes[:count, 8 * at : 8 * at + width] = flat
                at += span
            mixed = room[:count] * factors[0]
            mixed ^= mixed >> np.uint64(32)
            mixed *= factors[1]
            new = mixed.sum(axis=1, dtype=np.uint64)
            old = self.of_rows[begin : begin + count]
            differs = new != old
            first, last = np.searchsorted(of_other_keys, (begin, begin + count))
            differs[of_other_keys[first:last] - begin] = True
            changed.append(np.flatnonzero(differs) + begin)
            old[:] = new
        return np.concatenate(changed) if changed else np.empty(0, dtype=np.int64)


class Changes(NamedTuple):
    """Differences between a rank's part of a table and the same part in the base.

    Attributes:
        rows: rows that are new or have changed, or whose keys had other rows in the base:
            int64, in ascending order.
        removed: keys in the base that the table no longer has, int64 ``[n]``.
        moved: whether any row in the base now has a different key, or no key.
    """

    rows: np.ndarray
    removed: np.ndarray
    moved: bool

    @staticmethod
    def between(before: np.ndarray, now: np.ndarray) -> Changes:
        """Compare each row's old and new key, int64 ``[rows in use]``, but not the rows' values."""
        shared = min(len(before), len(now))
        differ = np.flatnonzero(before[:shared] != now[:shared])
        left = np.concatenate([before[differ], before[shared:]])
        rows = np.concatenate([differ, np.arange(shared, len(now))])
        removed = np.setdiff1d(left, now[rows], assume_unique=True)
        return Changes(rows, removed, moved=len(left) > 0)

    def columns(self) -> list[Column]:
        """Return the extra columns that a file with these changes needs."""
        columns = []
        if self.moved:
            columns.append(column_of("rows", torch.from_numpy(self.rows.astype(np.int32))))
        if len(self.removed):
            columns.append(column_of("removed", torch.from_numpy(self.removed)))
        return columns


def keys_of(shard: TableShard) -> np.ndarray:
    """Return the key of each row in use, int64; empty for a table whose rows never change keys."""
    table = shard.layer.table
    return np.empty(0, dtype=np.int64) if table is None else table.keys().cpu().numpy()


@dataclass
class MarkedTable:
    """Fingerprints of a rank's part of a table; the next save uses them to find changed rows.

    Attributes:
        identity: result of `TableShard.identity` at the time of the save.
        keys: key of each row, from `keys_of`.
        prints: fingerprints of the rows.
    """

    identity: tuple[Any, ...]
    keys: np.ndarray
    prints: Fingerprints


@dataclass
class Marks:
    """Fingerprints of a checkpoint's tables, kept so that the next checkpoint can be incremental.

    The marks are valid for one checkpoint only. Check that this checkpoint is on disk before using
    the marks.

    Attributes:
        base: the checkpoint that the marks belong to.
        links: number of checkpoints that precede ``base`` in its chain.
        tables: the marks of each table, by the table's name.
    """

    base: Base
    links: int = 0
    tables: dict[str, MarkedTable] = field(default_factory=dict)
    # Changes in the tables' keys since the previous checkpoint, for `changed`.
    _of_keys: dict[str, Changes] = field(default_factory=dict)

    def follow(self, shards: Sequence[TableShard], before: Mapping[str, MarkedTable]) -> set[str]:
        """Start the marks of a new checkpoint, and find the tables that must be written in full.

        Args:
            shards: this rank's parts of the tables to save.
            before: marks of the tables in the previous checkpoint, by the table's name.

        Returns:
            Names of the tables that must be written in full: they are new or have been replaced, or
            have lost at least as many keys as are left.
        """
        complete = set()
        for shard in shards:
            identity, known = shard.identity(), before.get(shard.name)
            keys = keys_of(shard)
            if known is None or known.identity != identity:
                known = MarkedTable(identity, keys, Fingerprints(shard.size))
                complete.add(shard.name)
            changes = Changes.between(known.keys, keys)
            if 0 < len(changes.removed) >= shard.size:
                complete.add(shard.name)
            self.tables[shard.name] = MarkedTable(identity, keys, known.prints)
            self._of_keys[shard.name] = changes
        return complete

    def changed(self, shard: TableShard) -> Changes:
        """Find what has changed since the last save, and update the marks."""
        prints, changes = self.tables[shard.name].prints, self._of_keys.pop(shard.name)
        rows = prints.update(list(shard.columns.values()), shard.size, changes.rows)
        return changes._replace(rows=rows)
