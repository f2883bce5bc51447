"""The by-bag route: every rank gets all keys, and adds up the vectors of those that it owns.

This is the algorithm of HugeCTR's sparse_operation_kit. Every rank sends its keys to all ranks. For
every bag, each rank adds up the vectors of the keys that it owns, and sends the sum to the rank
that sent the bag. That rank adds up the sums from all ranks and, for a mean, divides the total.
Apart from the keys themselves, the number of bytes sent does not depend on the number of keys in a
bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import ops
from ..distributed.exchange import Exchange
from ..distributed.wire import (
    Parts,
    RaggedBags,
    bags_bytes,
    pack,
    packed_sizes,
    part_bytes,
    read_bags_of,
    unpack,
    write_bags,
    write_to_all,
)
from ..ops._checks import accumulate_dtype
from ..tables.embedding_table import EmbeddingTable
from .inputs import Bags, offsets_of
from .make_room import Known, make_room_on_ranks, still_inserting
from .plan import LookupPlan
from .reading import asked_of
from .record import LookupRecord, LookupResult
from .request import Request, one_by_one
from .scored import tables_by_user
from .second import Gradients, differentiable
from .slots import NO_LIMIT
from .sweep import Asked
from .table_ops import run
from .user_scores import UserScores, inserting, scores_on_ranks


def can_go_by_bag(request: Request) -> bool:
    """Return whether a request pools without "max", and its sample weights need no gradient."""
    return request.combiner != "none" and not request.pooled_here


def payload_bytes(requests: Sequence[Request]) -> int:
    """Return the size in bytes of the message part that carries the bags of these requests."""
    return bags_bytes(
        [
            (
                len(request.offsets) - 1,
                len(request.keys),
                0
                if request.weights is None
                else _sum_dtype(request.table).itemsize * len(request.keys),
            )
            for request in requests
        ]
    )


def bytes_to_move(requests: Sequence[Request]) -> int:
    """Return how many bytes the forward pass exchanges with other ranks, excluding heads."""
    per_rank = payload_bytes(requests) - part_bytes(0)
    for request in requests:
        row = request.table.embedding_vec_size * request.table.sum_dtype_on_wire.itemsize
        per_rank += (len(request.offsets) - 1) * row
    return per_rank * (requests[0].table.world_size - 1)


def _ragged(request: Request) -> RaggedBags:
    weights = request.weights
    if weights is not None:
        weights = weights.detach().to(_sum_dtype(request.table))
    return RaggedBags(request.offsets.diff(), request.keys.to(torch.int64), weights)


def _sum_dtype(table: EmbeddingTable) -> torch.dtype:
    """Return the dtype used to add up a bag's vectors."""
    return accumulate_dtype(table.weight.dtype)


