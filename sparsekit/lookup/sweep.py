"""Drops a table's rows that have expired or have the lowest scores, and admits new keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .. import ops
from ..distributed.exchange import Exchange, Proposal
from ..ops._group import GROUP_COMBINERS
from ..tables import saved_state as saved
from ..tables.embedding_table import EmbeddingTable
from ..tables.fallback import count_fallbacks, fallback_rows
from ..tables.hash_table import HashTable
from ..tables.life import Evicted, RowLife
from ..tables.removal import pinned_rows, remove_rows, states_of
from ..tables.weight import own_writes
from .descriptors import no_offsets
from .lowest import lowest

_find_or_insert = saved.builtin_of(torch.ops.sparsekit.group_find_or_insert_)


class Asked(NamedTuple):
    """Keys on this rank that are about to be looked up in a table.

    Attributes:
        keys: int64 ``[n]``.
        occurrences: how often each key occurs in requests that insert keys, int64 ``[n]``, possibly
            0; None if each key counts once.
        rows: the row of each key, or -1, int32 or int64 ``[n]``; None if not looked up yet.
        inserted: how many of the keys have just been inserted.
    """

    keys: torch.Tensor
    occurrences: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    inserted: int = 0


def life_of(table: EmbeddingTable) -> RowLife:
    """Return the `RowLife` of a table with scores."""
    return cast(RowLife, table.life)


class Sweep:
    """Drops a table's expired rows, and its rows with the lowest scores if it is over its budget.

    Attributes:
        agreeing: whether the other ranks are waiting for this rank.
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
        # Add 1 if the lookup is about to advance the clock.
        self._now = life.now(cast(torch.Tensor, table.clock)) + (not life.set_by_user)

    def is_due(self, crowded: bool) -> bool:
        """Return whether `run` may have something to do before keys are inserted.

        Args:
            crowded: whether the table may be over its budget.
        """
        self._expires, self._crowded = self._life.expiry_is_due(self._now), crowded
        self.agreeing = crowded and self._exchange is not None
        return crowded or self._expires or self._admits

    def run(self, asked: Asked) -> None:
        """Drop rows as needed, and insert the keys that are admitted."""
        keys, occurrences, rows, inserted = asked
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
            self.keep_to_budget(len(new), rows, inserted)
            return
        self._life.looked_up -= count_fallbacks(self._table.fallback, keys, occurrences)
        if occurrences is not None:
            counts = counts.zero_().index_add_(0, numbers, occurrences[absent])
        admitted, before = self._life.admit(new, counts, self._now)
        if self._crowded:
            self.keep_to_budget(len(admitted), rows)
        insert_admitted(self._table, admitted, self._life.score.words_of(before, self._now))
        self._life.admitted += len(admitted)
        self._life.refused += len(new) - len(admitted)

    def keep_to_budget(
        self, new: int, rows: torch.Tensor, inserted: int = 0
    ) -> torch.Tensor | None:
        """Make room for new keys without dropping `rows`.

        Args:
            new: number of keys that are about to be inserted.
            rows: rows that must stay, 1-D, in addition to `pinned_rows`; -1 stands for no row.
            inserted: number of keys that have already been inserted without making room.

        Returns:
            The new number of each row, as returned by `remove_rows`; None if nothing was dropped.
        """
        in_use, of_all = self._sums(len(self._index) - inserted, new + inserted)
        count = self._life.rows_to_drop(in_use, of_all)
        if not count:
            self.agreeing = False
            return None
        return self.drop_lowest(count, rows, new)

    def drop_lowest(
        self, count: int, rows: torch.Tensor | None = None, new: int = 0
    ) -> torch.Tensor | None:
        """Drop the `count` lowest-scoring rows over all ranks, except `rows`; count is at least 1.

        Nothing is dropped if a rank would still lack room for its `new` keys because too many of
        its rows must stay.

        Returns:
            The new number of each row, as returned by `remove_rows`; None if this rank dropped
            nothing.
        """
        size, score = len(self._index), self._life.score
        gone, order, keys = ops.lowest_rows(
            *(self._scores, self._index.tensors()[0], size, score.compared_as, score.halve_every),
            *(self._now, self._pinned(rows), count),
        )
        # Rows that are among the lowest overall are also among the lowest on their own rank.
        if self._exchange is not None:
            of_ranks = self._of_ranks([int(order.max()) if len(order) else 0])
            bits = int(of_ranks.max()).bit_length()
            gone = gone[lowest(order, keys, count, bits, self._sums)]
        (full_ranks,) = self._sums(int(size - len(gone) + new > self._table.capacity))
        self.agreeing = False
        if full_ranks or not len(gone):
            return None
        return self._drop(gone, expired=False)

    def in_use(self) -> int:
        """Return the number of rows in use on all ranks."""
        return self._sums(len(self._index))[0]

    def _pinned(self, rows: torch.Tensor | None) -> torch.Tensor:
        """Return `rows` and all other rows that must stay; -1 stands for no row."""
        held = [*pinned_rows(self._table.weight), *fallback_rows(self._table.fallback, self._index)]
        if rows is not None:
            held.append(rows)
        if len(held) == 1:
            return held[0].to(torch.int64)
        return torch.cat([self._scores[:0], *(one.to(torch.int64) for one in held)])

    def _of_ranks(self, numbers: Sequence[int]) -> np.ndarray:
        """Gather these numbers from all ranks, int64 ``[world_size, len(numbers)]``."""
        exchange = cast(Exchange, self._exchange)
        counts = torch.tensor(numbers, device=exchange.device).expand(exchange.world_size, -1)
        return exchange.agree(self._what, Proposal(self._what, counts)).counts

    def _sums(self, *numbers: int) -> Sequence[int]:
        """Return the sums of numbers over all ranks."""
        if self._exchange is None:
            return numbers
        return cast(list[int], self._of_ranks(numbers).sum(0).tolist())

    def _drop(self, gone: torch.Tensor, expired: bool) -> torch.Tensor:
        """Remove rows with `remove_rows`, count them, and notify the listener."""
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
        new_rows = remove_rows(table, gone)
        if expired:
            life.expired += len(gone)
        else:
            life.evicted += len(gone)
        if life.on_evict is not None:
            life.on_evict(told)
        return new_rows


def insert_admitted(table: EmbeddingTable, keys: torch.Tensor, words: torch.Tensor) -> None:
    """Insert distinct int64 keys ``[n]`` that have no row, with their initial vectors.

    Their counts are removed in the same step, so that each key has either a row or a count.

    Args:
        table: the table.
        keys: the keys.
        words: the keys' scores, int64 ``[n]``.

    Raises:
        TableFullError: this rank has too few free rows; the table is unchanged.
    """
    index, count = cast(HashTable, table.table), len(keys)
    if count == 0:
        return
    size = len(index)
    index.reserve(size + count)
    table.catch_up(torch.arange(size, size + count, device=keys.device))  # before the rows get keys
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
            torch.tensor([[0, index.capacity, table.world_size]], device="cpu"),
            torch.tensor([table.initializer.numbers], dtype=torch.float64, device="cpu"),
            [keys],
            [no_offsets(keys.device)],
            torch.tensor([columns], device="cpu"),
            [] if (larger := index.larger()) is None else [larger],
        ),
        partial(torch.Tensor.copy_, scores, words),
        *life_of(table).removal_of_counts(keys),
    ]
    with own_writes([table.weight]):
        increment_version([table.weight])
        saved.run_all(calls)
    index.grow_on(size, size + count)
