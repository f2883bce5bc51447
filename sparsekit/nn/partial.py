"""The other way to look bags up: every rank gets all keys and pools those that it owns.

SOK's way. All ranks send their keys to all; each adds up, for every bag of every rank, the vectors
of the keys that it owns, and sends each rank the sums of its bags, which that rank adds up and
divides. What moves does not depend on how many keys a bag has, except for the keys themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from .. import ops
from ..distributed.exchange import Exchange, pack, padded, unpack
from ..ops._checks import accumulate_dtype
from ..ops.embedding_bag import COMBINERS
from .inputs import _offsets_of
from .shard import Bags, Prepared, ShardedTable, deliver_gradient

# Bags, keys, and whether there are weights, of a table.
_HEAD_BYTES = 24


def payload_bytes(tables: Sequence[ShardedTable], prepared: Sequence[Prepared]) -> int:
    """Length of `payload`, without making it."""
    sizes = [_HEAD_BYTES * len(tables)]
    for table, p in zip(tables, prepared, strict=True):
        sizes += [8 * (len(_bags(p).offsets) - 1), 8 * len(p.keys)]
        if _bags(p).weights is not None:
            sizes.append(accumulate_dtype(table.weight.dtype).itemsize * len(p.keys))
    return sum(map(padded, sizes))


def payload(tables: Sequence[ShardedTable], prepared: Sequence[Prepared]) -> torch.Tensor:
    """Bytes that tell another rank all keys, bags and weights of this one."""
    parts, counts = [], []
    sizes = torch.tensor(
        [
            [len(_bags(p).offsets) - 1, len(p.keys), int(_bags(p).weights is not None)]
            for p in prepared
        ]
    )
    for part in (sizes.to(tables[0].weight.device), *_parts(tables, prepared)):
        parts.append(part)
        counts.append([len(part)])
    return pack(parts, counts)[0]


def _bags(prepared: Prepared) -> Bags:
    return cast(Bags, prepared.bags)


def _parts(tables: Sequence[ShardedTable], prepared: Sequence[Prepared]) -> list[torch.Tensor]:
    """For each table the keys in each bag, the keys, and their weights if it has any."""
    parts = []
    for table, p in zip(tables, prepared, strict=True):
        bags = _bags(p)
        parts += [bags.offsets.diff(), p.keys.to(torch.int64)]
        if bags.weights is not None:
            parts.append(bags.weights.detach().to(accumulate_dtype(table.weight.dtype)))
    return parts


@dataclass
class _Pooled:
    """What this rank adds up for all ranks, of one table."""

    bags: list[int]  # of each rank
    rows: torch.Tensor  # [u] of the distinct keys that this rank owns, rising
    keys: torch.Tensor  # [u]
    positions: torch.Tensor  # [m] which of them each entry is
    offsets: torch.Tensor  # [all bags + 1] over the entries
    weights: torch.Tensor | None  # [m]
    some_missing: bool = False  # whether there are rows of -1


def _owned_by(keys: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Which keys the rank owns. torch's remainder is of the signed key, 2^64 less if negative."""
    return (keys % world_size + (keys < 0) * (2**64 % world_size)) % world_size == rank


def _pool(
    table: ShardedTable,
    lengths: Sequence[torch.Tensor],
    keys: torch.Tensor,
    weights: torch.Tensor | None,
) -> _Pooled:
    mine = _owned_by(keys, table.rank, table.world_size)
    before = _offsets_of(mine.to(torch.int64))
    offsets = before[_offsets_of(torch.cat(list(lengths)))]
    rows, distinct, inverse = table.distinct_rows(keys[mine])
    return _Pooled(
        [len(length) for length in lengths],
        rows,
        distinct,
        inverse,
        offsets,
        None if weights is None else weights[mine],
    )


def pooled_outputs(
    exchange: Exchange,
    tables: Sequence[ShardedTable],
    prepared: Sequence[Prepared],
    received: torch.Tensor,
    sizes: Sequence[int],
    plan: str,
    error: Exception | None,
) -> list[torch.Tensor]:
    """Outputs of the layers, out of the payloads of all ranks."""
    pooled: list[_Pooled] = []
    if error is None:
        try:
            pooled = _pool_all(tables, received, sizes)
        except Exception as raised:  # a full table, for one
            error = raised
    for table in tables:
        table._watch_gradient()
    own = [len(_bags(p).offsets) - 1 for p in prepared]
    job = _Job(exchange, tables, pooled, own, plan, error)
    sums = _Sums.apply(job, *(table.weight for table in tables))
    return [
        _bags(p).shape(_divided(total, _bags(p)).to(table.weight.dtype))
        for table, p, total in zip(tables, prepared, sums, strict=True)
    ]


