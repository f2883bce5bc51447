"""Finds the rows that have changed since the last checkpoint, by a fingerprint of each row.

Rows are written by optimizers, by `assign` and by hand, so we compare contents rather than track
writes. A change of one 8-byte word is always seen; of other changes one in 2^31 is missed.
Fingerprints are valid only while rows stand for the same keys, which a sum over the keys verifies.
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

# Bytes processed at a time, so that intermediate results stay in the cache.
_BLOCK = 1 << 18
# Buckets of 64 bytes scanned at a time.
_BUCKETS = 1 << 15
_FACTORS = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1, -0x7A1435883D4D519D)  # odd


class Fingerprints:
    """Fingerprints of a table's rows."""

    def __init__(self, rows: int) -> None:
        self.of_rows = np.zeros(rows, dtype=np.uint64)
        self.count = 0  # rows that have a fingerprint

    def update(self, tensors: Sequence[torch.Tensor], rows: int) -> np.ndarray:
        """Update the fingerprints of rows ``[0, rows)``, each taken over all tensors together.

        Args:
            tensors: each with at least as many rows as the table's capacity; on any device.
            rows: how many are in use.

        Returns:
            int64, rising: rows whose fingerprint is new.
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
            known = max(0, self.count - begin)  # the rest are new rows
            differs[known:] = True
            changed.append(np.flatnonzero(differs) + begin)
            old[:] = new
        self.count = rows
        return np.concatenate(changed) if changed else np.empty(0, dtype=np.int64)


def sums_of_keys(shard: TableShard, sizes: Sequence[int]) -> list[int]:
    """Return, for each size, an order-dependent sum over the keys of rows ``[0, size)``."""
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
    """Marks of a rank's part of a table.

    Attributes:
        identity: the part's, see `TableShard.identity`.
        size: rows in use.
        keys: the sum of the keys, see `sums_of_keys`.
        prints: fingerprints of the rows.
    """

    identity: tuple[Any, ...]
    size: int
    keys: int
    prints: Fingerprints


@dataclass
class Marks:
    """Marks that a process keeps of a checkpoint, so that the next can hold changes alone.

    They belong to that one checkpoint, so a user of them must first check that it is on disk.

    Attributes:
        base: the checkpoint.
        links: length of the chain of checkpoints that it follows.
        tables: all its tables, by name.
    """

    base: Base
    links: int = 0
    tables: dict[str, MarkedTable] = field(default_factory=dict)

    def follow(self, shards: Sequence[TableShard], before: Mapping[str, MarkedTable]) -> set[str]:
        """Prepare marks of tables, given those of the checkpoint that this one may follow.

        Returns:
            Tables that must be written in full: they are new or replaced, or some of their rows are
            gone or stand for other keys.
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
        """Return the rows changed since these marks, and bring the marks up to date."""
        prints = self.tables[shard.name].prints
        return prints.update(list(shard.columns.values()), shard.size)
