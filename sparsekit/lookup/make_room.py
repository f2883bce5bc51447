"""Makes room in tables, and admits new keys, before the keys of a lookup are inserted.

A table over its budget drops the rows with the lowest scores of all ranks. Some rows are never
taken: those of the lookup's own keys, of backwards to come, and of a gradient. Ranks decide
together: from the handshake of a lookup every rank knows an upper bound on the rows in use, and
only if the bound is above the budget do they exchange more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .. import ops
from .._reports import errors_are_deferred
from ..distributed.exchange import Exchange, Proposal
from ..errors import TableFullError
from ..ops._group import GROUP_COMBINERS
from ..tables import saved_state as saved
from ..tables.embedding_table import EmbeddingTable
from ..tables.fallback import count_fallbacks, fallback_rows
from ..tables.hash_table import HashTable
from ..tables.life import LOW_WATERMARK, Evicted, RowLife
from ..tables.removal import pinned_rows, remove_rows, states_of
from ..tables.weight import own_writes
from .descriptors import no_offsets
from .lowest import lowest
from .plan import LookupPlan
from .request import Request

_find_or_insert = saved.builtin_of(torch.ops.sparsekit.group_find_or_insert_)


class Asked(NamedTuple):
    """Keys of this rank that are about to be looked up in a table.

    Attributes:
        keys: int64 ``[n]``.
        occurrences: how often each has come to be inserted, int64 ``[n]``, which may be 0; None if
            each has come once.
        rows: the row of each, or -1, int32 or int64 ``[n]``; None if they have not been found yet.
    """

    keys: torch.Tensor
    occurrences: torch.Tensor | None = None
    rows: torch.Tensor | None = None


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


def life_of(table: EmbeddingTable) -> RowLife:
    """Return the life of a table's rows, which has scores."""
    return cast(RowLife, table.life)


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


