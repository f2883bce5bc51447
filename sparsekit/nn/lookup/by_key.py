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

from ...distributed.exchange import HEAD_BYTES, Agreed, Come, Exchange
from ..request import Request
from .asked import Asked
from .layout import ALIGNMENT, Layout
from .owned import Owned
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
        return torch.cat([asked.counts for asked in self._asked], 1)

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
        for layout in (self._keys, self._own, self._theirs):
            self.exchange.expect(layout.sizes)
        self._received = self.exchange.send(
            f"keys: {plan}",
            lambda: self._packed(own_keys),
            own_keys.sizes,
            self._keys.sizes,
        )

    def _packed(self, layout: Layout) -> torch.Tensor:
        """The keys of all tables, with room for heads."""
        if len(self._asked) == 1:
            return self._asked[0].all_keys(sum(layout.sizes))
        of_ranks = []
        for asked, columns in zip(self._asked, self.tables.columns, strict=True):
            of_ranks.append(asked.keys_for_ranks(layout.counts[:, columns].sum(1)))
        parts = []
        for first, *others in zip(*of_ranks, strict=True):
            parts += [first, *(part[HEAD_BYTES:] for part in others)]
        return torch.cat(parts)

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """See `Route`."""
        exchange = self.exchange
        owned = Owned(self.tables, self._received(), self._keys, self._theirs)

        def answer() -> torch.Tensor:
            if error is not None:
                raise error
            return owned.answer()

        sizes = self._theirs.sizes, self._own.sizes
        come = exchange.send(f"vectors: {self.plan}", answer, *sizes)()
        way_back = _WayBack(exchange, self.plan, self.tables, self._asked, self._own, owned)
        outputs = way_back.pooled(come)
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
    own: Layout
    owned: Owned

    def pooled(self, come: Come) -> list[torch.Tensor]:
        """The outputs of all requests, or the one that they are columns of."""
        outputs: dict[int, torch.Tensor] = {}
        joined: list[torch.Tensor] = []
        for asked, columns in zip(self.asked, self.tables.columns, strict=True):
            outs = asked.pool(come, self.own, columns, joined)
            if asked.width is not None:
                joined = outs
            else:
                outputs.update(zip(asked.tables.positions, outs, strict=True))
        return joined or [outputs[i] for i in range(len(outputs))]

    def gradients(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Those of the vectors that have come, to be sent back."""
        device = self.exchange.device
        data = torch.empty(sum(self.own.sizes), dtype=torch.uint8, device=device)
        for asked, columns in zip(self.asked, self.tables.columns, strict=True):
            asked.write_gradients(data, self.own, columns, grads)
        return data


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
        exchange, owned = way_back.exchange, way_back.owned
        saved = ctx.saved_tensors
        with exchange.lock, exchange.alone():
            come = exchange.send(
                f"gradients: {way_back.plan}",
                lambda: way_back.gradients(grads),
                way_back.own.sizes,
                owned.sizes,
            )()
            return None, None, *owned.gradients(come, saved)
