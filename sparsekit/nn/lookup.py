"""One lookup in several tables, sharded over ranks: a fixed number of collectives for all.

Key k lives on rank ``unsigned(k) % world_size``. A rank sends each owner its distinct keys; the
owner answers with their vectors, in the order in which they came. The backward sends the gradients
of those vectors the same way back, and the owner adds up what the ranks have sent for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from .. import ops
from .._compiling import uncompiled
from ..distributed.exchange import Exchange, pack, unpack
from .partial import payload, payload_bytes, pooled_outputs
from .shard import Bags, Prepared, ShardedTable, deliver_gradient


@dataclass
class _Asked:
    """What this rank asks of one table."""

    keys: torch.Tensor  # int64 [u], the distinct keys by owner
    counts: torch.Tensor  # int64 [world_size]
    positions: torch.Tensor  # int64 [n], where each entry's vector will be


@dataclass
class _Owned:
    """What all ranks ask of this rank's part of a table."""

    counts: list[int]  # keys from each rank
    keys: torch.Tensor  # [r] distinct keys, in the order of rows
    rows: torch.Tensor  # [r] their rows, rising; -1 = unseen, in evaluation
    inverse: torch.Tensor  # [m] which of them each received key is
    some_missing: bool = False  # whether there are rows of -1


def _ask(keys: torch.Tensor, world_size: int, dedupe: bool) -> _Asked:
    if dedupe:
        unique, inverse, _ = ops.unique(keys)
    else:
        unique, inverse = keys, torch.arange(len(keys), device=keys.device)
    by_owner, counts, permutation = ops.bucketize(unique.to(torch.int64), world_size)
    place = torch.empty_like(permutation)
    place[permutation] = torch.arange(len(permutation), device=keys.device)
    return _Asked(by_owner, counts, place[inverse])


def _own(table: ShardedTable, keys: torch.Tensor, counts: list[int]) -> _Owned:
    rows, distinct, inverse = table.distinct_rows(keys)
    return _Owned(counts, distinct, rows, inverse)


class _Prepares(Protocol):
    def prepare(self, *inputs: Any) -> Prepared: ...


def look_up(
    tables: Sequence[ShardedTable],
    calls: Sequence[tuple[Any, ...]],
    preparers: Sequence[_Prepares] | None = None,
) -> list[torch.Tensor]:
    """Call several layers together.

    Args:
        tables: the layers: the same ones, in the same order, on every rank.
        calls: the arguments of each.
        preparers: what checks and pools in place of the layers themselves.
    """
    exchange = tables[0].process_exchange()
    if exchange is None:
        return send_keys(tables, calls, preparers).outputs()
    return _look_up_together(exchange, tables, calls, preparers)


# Collectives, and what ranks tell each other about errors, are nothing for a compiler.
@uncompiled
def _look_up_together(
    exchange: Exchange,
    tables: Sequence[ShardedTable],
    calls: Sequence[tuple[Any, ...]],
    preparers: Sequence[_Prepares] | None,
) -> list[torch.Tensor]:
    with exchange.lock:
        return send_keys(tables, calls, preparers).outputs()


