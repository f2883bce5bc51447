"""Finds which of a lookup's tables have scores, and which may have to make room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..tables.embedding_table import EmbeddingTable
from ..tables.life import RowLife
from ..tables.scores import UserScore


class Scored:
    """The tables with scores in one call to an op.

    Attributes:
        lives: index and `RowLife` of each of these tables.
        touched: the same, for the tables whose scores the lookup writes (in training).
        counted: indices of the tables whose scores count how often a key occurs.
        by_user: indices of the tables whose scores come from the user.
        swept: indices of the tables that may have to make room before keys are inserted.
        policies: int64 ``[T, 2]``, the argument ``policies`` of `group_touch_`.
    """

    def __init__(self, lives: Sequence[tuple[int, RowLife]], inserts: Sequence[bool]) -> None:
        self.lives = lives
        self.touched = [(t, life) for t, life in lives if inserts[t]]
        self.swept = [t for t, life in self.touched if life.sweeps]
        self.counted = [t for t, life in self.touched if life.counts_touches]
        self.by_user = [t for t, life in self.touched if isinstance(life.score, UserScore)]
        self.policies = torch.zeros(len(inserts), 2, dtype=torch.int64, device="cpu")
        for t, life in self.touched:
            self.policies[t] = torch.tensor([life.score.kind, life.score.halve_every], device="cpu")

    def count(self, looked_up: Sequence[int], new: Mapping[int, int]) -> None:
        """Update the tables' counters after a lookup.

        Args:
            looked_up: for each table of the call, the number of distinct keys that have rows.
            new: how many of these keys were given their rows by this lookup, by table; 0 for tables
                not listed.
        """
        for t, life in self.touched:
            life.looked_up += looked_up[t]
            life.new += new.get(t, 0)

    def clocks(self, buffers: Sequence[Any]) -> list[tuple[RowLife, torch.Tensor]]:
        """Return the `RowLife` and the clock of each touched table, given all tables' `buffers`."""
        return [(life, buffers[t]["clock"]) for t, life in self.touched]

    def of_all(self, numbers: Sequence[int]) -> list[int]:
        """Expand numbers for the touched tables to all tables, with zeros for the others."""
        every = [0] * len(self.policies)
        for (t, _), number in zip(self.touched, numbers, strict=True):
            every[t] = number
        return every

    def lists(self, buffers: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the arguments ``scores`` and ``clocks`` of `group_touch_`."""
        pairs = [_no_words(buffers[0]["seed"].device)] * len(buffers)
        for t, _ in self.touched:
            pairs[t] = buffers[t]["scores"], buffers[t]["clock"]
        return [scores for scores, _ in pairs], [clock for _, clock in pairs]


def tables_at(batch: Any, indices: Sequence[int]) -> list[EmbeddingTable]:
    """Return the tables of a `TableBatch` with these indices."""
    tables = batch.tables  # read once, since each read makes a list
    return [tables[t] for t in indices]


def tables_by_user(batches: Sequence[Any]) -> list[EmbeddingTable]:
    """Return the tables in `LookupPlan.batches` whose scores come from the user."""
    each = [batch for batch in batches if batch.scored is not None]
    return [table for batch in each for table in tables_at(batch, batch.scored.by_user)]


def scored_of(
    tables: Sequence[EmbeddingTable], inserts: bool, writing: Sequence[EmbeddingTable]
) -> Scored | None:
    """Return the `Scored` of a call's tables; None if no table has scores.

    Args:
        tables: the tables in a call.
        inserts: whether the call gives rows to all new keys, even in evaluation.
        writing: the tables with requests that may insert keys and write scores.
    """
    lives = [(t, table.life) for t, table in enumerate(tables) if table.life is not None]
    touched = [(inserts or table.inserts) and table in writing for table in tables] if lives else []
    return Scored(lives, touched) if lives else None


@lru_cache(maxsize=64)
def _no_words(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return placeholders for the scores and the clock of a table without scores."""
    words = torch.zeros(1, dtype=torch.int64, device=device)
    return words[:0], words
