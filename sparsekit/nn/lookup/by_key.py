"""The route by key: each rank gets the vectors of its distinct keys and pools them itself.

A rank sends each owner its distinct keys; the owner answers with their vectors, in the order in
which they came, and the rank pools them from where they have come. The backward sends the gradients
of those vectors the same way back, and the owner adds up what the ranks have sent for one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...distributed.exchange import Agreed, Exchange, Parts
from ..request import Request
from .asked import Asked
from .layout import ALIGNMENT, Layout
from .owned import Owned
from .rows import exchange_rows
from .tables import Tables
from .weighted import without_weights


class ByKey:
    """One call of several tables on this rank, which asks the owners of its keys."""

    def __init__(self, exchange: Exchange, tables: Tables, requests: Sequence[Request]) -> None:
        self.exchange = exchange
        self.tables = tables
        self.plan = ""
        asked, self._finished = without_weights(requests)
        self._asked = []
        for alike in tables.alike:
            own = asked
            if len(tables.alike) > 1:
                own = [asked[i] for i in alike.positions]
            self._asked.append(Asked(alike, own, exchange.world_size))

    @property
    def counts(self) -> torch.Tensor:
        """int64 ``[world_size, tables]``, keys that this rank asks each rank for."""
        counts = [asked.counts for asked in self._asked]
        return counts[0] if len(counts) == 1 else torch.cat(counts, 1)

    def bytes_to_move(self) -> int:
        """What goes to other ranks and comes from them, heads and the backward left out."""
        others, world_size = self.exchange.world_size - 1, self.exchange.world_size
        keys = self.counts.sum(0).tolist()
        rows = [row for alike in self.tables.alike for row in alike.row_bytes]
        return sum(
            count * (8 + row) * others // world_size for count, row in zip(keys, rows, strict=True)
        )

    def bytes_of_bags(self) -> int:
        """What would move by bag, but for the keys."""
        others = self.exchange.world_size - 1
        return sum(asked.bytes_of_bags() * others for asked in self._asked)

    def begin(self, plan: str, agreed: Agreed) -> None:
        """Send the keys, as many as all ranks have agreed on."""
        self.plan = plan
        rows = [row for alike in self.tables.alike for row in alike.row_bytes]
        words = [8] * len(rows)
        # Keys of this rank and of the others; vectors, or gradients, for this rank and for them.
        own_keys, self._keys = Layout(agreed.own, words), Layout(agreed.counts, words)
        self._own = Layout(agreed.own, rows, ALIGNMENT)
        self._theirs = Layout(agreed.counts, rows, ALIGNMENT)
        for layout in (self._own, self._theirs):
            self.exchange.expect(layout.sizes)

        def write(parts: Parts) -> None:
            for asked, columns in zip(self._asked, self.tables.columns, strict=True):
                asked.write_keys(parts, own_keys, columns)

        sizes = own_keys.sizes, self._keys.sizes
        self._received = self.exchange.send(f"keys: {plan}", write, *sizes)

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """See `Route`."""
        exchange = self.exchange
        owned = Owned(self.tables, self._received(), self._keys, self._theirs)

        def answer(memory: list[torch.Tensor], begins: Sequence[int]) -> None:
            if error is not None:
                raise error
            owned.answer(memory, begins)

        layouts = self._theirs, self._own
        come = exchange_rows(exchange, f"vectors: {self.plan}", self.tables, answer, *layouts)
        way_back = _WayBack(exchange, self.plan, self.tables, self._asked, *layouts, owned)
        outputs = way_back.pooled(*come)
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        way_back: _WayBack = ctx.way_back
        exchange, saved = way_back.exchange, ctx.saved_tensors
        with exchange.lock, exchange.alone():
            come = way_back.gradients(grads)
            return None, None, *way_back.owned.gradients(*come, saved)