@dataclass
class SentKeys:
    """A lookup whose keys are on their way to their owners. Nothing has been changed so far."""

    tables: Sequence[ShardedTable]
    prepared: list[Prepared]
    exchange: Exchange | None
    asked: list[_Asked]
    per_table: torch.Tensor  # [world_size, tables] keys that this rank asks each rank for
    sizes: list[int]  # bytes from each rank
    received: Callable[[], torch.Tensor]
    plan: str
    partial: bool  # whether whole bags have been sent, by nn/partial.py

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """The rest of the lookup; with an error, all ranks raise it."""
        if self.partial:
            return pooled_outputs(
                cast(Exchange, self.exchange),
                self.tables,
                self.prepared,
                self.received(),
                self.sizes,
                self.plan,
                error,
            )
        if self.exchange is None:
            if error is not None:
                raise error
            found = [t.lookup(p.keys) for t, p in zip(self.tables, self.prepared, strict=True)]
        else:
            found = self._vectors(self.exchange, error)
        return [p.finish(*f) for p, f in zip(self.prepared, found, strict=True)]

    def _vectors(
        self, exchange: Exchange, error: Exception | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Vectors of the distinct keys of each table ``[u, dim]``, and each key's position."""
        received = self.received()
        owner_counts = _counts_of(received, self.sizes, len(self.tables))
        like = [self.per_table[:1], *(a.keys for a in self.asked)]
        _, *owned_keys = unpack(received, like, [[1] * exchange.world_size, *owner_counts])
        owned: list[_Owned] = []
        if error is None:
            try:
                owned = [
                    _own(table, k, count)
                    for table, k, count in zip(self.tables, owned_keys, owner_counts, strict=True)
                ]
            except Exception as raised:  # a full table, for one
                error = raised
        for table in self.tables:
            table._watch_gradient()
        job = _Job(exchange, self.tables, owned, self.per_table.T.tolist(), self.plan, error)
        vectors = _Vectors.apply(job, *(table.weight for table in self.tables))
        return [(v, a.positions) for v, a in zip(vectors, self.asked, strict=True)]


def _check_exchange(tables: Sequence[ShardedTable], exchange: Exchange | None) -> None:
    """Raise unless this is what all tables were made for, and have in common."""
    for table in tables:
        if table.exchange is not exchange:
            raise ValueError(
                f"{table.name} and {tables[0].name} have two process groups or devices"
            )


def send_keys(
    tables: Sequence[ShardedTable],
    calls: Sequence[tuple[Any, ...]],
    preparers: Sequence[_Prepares] | None = None,
    error: Exception | None = None,
) -> SentKeys:
    """The first part of `look_up`, which does not wait for the keys to arrive.

    With an error all ranks raise it; there need be no calls then.
    """
    steps = list(zip(preparers or tables, calls, strict=error is None))
    exchange = tables[0].process_exchange()
    nothing = torch.empty(0, dtype=torch.uint8)
    prepared: list[Prepared] = []
    if exchange is None:
        if error is not None:
            raise error
        _check_exchange(tables, None)
        prepared = [preparer.prepare(*call) for preparer, call in steps]
        return SentKeys(tables, prepared, None, [], nothing, [], lambda: nothing, "", False)

    # Counted before anything can fail or be interrupted, so that all ranks count alike.
    exchange.lookups += 1
    # A bad input here is an error on all ranks, none of which has changed anything yet.
    world_size = exchange.world_size
    asked: list[_Asked] = []
    per_table, send, splits = nothing, nothing, [0] * world_size
    facts = (0, 0, 0)
    plan = "look up"
    if error is None:
        try:
            _check_exchange(tables, exchange)
            described = ", ".join(table.plan() for table in tables)
            plan = f"look up in {described}, lookup number {exchange.lookups}"
            prepared = [preparer.prepare(*call) for preparer, call in steps]
            asked = [
                _ask(p.keys, world_size, table.dedupe)
                for table, p in zip(tables, prepared, strict=True)
            ]
            # The number of keys for each table goes in front of the keys.
            per_table = torch.stack([a.counts for a in asked], 1)
            parts = [per_table, *(a.keys for a in asked)]
            send, splits = pack(parts, [[1] * world_size, *per_table.T.tolist()])
            if any(table.strategy != "all_to_all" for table in tables):
                facts = _compare(tables, prepared, asked)
        except Exception as raised:
            error = raised
    agreed = exchange.agree(plan, splits, error, facts)
    # Every rank sees the same numbers, so all take the same way.
    by_keys, by_bags = (sum(fact[i] for fact in agreed.facts) for i in (0, 1))
    if by_bags < by_keys:
        sizes = [fact[2] for fact in agreed.facts]
        try:
            whole = payload(tables, prepared)
            send, splits = torch.cat([whole] * world_size), [len(whole)] * world_size
        except BaseException as raised:  # the others are already waiting for it
            exchange.abandon(raised)
            raise
    else:
        sizes = agreed.sizes
    received = exchange.begin_all_to_all(send, splits, sizes)
    return SentKeys(
        tables, prepared, exchange, asked, per_table, sizes, received, plan, by_bags < by_keys
    )


# More bytes than anything could move.
_NEVER = 1 << 50


def _compare(
    tables: Sequence[ShardedTable], prepared: Sequence[Prepared], asked: Sequence[_Asked]
) -> tuple[int, int, int]:
    """Bytes of the two ways, by keys and by bags; and what would be sent to each rank by bags.

    Forward and backward move the same numbers of vectors, so one of them is counted.
    """
    possible = all(
        p.bags is not None
        and table.strategy != "all_to_all"
        and not (
            torch.is_grad_enabled() and p.bags.weights is not None and p.bags.weights.requires_grad
        )
        for table, p in zip(tables, prepared, strict=True)
    )
    forced = any(table.strategy == "reduce_scatter" for table in tables)
    if not possible:
        if forced:
            raise ValueError(
                f"{tables[0].name}: strategy='reduce_scatter' pools on other ranks, which goes "
                f"neither with sample_weights that need a gradient nor in a group with layers that "
                f"do not pool or have strategy='all_to_all'"
            )
        return 0, _NEVER, 0
    whole = payload_bytes(tables, prepared)
    others = tables[0].world_size - 1
    by_keys = by_bags = 0
    for table, p, a in zip(tables, prepared, asked, strict=True):
        row = table.embedding_vec_size * table.weight.element_size()
        sums = table.embedding_vec_size * (8 if table.weight.dtype == torch.float64 else 4)
        by_keys += len(a.keys) * (8 + row) * others // (others + 1)
        by_bags += (len(cast(Bags, p.bags).offsets) - 1) * sums * others
    by_bags = 0 if forced else by_bags + whole * others
    by_keys = max(by_keys, 1) if forced else by_keys
    return by_keys, by_bags, whole


def _counts_of(received: torch.Tensor, sizes: Sequence[int], num_tables: int) -> list[list[int]]:
    """For each table, the keys from each rank, out of what stands in front of each rank's part."""
    begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
    heads = [received[begin : begin + 8 * num_tables] for begin in begins]
    counts = torch.cat(heads).view(torch.int64).view(len(sizes), num_tables)
    return counts.T.tolist()


@dataclass
class _Job:
    """What forward and backward of one exchange share."""

    exchange: Exchange
    tables: Sequence[ShardedTable]
    owned: list[_Owned]
    counts: list[list[int]]  # for each table, the keys that this rank asked each rank for
    plan: str
    error: Exception | None


class _Vectors(torch.autograd.Function):
    """Vectors of the keys that this rank has asked for, of all tables."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.job = job
        exchange, error = job.exchange, job.error
        send, splits = torch.empty(0, dtype=torch.uint8), [0] * exchange.world_size
        if error is None:
            try:
                jobs = zip(job.tables, job.owned, weights, strict=True)
                found = [_gather(table, owned, weight) for table, owned, weight in jobs]
                send, splits = pack(found, [o.counts for o in job.owned])
            except Exception as raised:
                error = raised
        agreed = exchange.agree(f"vectors: {job.plan}", splits, error)
        received = exchange.all_to_all(send, splits, agreed.sizes)
        return tuple(unpack(received, weights, job.counts))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: _Job = ctx.job
        exchange = job.exchange
        error: Exception | None = None
        send, splits = torch.empty(0, dtype=torch.uint8), [0] * exchange.world_size
        try:
            send, splits = pack([grad.contiguous() for grad in grads], job.counts)
        except Exception as raised:
            error = raised
        with exchange.lock:
            agreed = exchange.agree(f"gradients: {job.plan}", splits, error)
            with exchange.alone():
                received = exchange.all_to_all(send, splits, agreed.sizes)
                parts = unpack(received, grads, [o.counts for o in job.owned])
                return None, *(
                    deliver_gradient(
                        table.weight, owned.rows, _sum(part, owned, table), owned.some_missing
                    )
                    for table, owned, part in zip(job.tables, job.owned, parts, strict=True)
                )


def _gather(table: ShardedTable, owned: _Owned, weight: torch.Tensor) -> torch.Tensor:
    vectors, owned.some_missing = table.read(weight, owned.keys, owned.rows)
    return ops.gather_rows(vectors, owned.inverse)


def _sum(part: torch.Tensor, owned: _Owned, table: ShardedTable) -> torch.Tensor:
    total = ops.unsorted_segment_sum(part, owned.inverse, len(owned.rows))
    # The scale of DDP, whose gradients are means over ranks.
    return total / len(owned.counts) if table.gradient_reduction == "mean" else total