class Sweep:
    """Drops expired rows of a table, and the lowest rows of a table over its budget.

    Attributes:
        agreeing: whether the other ranks wait for this rank.
    """

    def __init__(
        self, table: EmbeddingTable, exchange: Exchange | None, what: str, by_hand: bool = True
    ) -> None:
        self.agreeing = False
        self._table, self._exchange, self._what = table, exchange, what
        life = self._life = life_of(table)
        self._admits = life.admission is not None and not by_hand
        self._index = cast(HashTable, table.table)
        self._scores = cast(torch.Tensor, table.scores)
        # The lookup is about to advance the clock.
        self._now = life.now(cast(torch.Tensor, table.clock)) + (not life.set_by_user)

    def is_due(self, crowded: bool) -> bool:
        """Return whether there may be something to do before keys are inserted.

        Args:
            crowded: whether the table may be over its budget.
        """
        self._expires, self._crowded = self._life.expiry_is_due(self._now), crowded
        self.agreeing = crowded and self._exchange is not None
        return crowded or self._expires or self._admits

    def run(self, asked: Asked) -> None:
        """Drop what is to be dropped, and insert the keys that are admitted."""
        keys, occurrences, rows = asked
        if rows is None:
            rows = self._index.find(keys)
        if self._expires:
            size = len(self._index)
            oldest = self._life.oldest(self._now)
            old = self._life.score.touched(self._scores[:size]) < oldest
            pinned = self._pinned(rows)
            old[pinned[pinned >= 0]] = False
            gone = old.nonzero().squeeze(1)
            if len(gone):
                self._drop(gone, expired=True)
                rows = self._index.find(keys)
            self._life.have_expired(self._now)
        if not self._crowded and not self._admits:
            return
        absent = rows < 0 if occurrences is None else (rows < 0) & (occurrences > 0)
        new, numbers, counts = ops.unique(keys[absent])
        if not self._admits:
            self._keep_to_budget(len(new), rows)
            return
        self._life.looked_up -= count_fallbacks(self._table.fallback, keys, occurrences)
        if occurrences is not None:
            counts = counts.zero_().index_add_(0, numbers, occurrences[absent])
        admitted, before = self._life.admit(new, counts, self._now)
        if self._crowded:
            self._keep_to_budget(len(admitted), rows)
        insert_admitted(self._table, admitted, self._life.score.words_of(before, self._now))
        self._life.admitted += len(admitted)
        self._life.refused += len(new) - len(admitted)

    def _keep_to_budget(self, new: int, rows: torch.Tensor) -> None:
        """Make room for new keys, but not at the cost of these rows."""
        budget = cast(int, self._life.max_rows)
        in_use, of_all = self._sums(len(self._index), new)
        if in_use + of_all <= budget:
            self.agreeing = False
            return
        left = max(0, min(int(LOW_WATERMARK * budget), budget - of_all))
        self.drop_lowest(in_use - left, rows, new)

    def drop_lowest(self, count: int, rows: torch.Tensor, new: int = 0) -> int:
        """Drop the `count` rows with the lowest scores of all ranks, at least 1, but not `rows`.

        Nothing is dropped if a rank would still have no room for its `new` keys, since its rows
        must stay.

        Returns:
            The number of rows that this rank has dropped.
        """
        size, score = len(self._index), self._life.score
        gone, order, keys = ops.lowest_rows(
            *(self._scores, self._index.tensors()[0], size, score.compared_as, score.halve_every),
            *(self._now, self._pinned(rows), count),
        )
        if self._exchange is not None:  # the lowest rows of all ranks are among those of each
            of_ranks = self._of_ranks([int(order.max()) if len(order) else 0])
            bits = int(of_ranks.max()).bit_length()
            gone = gone[lowest(order, keys, count, bits, self._sums)]
        (full_ranks,) = self._sums(int(size - len(gone) + new > self._table.capacity))
        self.agreeing = False
        if full_ranks or not len(gone):
            return 0
        self._drop(gone, expired=False)
        return len(gone)

    def in_use(self) -> int:
        """Return the number of rows in use on all ranks."""
        return self._sums(len(self._index))[0]

    def _pinned(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that must stay: these, and those of `pinned_rows`; -1 is no row."""
        rows = rows.to(torch.int64)
        held = [*pinned_rows(self._table.weight), *fallback_rows(self._table.fallback, self._index)]
        return torch.cat([rows, *(one.to(torch.int64) for one in held)]) if held else rows

    def _of_ranks(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the numbers of all ranks, int64 ``[world_size, len(numbers)]``."""
        exchange = cast(Exchange, self._exchange)
        counts = torch.tensor(numbers, device=exchange.device).expand(exchange.world_size, -1)
        return exchange.agree(self._what, Proposal(self._what, counts)).counts

    def _sums(self, *numbers: int) -> Sequence[int]:
        """Return the sums of numbers over all ranks."""
        if self._exchange is None:
            return numbers
        return cast(list[int], self._of_ranks(numbers).sum(0).tolist())

    def _drop(self, gone: torch.Tensor, expired: bool) -> None:
        """Remove rows, int64 ``[k]`` in ascending order; count them, and tell the listener."""
        life, table = self._life, self._table
        if life.on_evict is not None:
            table.catch_up(gone)
            states = {
                name: tensor.index_select(0, gone).to_dense() if tensor.is_sparse else tensor[gone]
                for name, tensor, _ in states_of(table.weight)
            }
            told = Evicted(
                self._index.keys()[gone],
                table.weight.detach()[gone],
                states,
                life.score.order(self._scores[gone], self._now),
                expired,
            )
        remove_rows(table, gone)
        if expired:
            life.expired += len(gone)
        else:
            life.evicted += len(gone)
        if life.on_evict is not None:
            life.on_evict(told)


def insert_admitted(table: EmbeddingTable, keys: torch.Tensor, words: torch.Tensor) -> None:
    """Give rows to distinct int64 keys ``[n]`` that have none, with initial vectors.

    Their counts are removed in the same step, so that each key has either a row or a count.

    Args:
        table: the table.
        keys: the keys.
        words: their scores, int64 ``[n]``.

    Raises:
        TableFullError: this rank has too few free rows; the table is unchanged.
    """
    index, count = cast(HashTable, table.table), len(keys)
    if count == 0:
        return
    size = len(index)
    if size + count > table.capacity:
        raise TableFullError(table.name, table.rank, size, table.capacity, count)
    table.catch_up(torch.arange(size, size + count, device=keys.device))  # the rows, while free
    buckets, hash_seed, in_use = index.tensors()
    columns = [0, 0, 0, count, GROUP_COMBINERS["none"], 1, 0, 0, table.embedding_vec_size]
    scores = cast(torch.Tensor, table.scores)[size : size + count]
    calls = [
        partial(
            _find_or_insert,
            [buckets],
            [hash_seed],
            [in_use],
            [table.weight.detach()],
            [table.seed],
            torch.tensor([[0, table.capacity, table.world_size]], device="cpu"),
            torch.tensor([table.initializer.numbers], dtype=torch.float64, device="cpu"),
            [keys],
            [no_offsets(keys.device)],
            torch.tensor([columns], device="cpu"),
        ),
        partial(torch.Tensor.copy_, scores, words),
        *life_of(table).removal_of_counts(keys),
    ]
    with own_writes([table.weight]):
        increment_version([table.weight])
        saved.run_all(calls)
