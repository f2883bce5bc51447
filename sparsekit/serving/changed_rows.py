"""Finds the rows of a table that have changed since the last delta."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .._pybind import xxh64_fixed_width
from ..checkpoint.evaluation import bring_up_to_date
from ..checkpoint.snapshot import keys_of_rows
from ..lookup.max_norm import limit_norms
from ..optim.row_optimizer import RowOptimizer
from ..tables.embedding_table import EmbeddingTable
from ..tables.weight import EmbeddingWeight
from ..tables.written_rows import WrittenRows
from .export import Exported

# Size in bytes of the vectors copied at a time.
_PIECE = 8 << 20
_NO_KEYS = np.empty(0, np.int64)


@dataclass
class Changes:
    """Changes in one rank's part of a table.

    Attributes:
        rows: rows that are new or have changed, int64 ``[n]``, in ascending order.
        keys: their keys, int64 ``[n]``.
        removed: keys that no longer have a row, int64 ``[k]``.
        compared: whether all rows had to be compared, since some writes were not marked.
    """

    rows: np.ndarray
    keys: np.ndarray
    removed: np.ndarray
    compared: bool
    _all_keys: np.ndarray = field(repr=False)
    _prints: np.ndarray = field(repr=False)  # hashes of `rows`, or of all rows if `compared`
    _keys_changed_at: int = field(repr=False)


def forget_marks(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Make the marks incomplete on all weights that an optimizer's step may have changed.

    Sparsekit's optimizers make marks. Others may write without changing the weights' versions;
    torch's do so with ``fused=True``.
    """
    if not isinstance(optimizer, RowOptimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                marks = getattr(parameter, "written_rows", None)
                if marks is not None and parameter.grad is not None:
                    marks.forget()


class ChangedRows:
    """Tracks changes to one rank's part of a table; at first, everything counts as changed.

    Lookups and optimizers mark the rows that they write to (`WrittenRows`). After any other write,
    all rows are compared by their XXH64 hashes, which miss a change with probability 2^-64. Changes
    are kept until `done` is called, so that a delta can be repeated if writing it fails.

    Args:
        layer: the layer that the table belongs to.
    """

    def __init__(self, layer: EmbeddingTable) -> None:
        self.layer = layer
        self._keys = _NO_KEYS
        self._prints = np.empty(0, np.uint64)
        self._weight: torch.Tensor | None = None
        self._marks: WrittenRows | None = None  # marks of `_weight`; another log may replace them
        self._keys_changed_at = 0
        self._address = 0  # of the rows; assigning to `data` changes it, but not the version

    def find(self) -> Changes:
        """Find what has changed since the last `done`.

        Rows that an optimizer would bring up to date later are brought up to date first, and count
        as changed; with Adam's ``mode="catch_up"``, this applies to all rows.

        Raises:
            IndexError, ValueError, TableFullError: see `sparsekit.raise_errors`.
        """
        layer = self.layer
        bring_up_to_date(layer)
        weight = layer.weight
        size = layer.capacity if layer.table is None else len(layer.table)
        changed_at = getattr(weight, "keys_changed_at", 0)
        before = len(self._keys)
        marks: WrittenRows | None = self._marks
        if (
            marks is None
            or weight is not self._weight
            or weight.data_ptr() != self._address
            or not self._marks_are_own(weight)
            or not marks.complete(weight)
            or changed_at != self._keys_changed_at
            or size < before
        ):
            return self._compare(size, changed_at)
        marked = np.flatnonzero(marks.marks[:before].cpu().numpy())
        rows = np.concatenate([marked, np.arange(before, size)])
        keys = self._keys
        if size > before:
            keys = np.concatenate([keys, self._keys_of(before, size)])
        prints = _hashed(gathered(weight, rows))
        return Changes(rows, keys[rows], _NO_KEYS, False, keys, prints, changed_at)

    def _marks_are_own(self, weight: torch.Tensor) -> bool:
        return getattr(weight, "written_rows", None) is self._marks

    def _compare(self, size: int, changed_at: int) -> Changes:
        keys = self._keys_of(0, size)
        prints = fingerprints(self.layer.weight, size)
        both = min(size, len(self._keys))
        moved = keys[:both] != self._keys[:both]
        differs = moved | (prints[:both] != self._prints[:both])
        rows = np.concatenate([np.flatnonzero(differs), np.arange(both, size)])
        left = np.concatenate([self._keys[:both][moved], self._keys[both:]])
        removed = np.setdiff1d(left, keys[rows])
        return Changes(rows, keys[rows], removed, True, keys, prints, changed_at)

    def done(self, changes: Changes) -> None:
        """Forget changes that have been written; there must have been no step since `find`."""
        weight, size = self.layer.weight, len(changes._all_keys)
        self._keys, self._keys_changed_at = changes._all_keys, changes._keys_changed_at
        if changes.compared:
            self._prints = changes._prints
        else:
            if size > len(self._prints):
                added = np.zeros(size - len(self._prints), np.uint64)
                self._prints = np.concatenate([self._prints, added])
            self._prints[changes.rows] = changes._prints
        own = isinstance(weight, EmbeddingWeight) and weight.written_rows is self._marks
        if own and weight is self._weight and self._marks is not None:
            self._marks.clear(weight, None if changes.compared else changes.rows)
        elif isinstance(weight, EmbeddingWeight) and weight.is_cpu and not weight.is_inference():
            # On a device, marks would make the host wait, to learn which rows a fused update wrote.
            self._marks = weight.written_rows = WrittenRows(weight)
        else:
            self._marks = None
        self._weight = weight
        self._address = weight.data_ptr() if self._marks is not None else 0

    def close(self) -> None:
        """Stop marking rows."""
        weight = self._weight
        if isinstance(weight, EmbeddingWeight) and weight.written_rows is self._marks:
            weight.written_rows = None

    def vectors(self, rows: np.ndarray) -> torch.Tensor:
        """Return the vectors that lookups in evaluation read, ``[n, dim]`` on the CPU."""
        layer = self.layer
        vectors = gathered(layer.weight, rows)
        if layer.max_norm is not None:
            limit_norms(vectors, torch.arange(len(rows)), layer.max_norm, layer.norm_type)
        return vectors

    def _keys_of(self, begin: int, end: int) -> np.ndarray:
        """Return the keys of rows ``[begin, end)``, int64."""
        layer = self.layer
        if begin == end:
            return _NO_KEYS
        if layer.table is None:
            return np.arange(begin, end, dtype=np.int64) * layer.world_size + layer.rank
        return keys_of_rows(layer.table, layer.table.buckets, begin, end)


def facts_of(table: Exported, layer: EmbeddingTable) -> tuple[Any, ...]:
    """Return what a base records about a table besides rows, and settings that affect the rows."""
    numbers = None if table.initializer is None else table.initializer.numbers
    norms = layer.max_norm, layer.norm_type
    return table.name, table.dim, table.dtype, table.seed, numbers, table.lookups, norms


def gathered(weight: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Copy rows, int64 ``[n]``, of a weight on any device to a CPU tensor, ``[n, dim]``."""
    vectors = weight.detach()
    if vectors.is_cpu and vectors.is_contiguous() and len(rows):
        # Copy in this thread; using torch's threads would save nothing, as training needs them.
        taken = vectors.view(torch.uint8).numpy().take(rows, axis=0)
        return torch.from_numpy(taken).view(vectors.dtype)
    return vectors[torch.from_numpy(rows).to(vectors.device)].cpu()


def fingerprints(weight: torch.Tensor, size: int) -> np.ndarray:
    """Return the XXH64 of each of the first ``size`` vectors of a weight, uint64 ``[size]``."""
    vectors = weight.detach()[:size]
    if vectors.is_cpu and vectors.is_contiguous():
        return _hashed(vectors)
    step = max(1, _PIECE // max(1, vectors.shape[1] * vectors.itemsize))
    parts = [_hashed(part.cpu().contiguous()) for part in vectors.split(step)]
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _hashed(vectors: torch.Tensor) -> np.ndarray:
    if not vectors.numel():
        return np.zeros(len(vectors), np.uint64)
    width = vectors.shape[1] * vectors.itemsize
    # The hash ignores trailing zeros; vectors of equal width still differ without them.
    codes = xxh64_fixed_width(vectors.data_ptr(), width, False, len(vectors), 0)
    return np.asarray(codes).view(np.uint64)