class ByBag:
    """One lookup by bag in several tables; each rank adds up the vectors of the keys it owns."""

    def __init__(
        self,
        exchange: Exchange,
        signature: str,
        plan: LookupPlan,
        requests: Sequence[Request],
        known: Sequence[Known],
    ) -> None:
        self.exchange = exchange
        self._known = known
        self.plan = plan
        self.signature = signature
        self.requests = requests

    def begin(self, sizes: Sequence[int]) -> None:
        """Send this rank's bags to all ranks; `sizes` says how many bytes each rank sends."""
        ranks = self.exchange.world_size
        self._received = self.exchange.send(
            f"bags: {self.signature}",
            lambda parts: write_bags(parts, [_ragged(request) for request in self.requests]),
            [sizes[self.exchange.rank]] * ranks,
            sizes,
            late=True,
        )

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """Finish the lookup; see `Route`."""
        exchange, ranks = self.exchange, self.exchange.world_size
        tables = [request.table for request in self.requests]
        owned = [
            _Owned(table, bags)
            for table, bags in zip(tables, _bags_of_ranks(tables, self._received()), strict=True)
        ]

        # For each table, an empty tensor with its sums' dtype on the wire and row length.
        like = [
            self.requests[0].keys.new_empty(
                0, table.embedding_vec_size, dtype=table.sum_dtype_on_wire
            )
            for table in tables
        ]
        looked_up: list[LookupResult] = []

        def keys_of(table: EmbeddingTable) -> Asked:
            return asked_of(table, [one.request for one in owned], self.plan.reads)

        user_scores: UserScores = {}
        batches = self.plan.batches
        by_user = tables_by_user(batches) if any(x.scored is not None for x in batches) else []
        if by_user:
            requests = inserting(self.requests, self.plan.reads)
            given = by_user, keys_of, exchange, self.signature, requests, error
            user_scores = scores_on_ranks(*given)
        if self._known and error is None:
            error = make_room_on_ranks(
                still_inserting(self._known), keys_of, exchange, self.signature
            )

        def add_up(to: Parts) -> None:
            if error is not None:
                raise error
            of_ranks = [one.request for one in owned]
            looked_up.append(run(self.plan, of_ranks, True, user_scores))
            sums = [
                one.sums(output).to(rows.dtype)
                for one, output, rows in zip(owned, looked_up[0].outputs, like, strict=True)
            ]
            pack(to, sums, [one.bags.counts for one in owned])

        theirs = [one.bags.counts for one in owned]
        own = [[len(request.offsets) - 1] * ranks for request in self.requests]
        sizes = packed_sizes(like, theirs), packed_sizes(like, own)
        for each in sizes:
            exchange.expect(each)
        parts = unpack(
            exchange.send(f"sums: {self.signature}", add_up, *sizes, late=True)(), like, own
        )
        totals = [
            part.to(_sum_dtype(table)).view(ranks, count[0], part.shape[1]).sum(0)
            for table, part, count in zip(tables, parts, own, strict=True)
        ]
        _, record, found = looked_up[0]
        signature = f"gradients: {self.signature}"
        way_back = _WayBack(exchange, signature, like, owned, sizes, record, found)
        sums = _Sums.apply(way_back, totals, *record.autograd_inputs)
        return [
            request.shaped(_divided(total, request).to(request.table.weight.dtype))
            for request, total in zip(self.requests, sums, strict=True)
        ]


@dataclass
class _Bags:
    """The bags from all ranks for one table, reduced to the keys that this rank owns."""

    counts: list[int]  # number of bags from each rank
    keys: torch.Tensor  # keys of all bags, int64 [m]
    offsets: torch.Tensor  # int64 [bags from all ranks + 1]
    weights: torch.Tensor | None  # sample weights, shape [m]


def _bags_of_ranks(tables: Sequence[EmbeddingTable], come: Parts) -> list[_Bags]:
    """Return, for each table, the bags from all ranks reduced to the keys that this rank owns."""
    dtypes = [_sum_dtype(table) for table in tables]
    of_ranks = [read_bags_of(come, rank, dtypes) for rank in range(len(come.begins))]
    return [_owned(table, of_table) for table, *of_table in zip(tables, *of_ranks, strict=True)]


def _owned(table: EmbeddingTable, parts: Sequence[RaggedBags]) -> _Bags:
    lengths = torch.cat([part.counts for part in parts])
    keys = torch.cat([part.keys for part in parts])
    mine = table.owned(keys)
    weights = None
    if any(part.weights is not None for part in parts):
        # If only some ranks pass sample weights, keys from the other ranks have weight 1.
        filled = [
            torch.ones_like(k, dtype=_sum_dtype(table)) if w is None else w for _, k, w in parts
        ]
        weights = torch.cat(filled)[mine]
    counts = [len(part.counts) for part in parts]
    offsets = torch.searchsorted(mine, offsets_of(lengths))
    return _Bags(counts, keys[mine], offsets, weights)


