"""Asks for the rows of a lookup whose tables keep them in files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .plan import LookupPlan, TableBatch
from .record import entries_of_tables
from .request import Request


def ask_for_rows(batch: TableBatch, found: Sequence[Any], features: torch.Tensor) -> None:
    """Ask for the rows that a lookup is about to read, all at once rather than one by one.

    Args:
        batch: the tables of the lookup.
        found: its results: index, rows, counts and bags.
        features: its features, as ops describe them.
    """
    index, rows_of_all, counts, bags = found
    entries = entries_of_tables(bags, features, len(batch.dims))
    numbers = None if counts is None else counts.tolist()
    for t, files in batch.files.items():
        own = entries[t]
        if numbers is None or rows_of_all is None:
            files.ask_for(index[own])
        else:
            files.ask_for(rows_of_all[own.start : own.start + numbers[t]])


def ask_ahead(plan: LookupPlan, requests: Sequence[Request]) -> None:
    """Ask for the rows of a batch to come, as far as its keys have rows; check nothing."""
    for batch in plan.batches:
        tables = batch.tables
        for i, t in zip(batch.positions, batch.table_of_request, strict=True):
            if t not in batch.files:
                continue
            keys, table = requests[i].keys, tables[t]
            if table.table is not None:
                keys = table.table.find(keys)
            batch.files[t].ask_for(keys[(keys >= 0) & (keys < table.capacity)])
