"""Predicts hit rates from the lookups that layers make in training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..lookup.watch import watched
from ..tables.embedding_table import EmbeddingTable
from .curve import CapacityCurve, Curve


class LayerCurves:
    """Records the training lookups of a model's tables, with one curve per table.

    Any layer with a hash table works, including tables that grow. Each lookup is slowed by a call
    to `CapacityCurve.add`, which waits for the device if the keys are on a CUDA device.

    Args:
        model: a model that contains sparsekit layers, on a single rank.
        options: keyword arguments for `CapacityCurve`.

    Raises:
        TypeError, ValueError: an option is invalid, the model has no tables, or one of its tables
            is already being watched.
        NotImplementedError: there are several ranks, so each sees only the keys in its own samples.

    Example:
        >>> with LayerCurves(model) as curves:
        ...     trainer.fit(data)
        ...     print(curves.read()["users"].points)
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        name = type(self).__name__
        tables = [
            one
            for one in model.modules()
            if isinstance(one, EmbeddingTable) and one.table is not None
        ]
        if not tables:
            raise ValueError(f"{name}: model has no sparsekit layer with a hash table")
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise NotImplementedError(
                f"{name}: on {dist.get_world_size()} ranks each sees the keys of its own samples "
                f"alone; watch a single rank, or read the files with `sparsekit capacity`"
            )
        if twice := [table.name for table in tables if table in watched]:
            raise ValueError(f"{name}: {twice[0]} is being watched already")
        self._curves = {table.name: CapacityCurve(**options) for table in tables}
        self._tables = tables
        for table in tables:
            watched[table] = partial(_add, self._curves[table.name])

    def read(self) -> dict[str, Curve]:
        """Return the predictions for the lookups so far, by layer name."""
        return {name: curve.read() for name, curve in self._curves.items()}

    def close(self) -> None:
        """Stop watching; `read` continues to work."""
        for table in self._tables:
            watched.pop(table, None)
        self._tables = []

    def __enter__(self) -> LayerCurves:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _add(curve: CapacityCurve, keys: torch.Tensor) -> None:
    curve.add(keys.flatten())
