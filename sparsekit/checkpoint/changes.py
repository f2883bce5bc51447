"""Finds the rows that have changed since the last checkpoint, by a fingerprint of each row.

Optimizers, `assign` and user code all write to rows, so we compare contents instead of tracking
writes. A change of a single 8-byte word is always detected. Any other change is missed with a
probability of 2^-31. Fingerprints are valid only while each row belongs to the same key; a checksum
of the keys verifies this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..ops.hash_table import SLOTS_PER_BUCKET
from .manifest import Base
from .snapshot import TableShard
from .tensor_file import carried

# Size in bytes of a block of rows. It is small, so that intermediate results stay in the cache.
_BLOCK = 1 << 18
# Number of the hash table's 64-byte buckets to scan at a time.
_BUCKETS = 1 << 15
# Multipliers of the hash; they must be odd.
_FACTORS = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1, -0x7A1435883D4D519D)


class Fingerprints:
    """One fingerprint per row of a table, computed from that row of the vectors and all states."""

    def __init__(self, rows: int) -> None:
        self.of_rows = np.zeros(rows, dtype=np.uint64)
        self.count = 0  # number of rows that have a fingerprint

    def update(self, tensors: Sequence[torch.Tensor], rows: int) -> np.ndarray:
        """Compute the fingerprints of rows ``[0, rows)``, and find the rows that have changed.

        Args:
            tensors: on any device, each with at least as many rows as the table's capacity.
            rows: number of rows in use.

        Returns:
            Indices of the rows that are new or have changed: int64, in ascending order.
        """
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
            # Rows beyond the known ones are new.
            known = max(0, self.count - begin)
            differs[known:] = True
            changed.append(np.flatnonzero(differs) + begin)
            old[:] = new
        self.count = rows
        return np.concatenate(changed) if changed else np.empty(0, dtype=np.int64)


def sums_of_keys(shard: TableShard, sizes: Sequence[int]) -> list[int]:
    """Return, for each size, a checksum of the keys of rows ``[0, size)`` and their row indices."""
    sums = [0] * len(sizes)
    table = shard.layer.table
    if table is None:
        return sums
    for first in range(0, len(table.buckets), _BUCKETS):
        part = table.buckets[first : first + _BUCKETS]
        rows = part[:, SLOTS_PER_BUCKET:].contiguous().view(torch.int32)[:, :SLOTS_PER_BUCKET]
        mixed = part[:, :SLOTS_PER_BUCKET] * _FACTORS[0] + rows.long() * _FACTORS[1]
        mixed ^= mixed >> 29
        mixed *= _FACTORS[2]
        mixed ^= mixed >> 32
        for number, size in enumerate(sizes):
            here = (rows >= 0) & (rows < size)
            sums[number] += int((mixed * here).sum())
    return [each % 2**64 for each in sums]


@dataclass
class MarkedTable:
    """Fingerprints of a rank's part of a table; the next save uses them to find changed rows.

    Attributes:
        identity: result of `TableShard.identity` at the time of the save.
        size: number of rows in use.
        keys: checksum of the keys, from `sums_of_keys`.
        prints: fingerprints of the rows.
    """

    identity: tuple[Any, ...]
    size: int
    keys: int
    prints: Fingerprints


@dataclass
class Marks:
    """Fingerprints of a checkpoint's tables, kept so that the next checkpoint can be incremental.

    The marks are valid for one checkpoint only. Check that it is on disk before using them.

    Attributes:
        base: the checkpoint that the marks belong to.
        links: number of checkpoints that precede ``base`` in its chain.
        tables: the marks of each table, by the table's name.
    """

    base: Base
    links: int = 0
    tables: dict[str, MarkedTable] = field(default_factory=dict)

    def follow(self, shards: Sequence[TableShard], before: Mapping[str, MarkedTable]) -> set[str]:
        """Start the marks of a new checkpoint, and find the tables that must be written in full.

        Args:
            shards: this rank's parts of the tables to save.
            before: marks of the tables in the previous checkpoint, by the table's name.

        Returns:
            Names of the tables that must be written in full: they are new or have been replaced, or
            some of their rows have been removed or now belong to other keys.
        """
        complete = set()
        for shard in shards:
            identity, known = shard.identity(), before.get(shard.name)
            size_before = 0 if known is None else known.size
            keys_before, keys = sums_of_keys(shard, [size_before, shard.size])
            if known is None or (known.identity, known.keys) != (identity, keys_before):
                complete.add(shard.name)
                prints = Fingerprints(shard.layer.capacity)
            else:
                prints = known.prints
            self.tables[shard.name] = MarkedTable(identity, shard.size, keys, prints)
        return complete

    def changed(self, shard: TableShard) -> np.ndarray:
        """Return the indices of the rows changed since the last save, and update the marks."""
        prints = self.tables[shard.name].prints
        return prints.update(list(shard.columns.values()), shard.size)
