"""Drops rows from tables that a lookup has pushed over their budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import increment_version

from ..tables import saved_state as saved
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from ..tables.in_flight import InFlight
from ..tables.removal import element, in_flight, states_of
from ..tables.weight import own_writes
from .plan import TableBatch
from .record import entries_of_tables
from .sweep import Sweep, life_of

_drop_lowest = saved.builtin_of(torch.ops.sparsekit.group_drop_lowest_)


class Dropping(NamedTuple):
    """A table that must drop rows, in the form that `group_drop_lowest_` takes.

    Attributes:
        table: the table.
        to_drop: number of rows to drop.
        own: rows that must stay, int32 ``[n]``, renumbered in place.
        tensors: the scores, then all other tensors with a row for each row of the table.
        initial: for each tensor, the value of rows that become free.
        lookups: lookups whose backward has run, and may run again.
    """

    table: EmbeddingTable
    to_drop: int
    own: torch.Tensor
    tensors: list[torch.Tensor]
    initial: list[torch.Tensor]
    lookups: list[InFlight]

    @staticmethod
    def of(table: EmbeddingTable, to_drop: int, own: torch.Tensor) -> Dropping | None:
        """Return the arguments for a table; None if only a `Sweep` can drop its rows.

        This is the case while a backward is pending, while the weight has a gradient, and if an
        optimizer has a sparse state.
        """
        weight = table.weight
        lookups = list(in_flight(weight))
        if weight.grad is not None or not all(lookup.done for lookup in lookups):
            return None
        of_rows = [(cast(torch.Tensor, table.scores), 0.0), (weight, 0.0)]
        of_rows += [(tensor, initial) for _, tensor, initial in states_of(weight)]
        if any(tensor.is_sparse for tensor, _ in of_rows):
            return None
        tensors = [tensor.detach() for tensor, _ in of_rows]
        initials = [element(initial, tensor.dtype) for tensor, initial in of_rows]
        return Dropping(table, to_drop, own, tensors, initials, lookups)

    def numbers(self) -> list[int]:
        """Return this table's row in the op's argument ``tables``."""
        life, lists = life_of(self.table), 1 + len(self.lookups)
        now = life.now(cast(torch.Tensor, self.table.clock)) + (not life.set_by_user)
        policy = life.score.compared_as, life.score.halve_every
        return [*policy, now, self.to_drop, len(self.tensors), lists, 1]


def drop_rows(
    batch: TableBatch,
    tables: Sequence[int],
    in_use: Mapping[int, int],
    inserted: Mapping[int, int],
    found: Sequence[Any],
    features: torch.Tensor,
) -> None:
    """Drop rows from tables that a lookup has pushed over their budgets.

    The rows that the lookup found stay, but are renumbered.

    Args:
        batch: the tables of the lookup.
        tables: indices of tables that `may_exceed` their budgets.
        in_use: number of rows in use, by table.
        inserted: number of keys that the lookup inserted, by table; 0 for tables not listed.
        found: the lookup's results: index, rows, counts and bags.
        features: the lookup's features, in the form that ops take.
    """
    of_batch = batch.tables
    new = {t: inserted.get(t, 0) for t in tables}
    counts = {t: life_of(of_batch[t]).rows_to_drop(in_use[t] - new[t], new[t]) for t in tables}
    over = [t for t in tables if counts[t]]
    if not over:
        return
    _, rows, distinct, bags = found
    entries, numbers = entries_of_tables(bags, features, len(of_batch)), distinct.tolist()
    own = {t: rows[entries[t].start :][: numbers[t]] for t in over}
    together = {t: Dropping.of(of_batch[t], counts[t], own[t]) for t in over}
    done = _drop_together([each for each in together.values() if each is not None])
    for t in over:
        if of_batch[t] in done:
            continue
        new_rows = Sweep(of_batch[t], None, "").keep_to_budget(0, own[t], new[t])
        if new_rows is not None:
            own[t].copy_(new_rows.index_select(0, own[t]))


def _drop_together(each: Sequence[Dropping]) -> set[EmbeddingTable]:
    """Drop the rows of several tables in one call; return the tables that the op supports."""
    if not each:
        return set()
    tables = [one.table for one in each]
    columns = [cast(HashTable, table.table).tensors() for table in tables]
    buckets, hash_seeds, sizes = map(list, zip(*columns, strict=True))
    tensors = [tensor for one in each for tensor in one.tensors]
    lookups = [lookup for one in each for lookup in one.lookups]
    lists = [rows for one in each for rows in (one.own, *(x.rows().data for x in one.lookups))]
    flags = [(lookup.moved, lookup.stale, lookup.lost) for lookup in lookups]
    # Set these before the call, so that an interrupt cannot hide that rows have moved.
    for lookup in lookups:
        lookup.moved = lookup.stale = lookup.lost = True
    try:
        with own_writes([table.weight for table in tables]):
            increment_version([*tensors, *buckets, *sizes])
            dropped, lost = _drop_lowest(
                *(buckets, hash_seeds, sizes, tensors),
                *([value for one in each for value in one.initial], lists),
                torch.tensor([one.numbers() for one in each], device="cpu"),
            )
    except Exception as refusal:  # the op has changed nothing
        for lookup, before in zip(lookups, flags, strict=True):
            lookup.moved, lookup.stale, lookup.lost = before
        if isinstance(refusal, ValueError):
            return set()  # a state may be refused beside those of other tables, but not alone
        raise
    of_lists, befores, served = iter(lost.tolist()), iter(flags), set()
    for one, count in zip(each, dropped.tolist(), strict=True):
        next(of_lists)  # that of the lookup's own rows, which stay
        for lookup in one.lookups:
            before, loses = next(befores), bool(next(of_lists))
            if count > 0:
                lookup.lost = before[2] or loses
            else:
                lookup.moved, lookup.stale, lookup.lost = before
        life_of(one.table).evicted += max(0, count)
        if count >= 0:
            served.add(one.table)
    return served
