"""Rows of tables on their way from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..distributed.exchange import Exchange
from ..distributed.wire import Layout, Parts
from .plan import LookupPlan, TableBatch

# Writes rows: to memory for those of each of `LookupPlan.batches`, of their dtype, given where each
# rank's part begins in all of these.
Write = Callable[[list[torch.Tensor], Sequence[int]], None]


def exchange_rows(
    exchange: Exchange, what: str, plan: LookupPlan, write: Write, sent: Layout, come: Layout
) -> tuple[list[torch.Tensor], list[int]]:
    """Send rows of all tables to the ranks, and wait for theirs.

    Where tables have another dtype on the wire than in memory, rows are converted; but those of
    this rank's own part, which are only handed over.

    Args:
        exchange: the way.
        what: these rows are, the same on all ranks.
        plan: of their tables.
        write: writes them.
        sent: how many for each rank.
        come: how many from each rank.

    Returns:
        What has come, as write was given it.

    Raises:
        What write raises on any rank, on all of them; and as `Exchange.send`.
    """
    memory: list[torch.Tensor] = []
    others = [rank for rank in range(exchange.world_size) if rank != exchange.rank]

    def write_parts(parts: Parts) -> None:
        memory.extend(_memory(batch, parts.data) for batch in plan.batches)
        write(memory, parts.begins)
        for wire, own in _pieces(plan, memory, parts, sent, others):
            wire.copy_(own)

    parts = exchange.send(what, write_parts, sent.sizes, come.sizes)()
    for wire, own in _pieces(plan, memory, parts, come, others):
        own.copy_(wire)
    return memory, parts.begins


def _memory(batch: TableBatch, data: torch.Tensor) -> torch.Tensor:
    """For rows as the ops take them: that of the parts, or else as many elements as these have."""
    if batch.wire_dtype == batch.dtype:
        return data.view(batch.dtype)
    elements = data.nbytes // batch.wire_dtype.itemsize
    return torch.empty(elements, dtype=batch.dtype, device=data.device)


def _pieces(
    plan: LookupPlan,
    memory: Sequence[torch.Tensor],
    parts: Parts,
    layout: Layout,
    others: Sequence[int],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is to be converted: elements of the parts, and those that stand for them in memory."""
    pieces = []
    for batch, columns, own in zip(plan.batches, plan.columns, memory, strict=True):
        if batch.wire_dtype == batch.dtype:
            continue
        wire = parts.data.view(batch.wire_dtype)
        ranges = layout.ranges(parts.begins, columns)
        for rank in others:
            piece = slice(*(byte // batch.wire_dtype.itemsize for byte in ranges[rank]))
            pieces.append((wire[piece], own[piece]))
    return pieces
