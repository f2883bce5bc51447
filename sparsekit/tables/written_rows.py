"""Marks the rows of a weight that the library writes to, so that a table's changes can be found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.autograd.graph import increment_version

from .._pybind import count_up, each_is

NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")


class WrittenRows:
    """Marks the rows that have been written to since the marks were made or cleared.

    Library code that writes to rows in training marks them. All other writes (by user code, loading
    or moving rows) are recognized from the weight's version counter in torch; `complete` then
    returns False, and only a comparison of all rows can tell which have changed.

    Args:
        weight: an `EmbeddingWeight`; its attribute ``written_rows`` refers to the marks.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.marks = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        # Version of the weight up to which all writes are marked.
        self._version = weight._version

    def begin(self, weight: torch.Tensor) -> int | None:
        """Make the marks incomplete until `note` is called, which an interrupt may prevent.

        Returns:
            Version of the weight before the write; None if the marks were incomplete already.
        """
        before = weight._version if self.complete(weight) else None
        self.forget()
        return before

    def note(self, rows: torch.Tensor | None, before: int | None, now: int) -> None:
        """Mark the rows that a finished write has written to.

        Args:
            rows: int64 or int32; negative numbers are ignored. None if the rows are not known.
            before: the result of `begin`.
            now: version after the write; unless it is the next one, other threads have written too.
        """
        if rows is not None and before is not None and now == before + 1:
            if len(rows):
                self.marks.index_fill_(0, rows[rows >= 0].to(torch.int64), True)
            self._version = now

    def forget(self) -> None:
        """Make the marks incomplete."""
        self._version = -1

    def complete(self, weight: torch.Tensor) -> bool:
        """Return whether all writes to the weight are marked."""
        return weight._version == self._version

    def clear(self, weight: torch.Tensor, rows: np.ndarray | None) -> None:
        """Clear the marks of these rows (None: all rows), and count all writes so far as marked."""
        if rows is None:
            self.marks.zero_()
        else:
            self.marks.index_fill_(0, torch.from_numpy(rows).to(self.marks.device), False)
        self._version = weight._version


class Write:
    """A write by the library to weights; make it before writing, and call `done` afterwards.

    Args:
        weights: tensors of any type; only those with marks matter.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self._before: list[int | None] | None = None
        if have_marks(weights):
            all_marks = [getattr(weight, "written_rows", None) for weight in weights]
            each = zip(all_marks, weights, strict=True)
            self._before = [None if marks is None else marks.begin(w) for marks, w in each]

    def done(self, rows: Iterable[torch.Tensor | None]) -> None:
        """Count one write to each weight as the library's own, and mark rows.

        Args:
            rows: written rows of each weight, int64 or int32; negative numbers are ignored. None if
                the rows are not known.
        """
        count_up(list(self.weights), "noted_version")
        if self._before is None:
            return
        for weight, before, written in zip(self.weights, self._before, rows, strict=True):
            marks: WrittenRows | None = getattr(weight, "written_rows", None)
            if marks is not None and before is not None:
                marks.note(written, before, weight._version)


def count_new_rows(weights: Sequence[torch.Tensor]) -> None:
    """Record that the library has written new rows to each weight, in one write per weight."""
    write = Write(weights)
    increment_version(weights)
    write.done([NO_ROWS] * len(weights))  # new rows need no marks


def have_marks(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether any of these weights may have marks; weights of layers without any do not."""
    return not each_is(list(weights), "written_rows", None)