def _divided(total: torch.Tensor, request: Request) -> torch.Tensor:
    """Turn sums into the combiner's result; a divisor of zero gives zeros."""
    if isinstance(request.combiner, tuple):
        slots = request.of_slots()
        totals = total.view(len(slots), request.shape[0], total.shape[1])
        return torch.cat([_divided(*each) for each in zip(totals, slots, strict=True)])
    if request.combiner == "sum":
        return total
    counts = request.offsets.diff()
    if request.weights is None:
        divisor = counts.to(total.dtype)
    else:
        bags = torch.arange(len(counts), device=counts.device)
        bag = bags.repeat_interleave(counts, output_size=len(request.keys))
        w = request.weights.detach().to(total.dtype)
        w = w if request.combiner == "mean" else w * w
        divisor = ops.unsorted_segment_sum(w.unsqueeze(1), bag, len(counts)).squeeze(1)
    zero = divisor == 0
    divisor = divisor.masked_fill(zero, 1)
    divisor = divisor.sqrt() if request.combiner == "sqrtn" else divisor
    return (total / divisor.unsqueeze(1)).masked_fill(zero.unsqueeze(1), 0)


class _Owned:
    """Sums the bags from all ranks for one table, over the keys that this rank owns.

    Sums are computed in float32 or float64. The pooling ops round their results to the dtype of the
    rows; if the rows have another dtype, this class looks up single vectors and adds them up
    itself.
    """

    def __init__(self, table: EmbeddingTable, bags: _Bags) -> None:
        self.bags = bags
        self._adds = _sum_dtype(table) != table.weight.dtype
        if self._adds:
            self.request = one_by_one(table, bags.keys)
            return
        asked = Bags(bags.keys, bags.offsets, bags.weights)
        shape = (len(bags.offsets) - 1,)
        self.request = Request(table, asked, "sum", NO_LIMIT, shape, checked=True)

    def sums(self, output: torch.Tensor) -> torch.Tensor:
        """Return the sums ``[all bags, dim]``, given the output of `request`."""
        if not self._adds:
            return output
        vectors = output.to(_sum_dtype(self.request.table))
        places = torch.arange(len(output), device=output.device)
        return ops.embedding_bag(vectors, places, self.bags.offsets, "sum", self.bags.weights)

    def gradient(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the output of `request`, given the gradient of the sums."""
        if not self._adds:
            return sums
        lengths = self.bags.offsets.diff()
        vectors = sums.repeat_interleave(lengths, 0, output_size=len(self.bags.keys))
        return vectors if self.bags.weights is None else vectors * self.bags.weights.unsqueeze(1)


@dataclass
class _WayBack:
    """The state that one lookup saves for its backward pass."""

    exchange: Exchange
    signature: str
    like: list[torch.Tensor]  # for each table, an empty tensor with its sums' dtype and row length
    owned: list[_Owned]
    sizes: tuple[list[int], list[int]]  # bytes of sums to send to and receive from each rank
    record: LookupRecord
    found: list[torch.Tensor | None]

    def gradients(self, grads: Gradients) -> Gradients:
        """Exchange the gradients of bag sums; return the gradients of this rank's weights."""
        given = cast("Sequence[torch.Tensor]", grads)
        exchange, owned = self.exchange, self.owned
        theirs, own = self.sizes

        def write(to: Parts) -> None:
            each = zip(given, self.like, strict=True)
            write_to_all(to, [grad.to(rows.dtype) for grad, rows in each])

        with exchange.lock, exchange.alone():
            come = exchange.send(self.signature, write, own, theirs, late=True)()
            parts = unpack(come, self.like, [one.bags.counts for one in owned])
            vectors = [
                one.gradient(part.to(grad.dtype))
                for one, part, grad in zip(owned, parts, given, strict=True)
            ]
            return self.record.gradients(vectors, self.found)


class _Sums(torch.autograd.Function):
    """Autograd function for the sums of this rank's bags; backward sends gradients to all ranks."""

    @staticmethod
    def forward(
        ctx: Any, way_back: _WayBack, sums: list[torch.Tensor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.way_back = way_back
        return tuple(sums)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        way_back: _WayBack = ctx.way_back

        def again(of_gradients: Gradients) -> Gradients:
            return way_back.record.pooled_again(of_gradients, grads, way_back.found)

        return None, None, *differentiable(way_back.gradients, again, grads)
