"""Redirects keys without a row to shared fallback rows, until the keys are admitted.

Owners first report which keys have a row, and admit new ones. All other keys are then replaced, so
that the lookup itself finds a row for each key, on whichever rank that row is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from .. import ops
from ..distributed.exchange import Exchange
from ..distributed.wire import packed_sizes
from ..tables.embedding_table import EmbeddingTable
from ..tables.fallback import Fallback
from ..tables.hash_table import HashTable
from .make_room import (
    Known,
    inserted_keys,
    make_room_here,
    make_room_on_ranks,
    rows_at_most,
)
from .padding import is_padding
from .plan import LookupPlan
from .reading import asked_of
from .request import Request
from .sweep import Asked, insert_admitted, life_of
from .to_owners import ToOwners, exchanged


def redirected(
    plan: LookupPlan, exchange: Exchange | None, asked: Sequence[Request] | Exception
) -> list[Request]:
    """Redirect a lookup's requests, so that in tables with fallback rows every key has a row.

    Args:
        plan: the plan of the tables.
        exchange: the ranks' exchange; None on a single rank.
        asked: the requests, or an error to raise on all ranks.
    """

    def ask(table: EmbeddingTable) -> Asked:
        if isinstance(asked, Exception):
            raise asked
        for request in asked:
            request.check()
        return asked_of(table, asked, plan.reads)

    made: list[Request] = []
    tables = dict.fromkeys(table for table in plan.tables if table.fallback is not None)
    reads = plan.reads or [False] * len(plan.tables)
    writing = {table for table, read in zip(plan.tables, reads, strict=True) if not read}
    keys = {}
    for table in tables:
        inserts = table.inserts and table in writing
        keys[table] = redirected_keys(table, exchange, partial(ask, table), inserts)
    for request in cast("Sequence[Request]", asked):
        if request.table in keys:
            count = len(inserted_keys(request))
            own, keys[request.table] = keys[request.table].tensor_split([count])
            bags = request.own_bags()
            values = torch.cat([own, bags.values[count:].to(torch.int64)])
            request = replace(request, bags=replace(bags, values=values), first_bag=None)
        made.append(request)
    return made


def redirected_keys(
    table: EmbeddingTable,
    exchange: Exchange | None,
    ask: Callable[[], Asked],
    inserts: bool,
) -> torch.Tensor:
    """Return int64 keys ``[n]``, with the keys of fallback rows in place of keys without a row.

    Args:
        table: a table with fallback rows.
        exchange: the ranks' exchange; None on a single rank.
        ask: returns the keys; an error that it raises is raised on every rank.
        inserts: whether keys are counted and admitted.
    """
    fallback, index = cast(Fallback, table.fallback), cast(HashTable, table.table)

    def asked() -> Asked:
        of_rank = ask()
        fallback.check(table.name, of_rank.keys)
        if inserts:
            _make_rows(table, fallback)
        return of_rank

    if exchange is None:
        own = asked()
        keys = own.keys
        if inserts:
            make_room_here([table], [rows_at_most(table)], [len(keys)], lambda _: own)
        absent = index.find(keys) < 0
    else:
        keys, absent = _absent_on_ranks(table, exchange, asked, inserts)
    if table.padding_key is not None:
        absent &= ~is_padding(keys, table.padding_key)
    return torch.where(absent, fallback.key_of(keys), keys)


def _absent_on_ranks(
    table: EmbeddingTable, exchange: Exchange, ask: Callable[[], Asked], inserts: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's keys, and whether each lacks a row on the rank that owns it."""
    keys = numbers = counts = torch.empty(0, dtype=torch.int64)

    def distinct() -> torch.Tensor:
        nonlocal keys, numbers, counts
        keys, occurrences, *_ = ask()
        of_rank, numbers, counts = ops.unique(keys)
        if occurrences is not None:
            counts = torch.zeros_like(counts).index_add_(0, numbers, occurrences)
        return of_rank

    way = ToOwners(exchange, table, "find rows", distinct)
    exchange.expect(packed_sizes([keys], [way.own]))
    come, failed = way.send("keys", way.keys), None
    if inserts:
        times = way.send("occurrences", counts[way.order])
        known = Known(table, way.rows, way.asked, life_of(table).keys_finished)
        failed = make_room_on_ranks([known], lambda _: Asked(come, times), exchange, way.signature)

    def found() -> torch.Tensor:
        if failed is not None:
            raise failed
        return cast(HashTable, table.table).find(come)

    what = f"rows: {way.signature}"
    rows = exchanged(exchange, what, found, way.theirs, way.own, keys)
    return keys, torch.empty_like(rows).index_copy_(0, way.order, rows)[numbers] < 0


def _make_rows(table: EmbeddingTable, fallback: Fallback) -> None:
    """Insert this rank's fallback rows into the table, before they are first used."""
    keys = fallback.keys(table.weight.device)
    keys = keys[table.owned(keys)] if table.world_size > 1 else keys
    new = keys[cast(HashTable, table.table).find(keys) < 0]
    insert_admitted(table, new, torch.zeros_like(new))
