"""The route by key: each rank gets the vectors of its distinct keys and pools them itself.

A rank sends each owner its distinct keys; the owner answers with their vectors, in the order in
which they came, and the rank pools them from where they have come. The backward sends the gradients
of those vectors the same way back, and the owner adds up what the ranks have sent for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from ...distributed.exchange import HEAD_BYTES, Agreed, Exchange, Parts, padded
from ..request import Request
from .asked import Asked
from .layout import ALIGNMENT, Layout
from .owned import Owned
from .pooled_here import as_vectors
from .rows import exchange_rows
from .second import Gradients, differentiable
from .tables import Tables


class ByKey:
    """One call of several tables on this rank, which asks the owners of its keys.

    Args:
        exchange: the way to them.
        tables: which.
        plan: what the call is, the same on all ranks.
    """

    def __init__(self, exchange: Exchange, tables: Tables, plan: str) -> None:
        self.exchange = exchange
        self.tables = tables
        self.plan = plan
        self._asked: list[Asked] = []
        self._row_bytes = [row for alike in tables.alike for row in alike.row_bytes]
        # Where the keys of all ranks lie; with max_keys_per_rank that comes with them.
        self._keys: Layout | None = None

    def ask(self, requests: Sequence[Request]) -> None:
        """Take the requests of the call.

        Raises:
            TypeError, ValueError, IndexError: keys or offsets that a table cannot take, or more
                distinct keys for a rank than its max_keys_per_rank.
        """
        asked, self._finished = as_vectors(requests)
        for alike in self.tables.alike:
            own = asked
            if len(self.tables.alike) > 1:
                own = [asked[i] for i in alike.positions]
            self._asked.append(Asked(alike, own, self.exchange.world_size))
        if self.tables.most_keys is not None:
            self._own_counts = np.array(self.counts.tolist())
            self._refuse_more_than(self.tables.most_keys)

    @property
    def counts(self) -> torch.Tensor:
        """int64 ``[world_size, tables]``, keys that this rank asks each rank for."""
        counts = [asked.counts for asked in self._asked]
        return counts[0] if len(counts) == 1 else torch.cat(counts, 1)

    def bytes_to_move(self) -> int:
        """What goes to other ranks and comes from them, heads and the backward left out."""
        others, world_size = self.exchange.world_size - 1, self.exchange.world_size
        keys = self.counts.sum(0).tolist()
        return sum(
            count * (8 + row) * others // world_size
            for count, row in zip(keys, self._row_bytes, strict=True)
        )

    def bytes_of_bags(self) -> int:
        """What would move by bag, but for the keys."""
        others = self.exchange.world_size - 1
        return sum(asked.bytes_of_bags() * others for asked in self._asked)

    def begin(self, agreed: Agreed) -> None:
        """Send the keys, as many as all ranks have agreed on."""
        exchange, most = self.exchange, self.tables.most_keys
        if most is not None:
            # What may come from now on without a handshake.
            exchange.expect([self._size_at_once(most)] * exchange.world_size)
            exchange.at_once.add(self.tables.plan())
        words = [8] * len(self._row_bytes)
        own_keys, self._keys = Layout(agreed.own, words), Layout(agreed.counts, words)

        def write(parts: Parts) -> None:
            self._write_keys(parts, own_keys)

        sizes = own_keys.sizes, self._keys.sizes
        self._received = exchange.send(f"keys: {self.plan}", write, *sizes)
        self._own, self._theirs = self._expected(agreed.own), self._expected(agreed.counts)

    def begin_at_once(self, ask: Callable[[Tables], Sequence[Request]]) -> None:
        """Send the keys, and with them how many they are, in parts of a size that all know."""
        most, exchange = cast("list[int]", self.tables.most_keys), self.exchange
        size = self._size_at_once(most)

        def write(parts: Parts) -> None:
            self.ask(ask(self.tables))
            for rank, counts in enumerate(self.counts):
                parts.part(rank, size).view(torch.int64)[: len(most)] = counts
            self._own = self._expected(self._own_counts)
            self._write_keys(parts, self._behind_counts(self._own_counts))

        sizes = [size] * exchange.world_size
        what = f"keys at once: {self.plan}"
        self._received = exchange.send(what, write, sizes, sizes, words=len(most))

    def _size_at_once(self, most: Sequence[int]) -> int:
        """Bytes of a part with counts and, at most, that many keys."""
        return self._behind_counts(np.array([most])).sizes[0]

    def _behind_counts(self, counts: np.ndarray) -> Layout:
        """Where so many keys lie in parts that have counts as well."""
        words = [8] * len(self._row_bytes)
        return Layout(counts, words, head_bytes=HEAD_BYTES + padded(8 * len(words)))

    def _write_keys(self, parts: Parts, keys: Layout) -> None:
        for asked, columns in zip(self._asked, self.tables.columns, strict=True):
            asked.write_keys(parts, keys, columns)

    def _expected(self, counts: np.ndarray) -> Layout:
        """Where vectors, or gradients, of so many keys lie, which will come."""
        layout = Layout(counts, self._row_bytes, ALIGNMENT)
        self.exchange.expect(layout.sizes)
        return layout

    def _refuse_more_than(self, most: Sequence[int]) -> None:
        counts = self._own_counts
        if (counts <= most).all():
            return
        rank, t = np.argwhere(counts > most)[0]
        table = [table for alike in self.tables.alike for table in alike.tables][t]
        raise ValueError(
            f"{table.name}: {counts[rank, t]} distinct keys for rank {rank}, but "
            f"max_keys_per_rank is {most[t]}; set a larger one on all ranks, or None for no limit"
        )

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """See `Route`."""
        exchange = self.exchange
        come = self._received()
        if self._keys is None:
            own = self._own_counts[exchange.rank]
            counts = np.insert(come.words, exchange.rank, own, axis=0)
            self._keys, self._theirs = self._behind_counts(counts), self._expected(counts)
        owned = Owned(self.tables, come, self._keys, self._theirs)

        def answer(memory: list[torch.Tensor], begins: Sequence[int]) -> None:
            if error is not None:
                raise error
            owned.answer(memory, begins)

        layouts = self._theirs, self._own
        rows = exchange_rows(exchange, f"vectors: {self.plan}", self.tables, answer, *layouts)
        way_back = _WayBack(exchange, self.plan, self.tables, self._asked, *layouts, owned)
        outputs = way_back.pooled(*rows)
        takers = owned.grouped.takers()
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in takers):
            outputs = list(_Outputs.apply(way_back, outputs, *takers))
        return self._finished(outputs)


@dataclass
class _WayBack:
    """What the outputs of one call are made of, and where their gradients go."""

    exchange: Exchange
    plan: str
    tables: Tables
    asked: list[Asked]
    theirs: Layout
    own: Layout
    owned: Owned

    def pooled(self, come: list[torch.Tensor], begins: Sequence[int]) -> list[torch.Tensor]:
        """The outputs of all requests, or the one that they are columns of."""
        outputs: dict[int, torch.Tensor] = {}
        joined: list[torch.Tensor] = []
        for asked, columns, rows in zip(self.asked, self.tables.columns, come, strict=True):
            outs = asked.pool(rows, begins, self.own, columns, joined)
            if asked.width is not None:
                joined = outs
            else:
                outputs.update(zip(asked.tables.positions, outs, strict=True))
        return joined or [outputs[i] for i in range(len(outputs))]

    def gradients(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Those of the vectors of this rank's rows, given those of the outputs."""

        def write(memory: list[torch.Tensor], begins: Sequence[int]) -> None:
            for asked, columns, rows in zip(self.asked, self.tables.columns, memory, strict=True):
                asked.write_gradients(rows, begins, self.own, columns, grads)

        what = f"gradients: {self.plan}"
        return exchange_rows(self.exchange, what, self.tables, write, self.own, self.theirs)


class _Outputs(torch.autograd.Function):
    """The outputs of a call, which send their gradients to the owners of the vectors."""

    @staticmethod
    def forward(
        ctx: Any, way_back: _WayBack, outputs: list[torch.Tensor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way_back = way_back
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*way_back.owned.grouped.saved())
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        way_back: _WayBack = ctx.way_back
        exchange, saved = way_back.exchange, ctx.saved_tensors

        def make(grads: Gradients) -> Gradients:
            with exchange.lock, exchange.alone():
                come = way_back.gradients(grads)
                return way_back.owned.gradients(*come, saved)

        def again(of_gradients: Gradients) -> Gradients:
            return way_back.owned.grouped.pooled_again(of_gradients, grads, saved)

        return None, None, *differentiable(make, again, grads)
