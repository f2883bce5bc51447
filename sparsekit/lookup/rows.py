"""Sends rows of tables from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..distributed.exchange import Exchange
from ..distributed.wire import Layout, Parts
from .plan import LookupPlan, TableBatch

# Takes a buffer for each of `LookupPlan.batches` and the byte offset of each rank's part, and
# writes rows to the buffers, in the dtype of each batch. Offsets are the same in all buffers.
Write = Callable[[list[torch.Tensor], Sequence[int]], None]


def exchange_rows(
    exchange: Exchange, what: str, plan: LookupPlan, write: Write, sent: Layout, come: Layout
) -> tuple[list[torch.Tensor], list[int]]:
    """Send rows of all tables to all ranks, and wait for the rows from all ranks.

    If the wire dtype differs from the dtype in memory, rows are converted, except the rows in this
    rank's own part, since these are not sent.

    Args:
        exchange: the exchange of the ranks.
        what: description of these rows, which must be the same on all ranks.
        plan: the plan of their tables.
        write: writes the rows.
        sent: layout of the rows to send to each rank.
        come: layout of the rows to receive from each rank.

    Returns:
        The received rows, in the form that `write` takes: a buffer for each batch, and the offsets
        of the parts.

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
    """Return a buffer for rows in the batch's dtype: `data` itself if that is the wire dtype."""
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
    """Return pairs of slices to convert between: one of `parts`, one of `memory`."""
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
