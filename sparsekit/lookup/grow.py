"""Lets a lookup's tables grow: gradually ahead of need, or in one step if keys do not fit.

If the tables are on a device, the host does not know how many keys are new, so they grow in one
step, before any lookup whose keys might not fit.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from ..device_rooms import DEVICES
from ..tables import reports
from ..tables.growth import changes_of_growth
from ..tables.hash_table import HashTable
from .explain import new_keys
from .plan import TableBatch
from .request import Request

# Placeholder for a table whose index is not about to be replaced.
_NONE = torch.empty(0, 8, dtype=torch.int64, device="cpu")


class Growing(NamedTuple):
    """Facts about the growth of a lookup's tables, valid until `changes_of_growth` changes.

    Attributes:
        changes: the value of `changes_of_growth`.
        larger: the argument ``larger`` of `group_find_or_insert_`; empty if no index is about to
            be replaced.
        reaches: `CanGrow.reach` of each hash table.
    """

    changes: int
    larger: list[torch.Tensor]
    reaches: list[int]


def larger_of(batch: TableBatch, rows: Sequence[int]) -> list[torch.Tensor]:
    """Return the argument ``larger`` of `group_find_or_insert_`.

    Args:
        batch: the tables of the lookup.
        rows: for each hash table, the number of rows in use.
    """
    known = batch.growth
    if known is None or known.changes != changes_of_growth.count:
        known = batch.growth = _growing(batch)
    if any(map(operator.gt, rows, known.reaches)):  # possible after an interrupted lookup
        tables = batch.tables
        for t, count in zip(batch.hashed, rows, strict=True):
            cast(HashTable, tables[t].table).extend_reach(count)
        known = batch.growth = _growing(batch)
    return known.larger


def _growing(batch: TableBatch) -> Growing:
    tables = batch.tables
    indices = [cast(HashTable, tables[t].table) for t in batch.hashed]
    found = [index.larger() for index in indices]
    larger = [_NONE if buckets is None else buckets for buckets in found]
    begun = any(buckets is not None for buckets in found)
    reaches = [index.reach for index in indices]
    return Growing(changes_of_growth.count, larger if begun else [], reaches)


def grow_ahead(batch: TableBatch, entries: Sequence[int]) -> bool:
    """Make room on a device before a lookup whose keys might not fit; return whether tables grew.

    Args:
        batch: the tables of the lookup.
        entries: for each table, an upper bound on the number of its keys.
    """
    if not batch.growing:
        return False
    tables = batch.tables
    if reports.is_capturing(tables[0].weight.device):
        return False
    grown = [
        cast(HashTable, tables[t].table).make_room_for(entries[t])
        for t in batch.growing
        if tables[t].weight.device.type in DEVICES
    ]
    if any(grown):
        batch.describe(tables)
    return any(grown)


def grow_for(batch: TableBatch, requests: Sequence[Request]) -> bool:
    """Make room for new keys after a lookup found a table full; return whether they may fit now.

    Raises:
        TableFullError: there is not enough memory for the rows.
    """
    tables, grown = batch.tables, False
    for t in batch.growing:
        index = cast(HashTable, tables[t].table)
        rows = len(index) + len(new_keys(tables[t], index, requests))
        if rows > int(batch.described[t, 1]) and rows <= index.max_capacity:
            index.reserve(rows)
            grown = True
    if grown:
        batch.describe(tables)
    return grown


def grow_on(batch: TableBatch, before: Sequence[int], after: Sequence[int]) -> None:
    """Continue growing tables, after a lookup with new keys.

    Args:
        batch: the tables of the lookup.
        before: for each hash table, the number of rows in use before the lookup.
        after: the same numbers now.
    """
    tables = batch.tables
    for t, then, now in zip(batch.hashed, before, after, strict=True):
        if now > then and tables[t].grows:
            cast(HashTable, tables[t].table).grow_on(then, now)
