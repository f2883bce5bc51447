"""Rows that the backward of a lookup will need, when rows get other numbers in the meantime."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class InFlight:
    """The rows of one table in one lookup whose backward may be to come.

    Args:
        name: name of the table.
        rows: returns the rows of the lookup in this table, 1-D int32, as the memory of `found`; -1
            for a key without a row.
        found: the results ``index`` and ``rows`` of the lookup.

    Attributes:
        moved: whether rows have got other numbers. The backward must then read `found`, since hooks
            of saved tensors may give it copies.
        done: whether the backward has run. It may run again, if its graph was retained.
        stale: whether rows have got other numbers after a backward, so that its gradients, which
            have the old ones, have no gradients any more.
        lost: whether a row has been removed, so that no backward can run any more.
    """

    __slots__ = ("__weakref__", "done", "found", "lost", "moved", "name", "rows", "stale")

    def __init__(
        self,
        name: str,
        rows: Callable[[], torch.Tensor],
        found: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        self.name = name
        self.rows = rows
        self.found = found
        self.moved = False
        self.stale = False
        self.done = False
        self.lost = False

    def renumbering(self, new_rows: torch.Tensor) -> list[partial[Any]]:
        """Return the calls that give the rows other numbers.

        Args:
            new_rows: int32 ``[rows in use]``, the new number of each row, or -1 for a removed row.
        """
        rows = self.rows()
        known = rows >= 0
        numbers = new_rows[rows.clamp(min=0).to(torch.int64)]
        lost = bool(((numbers < 0) & known).any())
        # Through `data`, since autograd has saved the tensor and takes other writes for a mistake.
        calls: list[partial[Any]] = [
            partial(torch.Tensor.copy_, rows.data, torch.where(known, numbers, rows)),
            partial(setattr, self, "moved", True),
            partial(setattr, self, "stale", self.done),
        ]
        return [*calls, partial(setattr, self, "lost", True)] if lost else calls

    def check_again(self) -> None:
        """Raise RuntimeError if rows have got other numbers since the backward."""
        if self.stale:
            raise RuntimeError(
                f"{self.name}: the table has dropped keys since this gradient was made, which can "
                f"have no gradient any more. Take a gradient of it before the next forward"
            )

    def check(self) -> None:
        """Raise RuntimeError if a row has been removed since the lookup."""
        if self.lost:
            raise RuntimeError(
                f"{self.name}: the table has dropped keys of this backward's forward, as a sweep "
                f"may once a backward has run. Run a second backward before the next forward"
            )
