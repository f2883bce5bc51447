"""Handles lookups where some requests insert keys into a table, and others only read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tables.embedding_table import EmbeddingTable
from .make_room import inserted_keys
from .plan import TableBatch
from .request import Request, one_by_one
from .sweep import Asked


def asked_of(table: EmbeddingTable, requests: Sequence[Request], reads: Sequence[bool]) -> Asked:
    """Return the keys that a lookup's requests look up in a table.

    Args:
        table: the table.
        requests: the requests of the lookup.
        reads: for each request, whether it is read-only; empty if none is.
    """
    keys = [inserted_keys(request) for request in requests if request.table is table]
    if not reads:
        return Asked(_joined(keys))
    own = [read for r, read in zip(requests, reads, strict=True) if r.table is table]
    occurrences = [torch.full_like(k, not read) for k, read in zip(keys, own, strict=True)]
    return Asked(_joined(keys), _joined(occurrences))


def insertions(
    first: TableBatch,
    requests: Sequence[Request],
    reads: Sequence[bool],
    occurrences: torch.Tensor | None,
) -> tuple[list[Request], torch.Tensor | None]:
    """Return a request for each table in `first`, with the keys that a lookup inserts into it.

    Args:
        first: see `TableBatch`.
        requests: the requests of the lookup; or, if `occurrences` are given, one for each table.
        reads: `TableBatch.reads` of the lookup.
        occurrences: for each key in these requests, how often it is inserted.

    Returns:
        The requests, and how often each of their keys is inserted; None if each counts once.
    """
    tables = first.tables
    if occurrences is None:
        own = [request for request, read in zip(requests, reads, strict=True) if not read]
        return [one_by_one(table, asked_of(table, own, ()).keys) for table in tables], None
    sizes = [len(request.keys) for request in requests]
    each = zip(requests, occurrences[: sum(sizes)].split(sizes), strict=True)
    times = {request.table: (request.keys, of_table) for request, of_table in each}
    made, counts = [], []
    for table in tables:
        keys, of_table = times[table]
        places = of_table.nonzero().squeeze(1)
        made.append(one_by_one(table, keys[places]))
        counts.append(of_table[places])
    return made, torch.cat(counts)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
