"""Makes room in tables, and admits new keys, before the keys of a lookup are inserted.

A table over its budget drops the rows with the lowest scores of all ranks. Some rows are never
taken: those of the lookup's own keys, of backwards to come, and of a gradient. Ranks decide
together: from the handshake of a lookup every rank knows an upper bound on the rows in use, and
only if the bound is above the budget do they exchange more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    """Facts about a table that every rank knows from the handshake of a lookup.

    Attributes:
        table: the table.
        rows: rows in use on all ranks.
        asked: distinct keys for which the ranks ask, added up over ranks.
        finished: `RowLife.keys_finished` at that time.
    """

    table: EmbeddingTable
    rows: int
    asked: int
    finished: int


def inserted_keys(request: Request) -> torch.Tensor:
    """Return the keys of a request, int64 ``[n]``, without those that a device drops later."""
    own, bags = request.own_bags(), math.prod(request.shape)
    keys, offsets = own.values, own.offsets
    if offsets is not None and own.count > bags:  # see `without_waiting`
        keys = keys[: int(offsets[bags])]
    return keys.to(torch.int64)


def rows_at_most(table: EmbeddingTable) -> float:
    """Return an upper bound on the rows in use, without waiting for a device."""
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
        most: for each table, an upper bound on the rows in use.
        asked: for each table, an upper bound on the number of its keys.
        keys: returns a table's keys; called only if they may matter.
        by_hand: whether all keys are admitted.
        absent: returns, for each table, how many of its keys have no row, repeats counted.
    """
    crowded = _crowded(tables, most, asked)
    if absent is not None and any(crowded):
        # One pass over all tables settles most cases.
        crowded = _crowded(tables, most, absent())
    for table, over in zip(tables, crowded, strict=True):
        if not over and not life_of(table).sweeps_always:
            continue
        sweep = Sweep(table, None, "", by_hand)
        if sweep.is_due(over):
            sweep.run(keys(table))


def may_exceed(table: EmbeddingTable) -> bool:
    """Return whether a table may exceed its budget until a lookup has inserted its keys.

    A sweep then drops the same rows as one before the lookup would, and need not find out first
    which keys are new. A listener might change the rows that the lookup has found.
    """
    life = life_of(table)
    return not (life.sweeps_always or life.makes_room_first or life.on_evict is not None)


def drop_rows(
    batch: TableBatch,
    tables: Sequence[int],
    in_use: Mapping[int, int],
    inserted: Mapping[int, int],
    found: Sequence[Any],
    features: torch.Tensor,
) -> None:
    """Drop rows of tables that a lookup has brought over their budgets.

    The rows that the lookup has found stay, but get other numbers.

    Args:
        batch: the tables of the lookup.
        tables: indices of tables that `may_exceed` their budgets.
        in_use: number of rows in use, by table.
        inserted: number of keys that it has inserted, by table; 0 where it is left out.
        found: its results: index, rows, counts and bags.
        features: its features, as ops describe them.
    """
    budgets = [cast(int, life_of(batch.tables[t]).max_rows) for t in tables]
    over = [t for t, budget in zip(tables, budgets, strict=True) if in_use[t] > budget]
    if not over:
        return
    _, rows, counts, bags = found
    entries, numbers = entries_of_tables(bags, features, len(batch.tables)), counts.tolist()
    for t in over:
        own = rows[entries[t].start :][: numbers[t]]
        sweep = Sweep(batch.tables[t], None, "")
        new_rows = sweep.keep_to_budget(0, own, inserted.get(t, 0))
        if new_rows is not None:
            own.copy_(new_rows.index_select(0, own))


def rows_now(
    batch: TableBatch, tables: Sequence[int], passed: Any, given: Descriptors
) -> list[torch.Tensor]:
    """Return the rows of a lookup's keys in tables, int32, or -1, before it inserts keys.

    Args:
        batch: the tables of the lookup.
        tables: indices of the tables.
        passed: the arguments of ops for them, see `TableBatch.tensors`.
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
    """Return which tables may be over their budgets after these numbers of new keys."""
    each = zip([life_of(table).max_rows for table in tables], most, new, strict=True)
    return [limit is not None and rows + count > limit for limit, rows, count in each]


def swept_columns(plan: LookupPlan) -> list[int]:
    """Return the columns of the tables in which room may have to be made."""
    return [
        columns.start + t
        for batch, columns in zip(plan.batches, plan.columns, strict=True)
        if batch.scored is not None
        for t in batch.scored.swept
    ]


def swept_tables(plan: LookupPlan) -> list[EmbeddingTable]:
    """Return the tables in which room may have to be made."""
    tables = [table for batch in plan.batches for table in batch.tables]
    return [tables[column] for column in swept_columns(plan)]


def known_here(tables: Sequence[EmbeddingTable], asked: torch.Tensor) -> torch.Tensor:
    """Return what this rank tells the others in a handshake, int64 ``[2 * tables]``.

    Args:
        tables: the tables that evict.
        asked: for each of them, the number of distinct keys that this rank asks for.
    """
    sizes = [cast(HashTable, table.table).tensors()[2] for table in tables]
    return torch.cat([*sizes, asked.to(sizes[0].device)])


def known_of(tables: Sequence[EmbeddingTable], told: np.ndarray) -> list[Known]:
    """Return what all ranks have told: int64 ``[world_size, 2 * tables]``, from `known_here`."""
    rows, asked = told.sum(0).reshape(2, -1).tolist()
    finished = [life_of(table).keys_finished for table in tables]
    return list(map(Known, tables, rows, asked, finished))


def still_inserting(known: Sequence[Known]) -> list[Known]:
    """Return the tables that have not been put into evaluation since the handshake."""
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
        known: for each table, in the same order on all ranks, what the handshake has told.
        keys: returns the keys of a table that this rank owns, from all ranks.
        exchange: the exchange of the ranks.
        signature: text that identifies the lookup, the same on all ranks.
        by_hand: whether all keys are admitted.

    Returns:
        An error of this rank, which the other ranks do not know yet.
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
            exchange.agree(what, failed)  # raises it on all ranks
        try:
            if sweep.is_due(crowded):
                sweep.run(keys(table))
        except Exception as error:
            if sweep.agreeing:
                exchange.agree(what, error)
            failed = failed or error
    return failed