def _pool_all(
    tables: Sequence[ShardedTable],
    received: torch.Tensor,
    sizes: Sequence[int],
) -> list[_Pooled]:
    device = received.device
    words = torch.empty(0, dtype=torch.int64, device=device)
    # For each table and rank. A rank may have weights where others have none.
    lengths: list[list[torch.Tensor]] = [[] for _ in tables]
    keys: list[list[torch.Tensor]] = [[] for _ in tables]
    weights: list[list[torch.Tensor | None]] = [[] for _ in tables]
    for part in received.split(list(sizes)):
        head = part[: _HEAD_BYTES * len(tables)].view(torch.int64).view(-1, 3)
        like, counts = [head], [[len(tables)]]
        for table, (num_bags, num_keys, weighted) in zip(tables, head.tolist(), strict=True):
            like += [words, words]
            counts += [[num_bags], [num_keys]]
            if weighted:
                like.append(words.new_empty(0, dtype=accumulate_dtype(table.weight.dtype)))
                counts.append([num_keys])
        arrays = iter(unpack(part, like, counts)[1:])
        for i, (_, _, weighted) in enumerate(head.tolist()):
            lengths[i].append(next(arrays))
            keys[i].append(next(arrays))
            weights[i].append(next(arrays) if weighted else None)
    pooled = []
    for i, table in enumerate(tables):
        dtype = accumulate_dtype(table.weight.dtype)
        filled = [
            torch.ones(len(k), dtype=dtype, device=device) if w is None else w
            for w, k in zip(weights[i], keys[i], strict=True)
        ]
        unweighted = all(w is None for w in weights[i])
        pooled.append(
            _pool(table, lengths[i], torch.cat(keys[i]), None if unweighted else torch.cat(filled))
        )
    return pooled


def _divided(total: torch.Tensor, bags: Bags) -> torch.Tensor:
    """Sums to the combiner's result; a divisor of zero gives zeros."""
    if bags.combiner == "sum":
        return total
    counts = bags.offsets.diff()
    if bags.weights is None:
        divisor = counts.to(total.dtype)
    else:
        bag = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        w = bags.weights.detach().to(total.dtype)
        w = w if bags.combiner == "mean" else w * w
        divisor = ops.unsorted_segment_sum(w.unsqueeze(1), bag, len(counts)).squeeze(1)
    zero = divisor == 0
    divisor = divisor.masked_fill(zero, 1)
    divisor = divisor.sqrt() if bags.combiner == "sqrtn" else divisor
    return (total / divisor.unsqueeze(1)).masked_fill(zero.unsqueeze(1), 0)


@dataclass
class _Job:
    """What forward and backward of one exchange share."""

    exchange: Exchange
    tables: Sequence[ShardedTable]
    pooled: list[_Pooled]
    own: list[int]  # bags of this rank, for each table
    plan: str
    error: Exception | None


class _Sums(torch.autograd.Function):
    """Sums of this rank's bags over the keys of all ranks, in the accumulation dtype."""

    @staticmethod
    def forward(ctx: Any, job: _Job, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.job = job
        world_size = job.exchange.world_size
        like = [w.new_empty(0, w.shape[1], dtype=accumulate_dtype(w.dtype)) for w in weights]

        def send() -> tuple[torch.Tensor, list[int]]:
            each = zip(job.tables, job.pooled, weights, strict=True)
            parts = [_partial_sums(table, pooled, weight) for table, pooled, weight in each]
            return pack(parts, [pooled.bags for pooled in job.pooled])

        with job.exchange.lock:
            received = job.exchange.all_to_all(*_agreed(job, "sums", send))
        parts = unpack(received, like, [[count] * world_size for count in job.own])
        return tuple(
            part.view(world_size, own, part.shape[1]).sum(0)
            for part, own in zip(parts, job.own, strict=True)
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: _Job = ctx.job
        world_size = job.exchange.world_size

        def send() -> tuple[torch.Tensor, list[int]]:
            one = pack([grad.contiguous() for grad in grads], [[count] for count in job.own])[0]
            return torch.cat([one] * world_size), [len(one)] * world_size

        with job.exchange.lock:
            agreed = _agreed(job, "gradients", send)
            with job.exchange.alone():
                received = job.exchange.all_to_all(*agreed)
                parts = unpack(received, grads, [pooled.bags for pooled in job.pooled])
                return None, *(
                    _gradient(table, pooled, part)
                    for table, pooled, part in zip(job.tables, job.pooled, parts, strict=True)
                )


def _agreed(
    job: _Job, what: str, send: Callable[[], tuple[torch.Tensor, list[int]]]
) -> tuple[torch.Tensor, list[int], list[int]]:
    """What to send, its sizes, and those of what comes, once all ranks agree."""
    data, splits = torch.empty(0, dtype=torch.uint8), [0] * job.exchange.world_size
    error = job.error
    if error is None:
        try:
            data, splits = send()
        except Exception as raised:
            error = raised
    return data, splits, job.exchange.agree(f"{what}: {job.plan}", splits, error).sizes


def _partial_sums(table: ShardedTable, pooled: _Pooled, weight: torch.Tensor) -> torch.Tensor:
    vectors, pooled.some_missing = table.read(weight, pooled.keys, pooled.rows)
    vectors = vectors.to(accumulate_dtype(weight.dtype))
    return ops.embedding_bag(vectors, pooled.positions, pooled.offsets, "sum", pooled.weights)


def _gradient(table: ShardedTable, pooled: _Pooled, part: torch.Tensor) -> torch.Tensor | None:
    grad = torch.ops.sparsekit.embedding_bag_backward.default(
        part,
        pooled.positions,
        pooled.offsets,
        COMBINERS["sum"],
        pooled.weights,
        len(pooled.rows),
        torch.are_deterministic_algorithms_enabled(),
    )
    if table.gradient_reduction == "mean":
        grad = grad / table.world_size
    grad = grad.to(table.weight.dtype)
    return deliver_gradient(table.weight, pooled.rows, grad, pooled.some_missing)
