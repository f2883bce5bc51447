"""Applies the optimizer steps that free rows have missed, before new keys get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..tables.embedding_table import EmbeddingTable
from .request import Request


def catch_up_free_rows(
    late: Mapping[int, Any], tables: Sequence[EmbeddingTable], requests: Sequence[Request]
) -> None:
    """Apply missed optimizer steps to the free rows that new keys may get.

    An optimizer may move a row that has no key yet. Steps that the row missed must not change the
    vector of its new key later.

    Args:
        late: weights whose rows may have missed steps, by table.
        tables: all tables of the lookup.
        requests: its requests.
    """
    for t, weight in late.items():
        table = tables[t]
        if table.table is None:
            continue
        size = len(table.table)
        keys = sum(len(request.keys) for request in requests if request.table is table)
        end = min(size + keys, table.capacity)
        weight.catch_up(torch.arange(size, end, device=weight.device))
