"""Explains why an op refused its input, in terms of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from .. import ops
from ..errors import TableFullError
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from .request import Request


def explain(requests: Sequence[Request]) -> None:
    """Raise the error for the first invalid request; return if all requests are valid."""
    for request in requests:
        request.check()


def explain_refusal(
    refusal: Exception, requests: Sequence[Request], tables: Sequence[EmbeddingTable]
) -> NoReturn:
    """Raise an error that explains why an op that finds or inserts keys refused its input."""
    explain(requests)
    if isinstance(refusal, TableFullError):  # raised by a report, with a clear message
        raise refusal
    if isinstance(refusal, RuntimeError):
        if "another thread" in str(refusal):
            names = ", ".join(table.name for table in tables)
            raise RuntimeError(f"{names}: {refusal}") from None
        for table in tables:
            _refuse_if_full(table, requests)
    raise refusal


def new_keys(table: EmbeddingTable, index: HashTable, requests: Sequence[Request]) -> torch.Tensor:
    """Return the distinct int64 keys in requests for a table that are not in its hash table."""
    keys = torch.cat([r.keys.to(torch.int64) for r in requests if r.table is table])
    return ops.unique(keys[index.find(keys) < 0])[0]


def _refuse_if_full(table: EmbeddingTable, requests: Sequence[Request]) -> None:
    if table.table is None:
        return
    new, size = new_keys(table, table.table, requests), len(table.table)
    if size + len(new) > table.capacity:
        raise TableFullError(table.name, table.rank, size, table.capacity, len(new)) from None
