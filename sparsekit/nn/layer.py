"""The base of all layers: a table, and lookups in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..lookup import PlanCache
from ..lookup.access import Items, assign, items, vectors_of
from ..lookup.request import Request
from ..tables.embedding_table import EmbeddingTable
from ..tables.options import TableOptions


class EmbeddingLayer(EmbeddingTable):
    """A table and lookups in it; its parameters and state are those of `EmbeddingTable`."""

    def __init__(self, options: TableOptions) -> None:
        super().__init__(options)
        self.plan_cache = PlanCache()

    def request(self, *inputs: Any) -> Request:
        """Check the input of a call. Changes nothing."""
        raise NotImplementedError

    def vectors(self, keys: torch.Tensor) -> torch.Tensor:
        """The vectors of keys: a copy, without gradient. Inserts nothing, in training neither.

        They are what a lookup in evaluation reads: an absent key's vector is the one that it would
        start from, that of a padding key is zeros. With several ranks it is a collective, to which
        each brings keys of its own, or none; vectors come as they are, whatever wire_dtype.

        Args:
            keys: int64 or int32 of any shape; repeats allowed.

        Returns:
            ``[*keys.shape, dim]`` in the dtype of weight.

        Raises:
            TypeError, ValueError: a wrong dtype or device.
            IndexError: a key out of range, without the hash table.
            RuntimeError: on meta; or ranks disagree.
        """
        return vectors_of(self, keys)

    def assign(self, keys: torch.Tensor, vectors: torch.Tensor) -> None:
        """Give keys these vectors, for instance pretrained ones; absent keys are inserted.

        Where a key is given more than once, the last vector counts. With several ranks it is a
        collective, to which each brings keys of its own, the same ones or none: they go to the
        ranks that own them, and the vector of the highest rank counts. States of optimizers stay as
        they are: a row that has a key keeps its own, and a new row has what the optimizer begins
        with. What is assigned to a padding key is never looked up.

        Args:
            keys: int64 or int32 ``[n]``.
            vectors: floating point ``[n, dim]``, rounded to the dtype of weight.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or device; nothing has been changed.
            IndexError: a key out of range, without the hash table; nothing has been changed.
            TableFullError: more new keys than free rows; this rank's part is as it was, those of
                ranks that had room are not.
            RuntimeError: on meta; or ranks disagree.
        """
        assign(self, keys, vectors)

    def items(self, chunk: int = 65536) -> Iterator[Items]:
        """The keys of this rank's rows and their vectors, piece by piece.

        No collective: each rank has keys of its own, which together are all there are. Keys come in
        the order of rows, from row 0 on, so the i-th one is that of row i, of optimizer states too.
        They are read at the first step, vectors step by step; insert nothing meanwhile. Without the
        hash table all rows have keys.

        Args:
            chunk: most rows in a piece.

        Yields:
            ``keys`` int64 ``[n]`` and ``vectors`` ``[n, dim]``, a copy in the dtype of weight.

        Raises:
            TypeError, ValueError: chunk is no int in [1, 2^31 - 1].
            RuntimeError: on meta.
        """
        return items(self, chunk)
