"""Rows that a lookup's backward will need, kept up to date when rows are renumbered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class InFlight:
    """A lookup's rows in one table, kept as long as the lookup's backward may still run.

    Args:
        name: name of the table.
        rows: returns the lookup's rows in this table, 1-D int32, sharing memory with `found`; -1
            for a key without a row.
        found: the lookup's results ``index`` and ``rows``.

    Attributes:
        moved: whether rows have been renumbered. The backward must then read `found`, since
            saved-tensor hooks may give it outdated copies.
        done: whether the backward has run. It may run again, if its graph was retained.
        stale: whether rows have been renumbered after the backward. The gradients that it returned
            have the old row numbers, so they can no longer be differentiated.
        lost: whether a row has been removed, so that the backward can no longer run.
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
        """Return the calls that renumber the lookup's rows.

        Args:
            new_rows: int32 ``[rows in use]``, the new number of each row, or -1 for a removed row.
        """
        rows = self.rows()
        known = rows >= 0
        numbers = new_rows[rows.clamp(min=0).to(torch.int64)]
        lost = bool(((numbers < 0) & known).any())
        # Write through `data`: autograd has saved the tensor, and treats other writes as errors.
        calls: list[partial[Any]] = [
            partial(torch.Tensor.copy_, rows.data, torch.where(known, numbers, rows)),
            partial(setattr, self, "moved", True),
            partial(setattr, self, "stale", self.done),
        ]
        return [*calls, partial(setattr, self, "lost", True)] if lost else calls

    def check_again(self) -> None:
        """Raise RuntimeError if rows have been renumbered since the backward."""
        if self.stale:
            raise RuntimeError(
                f"{self.name}: the table has dropped keys since this gradient was made, which can "
                f"have no gradient any more. Take a gradient of it before the next forward"
            )

    def check(self) -> None:
        """Raise RuntimeError if one of the lookup's rows has since been removed."""
        if self.lost:
            raise RuntimeError(
                f"{self.name}: the table has dropped keys of this backward's forward, as a sweep "
                f"may once a backward has run. Run a second backward before the next forward"
            )
