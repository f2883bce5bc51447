"""Passes the keys looked up in training to functions that watch a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..tables.embedding_table import EmbeddingTable
from .reading import asked_of
from .request import Request

# Functions to call with the keys of each lookup in a table.
watched: dict[EmbeddingTable, Callable[[torch.Tensor], Any]] = {}


def tell(
    tables: Sequence[EmbeddingTable], requests: Sequence[Request], reads: Sequence[bool]
) -> None:
    """Call the functions that watch a lookup's tables, before the lookup changes any table.

    Args:
        tables: the table of each request.
        requests: the requests.
        reads: for each request, whether it is read-only; empty if none is.
    """
    for table in dict.fromkeys(tables):
        if table.inserts and table in watched:
            keys, occurrences, *_ = asked_of(table, list(requests), reads)
            watched[table](keys if occurrences is None else keys[occurrences > 0])
