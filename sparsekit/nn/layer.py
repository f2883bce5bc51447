"""The base of all layers: a table and lookups in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from ..lookup import PlanCache
from ..lookup.access import Items, assign, erase, items, scored_life, vectors_of
from ..lookup.by_hand import clear, evict
from ..lookup.request import Request
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from ..tables.life import Evicted, RowCounts
from ..tables.options import TableOptions


class EmbeddingLayer(EmbeddingTable):
    """A table and lookups in it, with the parameters and state of `EmbeddingTable`."""

    def __init__(self, options: TableOptions) -> None:
        super().__init__(options)
        self.plan_cache = PlanCache()

    def request(self, *inputs: Any) -> Request:
        """Check a call's input and return a request for it, without changing the table."""
        raise NotImplementedError

    def vectors(self, keys: torch.Tensor) -> torch.Tensor:
        """Return copies of keys' vectors, without gradients; insert nothing, even in training.

        The result is the same as in evaluation: the initial vector for an absent key, and zeros for
        a padding key. With several ranks this is a collective; each rank passes its own keys, or
        none. Vectors are not rounded to wire_dtype.

        Args:
            keys: int64 or int32 of any shape; repeats allowed.

        Returns:
            ``[*keys.shape, dim]`` in the dtype of weight.

        Raises:
            TypeError, ValueError: a wrong dtype or device.
            IndexError: a key out of range, in a layer without the hash table.
            RuntimeError: the layer is on the meta device, or ranks disagree.
        """
        return vectors_of(self, keys)

    def assign(self, keys: torch.Tensor, vectors: torch.Tensor) -> None:
        """Set the vectors of keys, for instance to pretrained vectors; absent keys are inserted.

        If a key is given more than once, the last vector counts. With several ranks this is a
        collective. Each rank may pass its own keys, the same keys as other ranks, or no keys; all
        keys go to the ranks that own them. If several ranks pass the same key, the vector from the
        highest rank counts. Optimizer states are left unchanged: a row that has a key keeps its
        states, and a new row has initial states. A vector assigned to a padding key is never looked
        up.

        Args:
            keys: int64 or int32 ``[n]``.
            vectors: floating point ``[n, dim]``, rounded to the dtype of weight.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or device; nothing has been changed.
            IndexError: a key out of range, in a layer without the hash table; nothing has been
                changed.
            TableFullError: there are more new keys than free rows; this rank's part is unchanged,
                but ranks with enough free rows have changed theirs.
            RuntimeError: the layer is on the meta device, or ranks disagree.
        """
        assign(self, keys, vectors)

    def erase(self, keys: torch.Tensor) -> int:
        """Remove keys from the table, and overwrite their vectors and optimizer states.

        A key that occurs again later is new: it gets its initial vector and initial states. The
        last rows in use move to the rows that become free, with their vectors and states, so rows
        stay dense. Each call passes over the whole table and its states, so pass many keys at once.
        With several ranks this is a collective: each rank may pass its own keys, the same keys as
        other ranks, or no keys. Absent keys are ignored. Older checkpoints keep the erased keys.

        Args:
            keys: int64 or int32 of any shape; repeats allowed.

        Returns:
            The number of keys removed, over all ranks.

        Raises:
            TypeError, ValueError: a wrong dtype or device, or a layer without the hash table;
                nothing has been changed.
            RuntimeError: the weight has a gradient, whose rows would then belong to other keys;
                the layer is on the meta device; or ranks disagree. After `erase`, the backward of
                an earlier forward also raises RuntimeError.
        """
        return erase(self, keys)

    def evict(self, *, fraction: float | None = None, keep: int | None = None) -> int:
        """Remove the keys with the lowest scores, as `erase` does.

        Ties are broken by a hash of the key. Keys whose rows a pending backward or a gradient still
        needs are kept. With several ranks this is a collective, and removes the lowest-scoring keys
        over all ranks: the same keys as on a single rank.

        Args:
            fraction: fraction of the rows in use to remove, in [0, 1].
            keep: largest number of rows, over all ranks, to keep. Give either this or fraction.

        Returns:
            The number of keys removed, over all ranks.

        Raises:
            TypeError, ValueError: neither or both arguments are given, one is out of range, or the
                layer has no scores or no hash table; nothing has been changed.
            RuntimeError: the layer is on the meta device, or ranks disagree.
        """
        return evict(self, fraction, keep)

    def on_evict(self, callback: Callable[[Evicted], Any] | None) -> None:
        """Set a function to call with each batch of keys dropped from the table; None removes it.

        The function is called whenever rows on this rank have been dropped: because the table was
        over its budget, because the rows had expired, or by `evict`. It is not called for `erase`
        or `clear`. It gets copies, so it may keep them, for example to write them to a larger
        store. It runs within the lookup, before new keys are inserted. If it raises an error, the
        rows have been dropped already, and the lookup raises the error. A copy of the layer does
        not have the function.

        Args:
            callback: takes a `sparsekit.Evicted`; replaces the function set by an earlier call.

        Raises:
            TypeError: callback cannot be called.
            ValueError: the layer's rows have no scores, so none are ever dropped.

        Example:
            >>> layer.on_evict(lambda gone: print(gone.keys, gone.scores, gone.expired))
        """
        if callback is not None and not callable(callback):
            raise TypeError(f"{self.name}: callback must be callable or None, got {callback!r}")
        scored_life(self, "no keys leave the table by themselves").on_evict = callback

    def row_counts(self) -> RowCounts:
        """Return, as `RowCounts`, how many rows this rank has in use, has added and has dropped.

        Reading the counts is cheap, but on CUDA it waits for the device. A copy of the layer
        continues from the original's counts; they are not part of the state.

        Raises:
            ValueError: the layer's rows have no scores.
            RuntimeError: the layer is on the meta device.
        """
        self.refuse_meta()
        life = scored_life(self, "they are not counted")
        return life.row_counts(len(cast(HashTable, self.table)), self.weight.is_cpu)

    def clear(self) -> int:
        """Remove all keys, and overwrite their vectors and optimizer states.

        With several ranks this is a collective. Unlike `reset_parameters`, it draws no new seed.

        Returns:
            The number of keys removed, over all ranks.

        Raises:
            ValueError: a layer without the hash table.
            RuntimeError: the weight has a gradient; the layer is on the meta device; or ranks
                disagree. After `clear`, an earlier forward's backward also raises RuntimeError.
        """
        return clear(self)

    def items(self, chunk: int = 65536, *, min_score: int | None = None) -> Iterator[Items]:
        """Yield the keys of this rank's rows and their vectors, in chunks.

        This is not a collective: each rank yields its own keys, and all ranks together yield all
        keys. Keys are in row order, starting at row 0, so the i-th key belongs to row i, in
        optimizer states too. All keys are read first, then vectors chunk by chunk, so do not
        insert keys during the iteration. Without the hash table all rows have keys.

        Args:
            chunk: largest number of rows in a chunk.
            min_score: leave out rows with a lower score, as in `Evicted.scores`: the clock of the
                last lookup in training (LRU), the aged count (LFU), or the user's score. None
                yields all rows.

        Yields:
            ``keys`` int64 ``[n]`` and ``vectors`` ``[n, dim]``, a copy in the dtype of weight.

        Raises:
            TypeError, ValueError: chunk is not an int in [1, 2^31 - 1], min_score is not an int in
                [0, 2^63), or rows have no scores.
            RuntimeError: the layer is on the meta device.
        """
        return items(self, chunk, min_score)
