"""What an owner does for all ranks: it answers keys with vectors, and takes their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import torch

from ...distributed.exchange import HEAD_BYTES, Parts
from ...ops._group import GROUP_COMBINERS
from ..request import Request, one_by_one
from .grouped import Grouped
from .layout import Layout
from .sources import Sources, no_offsets
from .tables import Tables

_BEGIN = 7  # the column of features that says where vectors are


class Owned:
    """The keys that all ranks ask this one for.

    They are found where they have come, their vectors are written where they are sent from, and the
    gradients of those are read where they have come.

    Args:
        tables: which are asked.
        come: the keys.
        keys: where they are.
        vectors: where their vectors are to be, and their gradients.

    Attributes:
        grouped: the lookup of them.
    """

    def __init__(self, tables: Tables, come: Parts, keys: Layout, vectors: Layout) -> None:
        self.grouped = Grouped(tables)
        self._tables = tables
        self._vectors = vectors
        self._keys = [
            come.part(rank, size).view(torch.int64) for rank, size in enumerate(keys.sizes)
        ]
        self._first = (keys.begins([0] * len(keys.sizes)) - HEAD_BYTES) // 8
        self._features: list[torch.Tensor] = []

    def answer(self, memory: Sequence[torch.Tensor], of_parts: Sequence[int]) -> None:
        """Write the vectors of all keys; in training, keys that are new go in.

        Args:
            memory: for each of `Tables.alike`, where to.
            of_parts: the byte at which each rank's part begins between ranks.
        """
        begins = self._vectors.begins(of_parts)
        offsets = [no_offsets(self._keys[0].device)] * len(self._keys)
        asked = []
        for alike, columns in zip(self._tables.alike, self._tables.columns, strict=True):
            features = _features(
                self._vectors.counts[:, columns],
                self._first[:, columns],
                begins[:, columns] // alike.wire_dtype.itemsize,
                alike.dims,
            )
            self._features.append(features)
            sources = Sources(self._keys, offsets, [], features, [], 1)
            asked.append((_OnDemand(partial(self._requests, columns)), sources))
        self.grouped.fill(asked, memory)

    def gradients(
        self, memory: Sequence[torch.Tensor], of_parts: Sequence[int], saved: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """See `Grouped.gradients`; of those that have come for all vectors, as in `answer`."""
        begins = self._vectors.begins(of_parts)
        features = []
        each = zip(self._tables.alike, self._tables.columns, self._features, strict=True)
        for alike, columns, of_answer in each:
            moved = of_answer.clone()
            moved[:, _BEGIN] = torch.from_numpy(
                (begins[:, columns] // alike.wire_dtype.itemsize).T.reshape(-1)
            )
            features.append(moved)
        return self.grouped.gradients_at(memory, saved, features)

    def _requests(self, columns: slice) -> list[Request]:
        tables = [table for alike in self._tables.alike for table in alike.tables]
        made = []
        for t in range(len(tables))[columns]:
            parts = [
                keys[first : first + count]
                for keys, first, count in zip(
                    self._keys,
                    self._first[:, t].tolist(),
                    self._vectors.counts[:, t].tolist(),
                    strict=True,
                )
            ]
            made.append(one_by_one(tables[t], torch.cat(parts)))
        return made


def _features(
    counts: np.ndarray, first: np.ndarray, begins: np.ndarray, dims: Sequence[int]
) -> torch.Tensor:
    """Of all ``[world_size, tables]``: a feature for each table and rank, a bag for each key."""
    world_size, tables = counts.shape
    rows = np.empty((tables, world_size, 9), dtype=np.int64)
    rows[:, :, 0] = np.arange(tables)[:, None]
    rows[:, :, 1] = np.arange(world_size)
    rows[:, :, 2], rows[:, :, 3] = first.T, counts.T
    rows[:, :, 4], rows[:, :, 5] = GROUP_COMBINERS["none"], 1
    rows[:, :, 6], rows[:, :, _BEGIN] = 0, begins.T
    rows[:, :, 8] = np.array(dims)[:, None]
    return torch.from_numpy(rows.reshape(-1, 9))


class _OnDemand(Sequence[Request]):
    """Requests that only an error or a late optimizer wants to see."""

    def __init__(self, make: Callable[[], list[Request]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(self._make())

    @overload
    def __getitem__(self, i: int) -> Request: ...
    @overload
    def __getitem__(self, i: slice) -> list[Request]: ...
    def __getitem__(self, i: int | slice) -> Request | list[Request]:
        return self._make()[i]
