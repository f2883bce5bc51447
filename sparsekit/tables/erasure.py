"""Finds what changes when a hash table loses keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .hash_table import HashTable


class Erasure(NamedTuple):
    """A change of a table that loses keys: its last rows take the places of the erased ones.

    Attributes:
        rows: int64 ``[k]``, rows of the erased keys, in ascending order.
        left: number of rows in use afterwards.
        places, sources: int64 ``[m]``; the keys of the rows `sources` move to the rows `places`.
        buffers: the table's buffers afterwards, by name.
    """

    rows: torch.Tensor
    left: int
    places: torch.Tensor
    sources: torch.Tensor
    buffers: dict[str, torch.Tensor]


def erasure_of(table: HashTable, keys: torch.Tensor) -> Erasure:
    """Return what changes if a table loses these keys, int64 ``[n]``; change nothing."""
    rows = table.find(keys).unique()
    rows = rows[rows >= 0]
    left = len(table) - len(rows)
    of_rows = table.keys()
    kept = torch.ones_like(of_rows, dtype=torch.bool)
    kept[rows] = False
    places, sources = rows[rows < left], kept[left:].nonzero().squeeze(1) + left
    of_rows[places] = of_rows[sources]
    buffers = table.buffers_of(of_rows[:left], table.tensors()[1])
    return Erasure(rows, left, places, sources, buffers)
