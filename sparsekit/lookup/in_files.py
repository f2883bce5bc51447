"""Prefetches rows of tables that are stored in files."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import LookupPlan
from .request import Request


def ask_ahead(plan: LookupPlan, requests: Sequence[Request]) -> None:
    """Prefetch the rows of the keys in an upcoming batch, without checking the keys."""
    for batch in plan.batches:
        tables = batch.tables
        for i, t in zip(batch.positions, batch.table_of_request, strict=True):
            if t not in batch.files:
                continue
            keys, table = requests[i].keys, tables[t]
            if table.table is not None:
                keys = table.table.find(keys)
            batch.files[t].ask_for(keys[(keys >= 0) & (keys < table.capacity)])
