"""The route by key: each rank gets the vectors of its distinct keys and pools them itself.

`ShardedTable.by_owner` says where a key lives. A rank sends each owner its distinct keys; the
owner answers with their vectors, in the order in which they came. The backward sends the gradients
of those vectors the same way back, and the owner adds up what the ranks have sent for one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import ops
from ...distributed.exchange import Exchange, Parcel, pack, unpack
from ..request import Request, one_by_one
from .grouped import Grouped
from .tables import Tables


class ByKey:
    """One call of several tables on this rank, which asks the owners of its keys."""

    def __init__(
        self, exchange: Exchange, plan: str, tables: Tables, requests: Sequence[Request]
    ) -> None:
        self.exchange = exchange
        self.tables = tables
        self.plan = plan
        self.requests = requests
        self._asked = [_ask(request) for request in requests]
        # [world_size, tables] keys that this rank asks each rank for
        self._counts = torch.stack([asked.counts for asked in self._asked], 1)
        self._per_table: list[list[int]] = self._counts.T.tolist()

    def pack(self) -> tuple[torch.Tensor, list[int]]:
        """The keys for each owner. How many there are for each table goes in front of them."""
        each = [1] * self.exchange.world_size
        parts = [self._counts, *(asked.keys for asked in self._asked)]
        return pack(parts, [each, *self._per_table])

    def bytes_to_move(self) -> int:
        """What goes to other ranks and comes from them, the header and the backward left out."""
        others, world_size = self.exchange.world_size - 1, self.exchange.world_size
        total = 0
        for request, asked in zip(self.requests, self._asked, strict=True):
            table = request.table
            row = table.embedding_vec_size * table.weight.element_size()
            total += len(asked.keys) * (8 + row) * others // world_size
        return total

    def begin(self, keys: Parcel, sizes: Sequence[int]) -> None:
        """Send the keys that `pack` has packed; sizes are the bytes from each rank."""
        self._sizes = sizes
        self._received = self.exchange.begin_all_to_all(keys.data, keys.splits, sizes)

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """See `Route`."""
        tables = [request.table for request in self.requests]
        keys, counts = self._keys_of_ranks()
        grouped = Grouped(self.tables)

        def answer() -> Parcel:
            if error is not None:
                raise error
            owned = [one_by_one(table, each) for table, each in zip(tables, keys, strict=True)]
            return Parcel(*pack(grouped.look_up(owned), counts))

        answers = self.exchange.run(f"vectors: {self.plan}", answer)
        plan = f"gradients: {self.plan}"
        way_back = _WayBack(self.exchange, plan, self._per_table, counts, grouped, grouped.saved())
        came = unpack(answers, [table.weight for table in tables], self._per_table)
        vectors = _Vectors.apply(way_back, came, *grouped.takers())
        each = zip(self.requests, vectors, self._asked, strict=True)
        return [request.output(found, asked.positions) for request, found, asked in each]

    def _keys_of_ranks(self) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The keys that have come, of each table, and how many from each rank."""
        received, sizes = self._received(), self._sizes
        begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
        heads = [received[begin : begin + 8 * len(self._asked)] for begin in begins]
        of_ranks = torch.cat(heads).view(torch.int64).view(len(sizes), len(self._asked))
        counts = of_ranks.T.tolist()
        like = [of_ranks[:1], *(asked.keys for asked in self._asked)]
        _, *keys = unpack(received, like, [[1] * len(sizes), *counts])
        return keys, counts


@dataclass
class _Asked:
    """What this rank asks of one table."""

    keys: torch.Tensor  # int64 [u], the distinct keys by owner
    counts: torch.Tensor  # int64 [world_size]
    positions: torch.Tensor  # int64 [n], where each entry's vector will be


def _ask(request: Request) -> _Asked:
    keys = request.keys
    if request.table.dedupe:
        unique, inverse, _ = ops.unique(keys)
    else:
        unique, inverse = keys, torch.arange(len(keys), device=keys.device)
    by_owner, counts, permutation = request.table.by_owner(unique.to(torch.int64))
    place = torch.empty_like(permutation)
    place[permutation] = torch.arange(len(permutation), device=keys.device)
    return _Asked(by_owner, counts, place[inverse])


@dataclass
class _WayBack:
    """What the gradients of one call need."""

    exchange: Exchange
    plan: str
    came: list[list[int]]  # for each table, how many vectors have come from each rank
    asked: list[list[int]]  # and how many each rank has asked for here
    grouped: Grouped
    saved: list[torch.Tensor | None]


class _Vectors(torch.autograd.Function):
    """The vectors that have come, of all tables, which send their gradients to the owners."""

    @staticmethod
    def forward(
        ctx: Any, way_back: _WayBack, vectors: list[torch.Tensor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way_back = way_back
        return tuple(vectors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        way_back: _WayBack = ctx.way_back
        exchange = way_back.exchange
        with exchange.lock:
            sent, agreed = exchange.agree_to_send(
                way_back.plan,
                lambda: Parcel(*pack([grad.contiguous() for grad in grads], way_back.came)),
            )
            with exchange.alone():
                received = exchange.all_to_all(sent.data, sent.splits, agreed.sizes)
                parts = unpack(received, grads, way_back.asked)
                return None, None, *way_back.grouped.gradients(parts, way_back.saved)
