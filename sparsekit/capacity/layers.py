"""Predicts hit rates from the lookups of layers while they train."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..lookup.watch import watched
from ..tables.embedding_table import EmbeddingTable
from .curve import CapacityCurve, Curve


class LayerCurves:
    """Adds the keys of each lookup in training to a curve for each table of a model.

    Tables may be of any kind with a hash table, also those that grow. A lookup takes longer by what
    `CapacityCurve.add` takes; on CUDA it waits for the device, which has the keys.

    Args:
        model: a model that contains sparsekit layers, on a single rank.
        options: keywords of `CapacityCurve`.

    Raises:
        TypeError, ValueError: an option is wrong; or the model has no tables, or one that is being
            watched already.
        NotImplementedError: there are several ranks, each of which sees only the keys of its own
            samples.

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
        """Return the predictions for the lookups so far, by the layer's name."""
        return {name: curve.read() for name, curve in self._curves.items()}

    def close(self) -> None:
        """Stop watching; `read` goes on to work."""
        for table in self._tables:
            watched.pop(table, None)
        self._tables = []

    def __enter__(self) -> LayerCurves:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _add(curve: CapacityCurve, keys: torch.Tensor) -> None:
    curve.add(keys.flatten())
