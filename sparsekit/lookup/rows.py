"""Sends table rows from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..distributed.exchange import Exchange
from ..distributed.wire import Layout, Parts
from .plan import LookupPlan, TableBatch

# A buffer for each of `LookupPlan.batches`, with rows in the batch's dtype, and the byte offset of
# each rank's part, which is the same in all buffers.
Rows = tuple[list[torch.Tensor], list[int]]
Written = TypeVar("Written")


def exchange_rows(
    exchange: Exchange,
    what: str,
    plan: LookupPlan,
    write: Callable[[list[torch.Tensor], list[int]], Written] | Exception,
    sent: Layout,
    come: Layout,
) -> tuple[Rows, Written]:
    """Send rows of all tables to all ranks, and wait for the rows from all ranks.

    If the wire dtype differs from the dtype in memory, rows are converted, except the rows in this
    rank's own part, since these are not sent.

    Args:
        exchange: the ranks' exchange.
        what: description of these rows, which must be the same on all ranks.
        plan: the plan of the tables.
        write: writes rows to the buffers; or an error to raise on all ranks.
        sent: layout of the rows to send to each rank.
        come: layout of the rows to receive from each rank.

    Returns:
        The received rows, and the result of `write`.

    Raises:
        An error from `write` is raised on all ranks; `Exchange.send` lists further errors.
    """
    memory: list[torch.Tensor] = []
    results: list[Written] = []
    others = [rank for rank in range(exchange.world_size) if rank != exchange.rank]

    def write_parts(parts: Parts) -> None:
        if isinstance(write, Exception):
            raise write
        memory.extend(_memory(batch, parts.data) for batch in plan.batches)
        results.append(write(memory, parts.begins))
        for wire, own in _pieces(plan, memory, parts, sent, others):
            wire.copy_(own)

    parts = exchange.send(what, write_parts, sent.sizes, come.sizes, late=True)()
    for wire, own in _pieces(plan, memory, parts, come, others):
        own.copy_(wire)
    return (memory, parts.begins), results[0]


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
    """Return pairs of slices, one of `parts` and one of `memory`, with the same rows."""
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
