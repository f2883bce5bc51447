"""The room of a table that grows: rows beyond its reach, which copies and files do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..memory import first_rows, with_length
from .hash_table import HashTable
from .options import CANNOT_GROW
from .row_states import reach_of
from .weight import EmbeddingWeight


class RowsWithRoom(torch.nn.Module):
    """Base of `TableTensors`: which of the rows of weight and scores are in reach."""

    name: str
    capacity: int
    on_full: str
    weight: EmbeddingWeight
    table: HashTable | None
    scores: torch.Tensor | None

    @property
    def grows(self) -> bool:
        """Return whether the table makes room for more rows where it has too few."""
        return self.on_full == "grow"

    @property
    def reach(self) -> int:
        """Number of the first rows, which may be in use; see `EmbeddingWeight.reach`."""
        return self.capacity if self.table is None else self.table.reach

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.scores is not None and reach_of(self.weight) is not None:
            state["_buffers"] = {**self._buffers, "scores": first_rows(self.scores, self.reach)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        scores = self._buffers.get("scores")
        if scores is not None and len(scores) < self.capacity:
            self._buffers["scores"] = with_length(scores, self.capacity)

    @contextmanager
    def rows_in_reach(self, fn: Callable[[Any], Any]) -> Iterator[None]:
        """Return a context in which weight and scores end with the rows that are in reach.

        A function that is applied to them there takes no memory for the others.

        Args:
            fn: the function.

        Raises:
            NotImplementedError: it moves tensors to a GPU.
            RuntimeError: it shares their memory with other processes.
        """
        weight = self.weight
        if not self.grows or not isinstance(weight, EmbeddingWeight):
            yield
            return
        sample = torch.empty(1, dtype=weight.dtype, device=weight.device)
        made = fn(sample)
        if made.device.type == "cuda":
            raise NotImplementedError(f"{self.name}: {CANNOT_GROW}")
        if made.device.type == "cpu" and made.is_shared():
            raise RuntimeError(
                f"{self.name}: a table with on_full='grow' cannot share its memory with other "
                f"processes, since that would take all {self.capacity:,} rows that it may grow to; "
                f"make it with as many rows as you need, and on_full='error'"
            )
        if made is sample or made.is_meta:
            yield
            return
        whole = weight.data, self.scores
        reach = 0 if weight.is_meta else self.reach
        try:
            weight.data = first_rows(whole[0], reach)
            if self.scores is not None:
                self.scores = first_rows(self.scores, reach)
            yield
            longer = with_length(self.weight.data, self.capacity)
            scores = None if self.scores is None else with_length(self.scores, self.capacity)
            self.weight.data, self.scores = longer, scores
        except BaseException:
            self.weight.data, self.scores = whole
            raise
