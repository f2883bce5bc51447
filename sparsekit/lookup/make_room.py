"""Makes room in tables, and admits new keys, before the keys of a lookup are inserted.

A table over its budget drops the rows with the lowest scores on all ranks. Some rows are never
dropped: rows of the lookup's own keys, and rows that a pending backward or a gradient refers to.
Ranks decide together: a lookup's handshake tells every rank an upper bound on the number of rows in
use, and ranks exchange more only if the bound is above the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from .._reports import errors_are_deferred
from ..distributed.exchange import Exchange
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from .descriptors import Descriptors
from .plan import LookupPlan, TableBatch
from .record import entries_of_tables
from .request import Request
from .sweep import Asked, Sweep, life_of

_find = torch.ops.sparsekit.group_find.default

Keys = Callable[[EmbeddingTable], Asked]


class Known(NamedTuple):
    """Facts about a table that every rank knows from a lookup's handshake.

    Attributes:
        table: the table.
        rows: number of rows in use on all ranks.
        asked: sum over ranks of the number of distinct keys that each rank requests.
        finished: the value of `RowLife.keys_finished` at the handshake.
    """

    table: EmbeddingTable
    rows: int
    asked: int
    finished: int


def inserted_keys(request: Request) -> torch.Tensor:
    """Return the keys of a request, int64 ``[n]``, except keys that a device will drop later."""
    own, bags = request.own_bags(), math.prod(request.shape)
    keys, offsets = own.values, own.offsets
    if offsets is not None and own.count > bags:  # see `without_waiting`
        keys = keys[: int(offsets[bags])]
    return keys.to(torch.int64)


def rows_at_most(table: EmbeddingTable) -> float:
    """Return an upper bound on the number of rows in use, without waiting for a device."""
    index = cast(HashTable, table.table)
    waits = errors_are_deferred(table.weight.device)
    return index.row_bound.most if waits else len(index)


@torch.no_grad()
def make_room_here(
    tables: Sequence[EmbeddingTable],
    most: Sequence[float],
    asked: Sequence[int],
    keys: Keys,
    by_hand: bool = False,
    absent: Callable[[], Sequence[int]] | None = None,
) -> None:
    """Make room on a single rank for keys that are about to be looked up.

    Args:
        tables: distinct tables that evict, or whose rows expire.
        most: for each table, an upper bound on the number of rows in use.
        asked: for each table, an upper bound on the number of its keys.
        keys: returns a table's keys; called only for tables that may have to make room.
        by_hand: true for `assign`, which admits all keys.
        absent: returns, for each table, how many of its keys have no row, counting repeats.
    """
    crowded = _crowded(tables, most, asked)
    if absent is not None and any(crowded):
        # Counting absent keys in one pass over all tables settles most cases.
        crowded = _crowded(tables, most, absent())
    for table, over in zip(tables, crowded, strict=True):
        if not over and not life_of(table).sweeps_always:
            continue
        sweep = Sweep(table, None, "", by_hand)
        if sweep.is_due(over):
            sweep.run(keys(table))


def may_exceed(table: EmbeddingTable) -> bool:
    """Return whether a table is allowed to exceed its budget until the end of a lookup.

    If so, it is swept after keys are inserted, which drops the same rows as sweeping first, but
    does not require finding new keys separately. With a listener this is not allowed, since the
    listener might change rows that the lookup has found.
    """
    life = life_of(table)
    return not (life.sweeps_always or life.makes_room_first or life.on_evict is not None)


def rows_now(
    batch: TableBatch, tables: Sequence[int], passed: Any, given: Descriptors
) -> list[torch.Tensor]:
    """Return the current row of every key in a lookup, int32; -1 for a key without a row.

    Args:
        batch: the tables of the lookup.
        tables: indices of the tables.
        passed: the op arguments for the batch; see `TableBatch.tensors`.
        given: the keys of the lookup.
    """
    with torch._C._AutoDispatchBelowAutograd():
        index, bags, _ = _find(
            *(passed.buckets, passed.hash_seeds, batch.described),
            *(given.keys, given.offsets, given.features),
        )
    own = entries_of_tables(bags, given.features, len(batch.tables))
    return [index[own[t]] for t in tables]


def _crowded(
    tables: Sequence[EmbeddingTable], most: Sequence[float], new: Sequence[int]
) -> list[bool]:
    """Return which tables may exceed their budgets, given these numbers of new keys."""
    each = zip([life_of(table).max_rows for table in tables], most, new, strict=True)
    return [limit is not None and rows + count > limit for limit, rows, count in each]


def swept_columns(plan: LookupPlan) -> list[int]:
    """Return the plan's indices of the tables that may have to make room."""
    return [
        columns.start + t
        for batch, columns in zip(plan.batches, plan.columns, strict=True)
        if batch.scored is not None
        for t in batch.scored.swept
    ]


def swept_tables(plan: LookupPlan) -> list[EmbeddingTable]:
    """Return the tables that may have to make room."""
    tables = [table for batch in plan.batches for table in batch.tables]
    return [tables[column] for column in swept_columns(plan)]


def known_here(tables: Sequence[EmbeddingTable], asked: torch.Tensor) -> torch.Tensor:
    """Return the numbers that this rank sends to all ranks in a handshake, int64 ``[2 * tables]``.

    Args:
        tables: the tables that evict.
        asked: for each table, the number of distinct keys that this rank requests.
    """
    sizes = [cast(HashTable, table.table).tensors()[2] for table in tables]
    return torch.cat([*sizes, asked.to(sizes[0].device)])


def known_of(tables: Sequence[EmbeddingTable], told: np.ndarray) -> list[Known]:
    """Combine the numbers from all ranks' `known_here`, int64 ``[world_size, 2 * tables]``."""
    rows, asked = told.sum(0).reshape(2, -1).tolist()
    finished = [life_of(table).keys_finished for table in tables]
    return list(map(Known, tables, rows, asked, finished))


def still_inserting(known: Sequence[Known]) -> list[Known]:
    """Return the tables that have not been put into evaluation mode since the handshake."""
    return [one for one in known if one.table.inserts]


@torch.no_grad()
def make_room_on_ranks(
    known: Sequence[Known],
    keys: Keys,
    exchange: Exchange,
    signature: str,
    by_hand: bool = False,
) -> Exception | None:
    """Make room on all ranks for keys that are about to be looked up.

    Args:
        known: for each table, the facts from the handshake; in the same order on all ranks.
        keys: returns, for a table, the keys from all ranks that this rank owns.
        exchange: the ranks' exchange.
        signature: text that identifies the lookup, the same on all ranks.
        by_hand: true for `assign`, which admits all keys.

    Returns:
        An error on this rank that the other ranks do not know about yet, or None.
    """
    failed: Exception | None = None
    for table, rows, asked, finished in known:
        life = life_of(table)
        # Lookups that have finished since the handshake may have inserted keys.
        most = rows + asked + life.keys_finished - finished
        life.keys_finished += asked
        crowded = life.max_rows is not None and most > life.max_rows
        what = f"make room in {table.name}: {signature}"
        sweep = Sweep(table, exchange, what, by_hand)
        if crowded and failed is not None:
            exchange.agree(what, failed)  # raise `failed` on all ranks
        try:
            if sweep.is_due(crowded):
                sweep.run(keys(table))
        except Exception as error:
            if sweep.agreeing:
                exchange.agree(what, error)
            failed = failed or error
    return failed
