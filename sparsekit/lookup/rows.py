"""Sends rows of tables from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..distributed.exchange import Exchange
from ..distributed.wire import Layout, Parts
from .plan import LookupPlan, TableBatch

# Writes rows to memory for each of `LookupPlan.batches`, in the dtype of the batch, given the byte
# at which each rank's part begins in all of these.
Write = Callable[[list[torch.Tensor], Sequence[int]], None]


def exchange_rows(
    exchange: Exchange, what: str, plan: LookupPlan, write: Write, sent: Layout, come: Layout
) -> tuple[list[torch.Tensor], list[int]]:
    """Send rows of all tables to the ranks, and wait for the rows from them.

    If tables have another dtype on the wire than in memory, rows are converted, except those of
    this rank's own part, which stay in memory.

    Args:
        exchange: the exchange of the ranks.
        what: description of these rows, which must be the same on all ranks.
        plan: the plan of their tables.
        write: writes the rows.
        sent: places of the rows for each rank.
        come: places of the rows from each rank.

    Returns:
        The rows that have come, in the form that write gets: memory, and where parts begin.

    Raises:
        An error of write on any rank is raised on all; `Exchange.send` lists further errors.
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
    """Return memory for rows as the ops take them: that of the parts, or new memory."""
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
    """List the elements to convert: each piece in the parts, and its counterpart in memory."""
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
