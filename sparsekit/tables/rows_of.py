"""A hash table's reference to the layer whose rows it assigns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..device_rooms import commit
from ..memory import zero_


class RowsOf:
    """A table's reference to the layer whose rows it assigns; copies of a table have none."""

    def __init__(self, layer: torch.nn.Module | None = None) -> None:
        self._layer = None if layer is None else weakref.ref(layer)
        self._changing = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context for giving rows to other keys; on exit, states follow their keys.

        If the body raises, the states move at the optimizer's next step. Nested calls do nothing.
        """
        layer: Any = None if self._layer is None or self._changing else self._layer()
        weight: Any = getattr(layer, "weight", None)
        if not hasattr(weight, "note_keys"):
            yield
            return
        weight.note_keys()
        try:
            self._changing = True
            yield
        finally:
            self._changing = False
        weight.follow_keys()

    def open(self, before: int, after: int) -> None:
        """Prepare the states of rows ``[before, after)``, which may now be given to keys."""
        weight: Any = getattr(None if self._layer is None else self._layer(), "weight", None)
        if hasattr(weight, "open_rows"):
            weight.open_rows(before, after)

    def in_files(self) -> bool:
        """Return whether rows are in a file, which forked processes would share."""
        layer = None if self._layer is None else self._layer()
        return getattr(layer, "files", None) is not None

    def allocate(self, rows: int) -> None:
        """Allocate space on the disk or on a device for this number of rows, if not done yet.

        Raises:
            OSError: the disk is full.
            RuntimeError: there is no memory on the device.
        """
        layer: Any = None if self._layer is None else self._layer()
        if (files := getattr(layer, "files", None)) is not None:
            files.allocate(rows)
        weight: Any = getattr(layer, "weight", None)
        if hasattr(weight, "allocate"):
            weight.allocate(rows)
        if (scores := getattr(layer, "scores", None)) is not None:
            commit(scores, rows)

    def have_grown(self) -> None:
        """Tell the layer that its table's capacity has changed."""
        layer: Any = None if self._layer is None else self._layer()
        if layer is not None:
            layer.count_change()

    def clear_from(self, row: int) -> None:
        """Zero row `row` and all later rows, which no longer have keys."""
        layer: Any = None if self._layer is None else self._layer()
        if layer is not None:
            zero_(layer.weight.detach()[row:])
            if (scores := getattr(layer, "scores", None)) is not None:
                zero_(scores[row:])

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsOf, ()
