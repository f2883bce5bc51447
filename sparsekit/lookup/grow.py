"""Lets the tables of a lookup grow: ahead of need bit by bit, or at once if keys do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from .. import ops
from ..tables.hash_table import HashTable
from .plan import TableBatch
from .request import Request

# Stands for a table whose index is not about to be replaced.
_NONE = torch.empty(0, 8, dtype=torch.int64, device="cpu")


def larger_of(batch: TableBatch) -> list[torch.Tensor]:
    """Return the argument ``larger`` of `group_find_or_insert_`; empty if no index has begun."""
    tables = batch.tables
    found = {t: cast(HashTable, tables[t].table).larger() for t in batch.growing}
    if all(buckets is None for buckets in found.values()):
        return []
    return [_NONE if (own := found.get(t)) is None else own for t in batch.hashed]


def grow_for(batch: TableBatch, requests: Sequence[Request]) -> bool:
    """Make room for the new keys of requests, after a table was full; tell if they may fit now.

    Raises:
        TableFullError: there is no memory for as many rows.
    """
    tables, grown = batch.tables, False
    for t in batch.growing:
        index = cast(HashTable, tables[t].table)
        keys = torch.cat([r.keys.to(torch.int64) for r in requests if r.table is tables[t]])
        rows = len(index) + len(ops.unique(keys[index.find(keys) < 0])[0])
        if rows > int(batch.described[t, 1]) and rows <= index.max_capacity:
            index.reserve(rows)
            grown = True
    if grown:
        batch.describe(tables)
    return grown


def grow_on(batch: TableBatch, before: Sequence[int], after: Sequence[int]) -> None:
    """Go on with growing, after a lookup.

    Args:
        batch: the tables of the lookup.
        before: for each hash table, the rows in use before it.
        after: the rows in use now.
    """
    tables = batch.tables
    for t, then, now in zip(batch.hashed, before, after, strict=True):
        if t not in batch.growing:
            continue
        index = cast(HashTable, tables[t].table)
        if now > then or now > index.reach:  # an earlier lookup may have been interrupted
            index.grow_on(then, now)
