"""Rows of tables on their way from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...distributed.exchange import Exchange, Parts
from .layout import Layout
from .tables import Alike, Tables

# Writes rows: to memory for those of each of `Tables.alike`, of their dtype, given where each
# rank's part begins in all of these.
Write = Callable[[list[torch.Tensor], Sequence[int]], None]


def exchange_rows(
    exchange: Exchange, what: str, tables: Tables, write: Write, sent: Layout, come: Layout
) -> tuple[list[torch.Tensor], list[int]]:
    """Send rows of all tables to the ranks, and wait for theirs.

    Where tables have another dtype on the wire than in memory, rows are converted; but those of
    this rank's own part, which are only handed over.

    Args:
        exchange: the way.
        what: these rows are, the same on all ranks.
        tables: whose they are.
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
        memory.extend(_memory(alike, parts.data) for alike in tables.alike)
        write(memory, parts.begins)
        for wire, own in _pieces(tables, memory, parts, sent, others):
            wire.copy_(own)

    parts = exchange.send(what, write_parts, sent.sizes, come.sizes)()
    for wire, own in _pieces(tables, memory, parts, come, others):
        own.copy_(wire)
    return memory, parts.begins


def _memory(alike: Alike, data: torch.Tensor) -> torch.Tensor:
    """For rows as the ops take them: that of the parts, or else as many elements as these have."""
    if alike.wire_dtype == alike.dtype:
        return data.view(alike.dtype)
    elements = data.nbytes // alike.wire_dtype.itemsize
    return torch.empty(elements, dtype=alike.dtype, device=data.device)


def _pieces(
    tables: Tables,
    memory: Sequence[torch.Tensor],
    parts: Parts,
    layout: Layout,
    others: Sequence[int],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is to be converted: elements of the parts, and those that stand for them in memory."""
    pieces = []
    for alike, columns, own in zip(tables.alike, tables.columns, memory, strict=True):
        if alike.wire_dtype == alike.dtype:
            continue
        wire = parts.data.view(alike.wire_dtype)
        for rank in others:
            begin, end = layout.range_of(rank, columns)
            first = (parts.begins[rank] + begin) // alike.wire_dtype.itemsize
            piece = slice(first, first + (end - begin) // alike.wire_dtype.itemsize)
            pieces.append((wire[piece], own[piece]))
    return pieces
