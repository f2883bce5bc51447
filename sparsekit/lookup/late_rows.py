"""Applies optimizer steps that rows have missed, before the rows are read or get new keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import ops
from ..tables.embedding_table import EmbeddingTable
from .max_norm import limit_norms
from .plan import TableBatch
from .record import entries_of_tables
from .request import Request


def catch_up_free_rows(
    late: Mapping[int, Any], tables: Sequence[EmbeddingTable], requests: Sequence[Request]
) -> None:
    """Apply missed optimizer steps to the free rows that new keys may get.

    An optimizer may move a row that has no key yet. Steps that the row missed must not later change
    the vector of its new key.

    Args:
        late: weights whose rows may have missed steps, by table.
        tables: all tables of the lookup.
        requests: the lookup's requests.
    """
    for t, weight in late.items():
        table = tables[t]
        if table.table is None:
            continue
        size = len(table.table)
        keys = sum(len(request.keys) for request in requests if request.table is table)
        end = min(size + keys, table.table.reach)
        weight.catch_up(torch.arange(size, end, device=weight.device))


def prepare_rows(
    batch: TableBatch,
    weights: Sequence[torch.Tensor],
    found: Sequence[Any],
    features: torch.Tensor,
    late: Mapping[int, Any],
) -> None:
    """Prefetch the rows about to be read, apply steps that they have missed, and limit their norms.

    Args:
        batch: the tables of the lookup.
        weights: the tables' weights.
        found: the lookup's results: index, rows, counts and bags.
        features: the lookup's features, in the form that ops take.
        late: weights whose rows may have missed steps, by table.
    """
    index, rows_of_all, counts, bags = found
    entries = entries_of_tables(bags, features, len(weights))
    numbers = None if counts is None else counts.tolist()
    for t in {**batch.files, **late, **batch.max_norms}:
        own = entries[t]
        rows, distinct = index[own], False
        if numbers is not None and rows_of_all is not None:
            rows, distinct = rows_of_all[own.start : own.start + numbers[t]], True
        if t in batch.files:  # prefetch all rows at once rather than one by one
            batch.files[t].ask_for(rows)
        if not distinct and (t in late or t in batch.max_norms):
            rows = ops.unique(rows)[0]
        if t in late:
            late[t].catch_up(rows.to(torch.int64))
        if t in batch.max_norms:
            limit_norms(weights[t], rows, *batch.max_norms[t])
