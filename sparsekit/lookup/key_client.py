"""A rank's own keys on their way to the ranks that own them, and the vectors that come back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..distributed.wire import ALIGNMENT, Layout, Parts
from .descriptors import describe
from .explain import explain
from .plan import TableBatch
from .request import Request
from .table_ops import new_outs

# What is passed to them has been read by a request; what they refuse, it explains.
_bucketize = torch.ops.sparsekit.group_bucketize.default
_rows_of = torch.ops.sparsekit.group_exchange_rows.default
_pool = torch.ops.sparsekit.group_embedding_bag_.default
_backward_at = torch.ops.sparsekit.group_embedding_bag_backward_at_.default


class KeyClient:
    """Distinct keys of tables of one dtype, by owner, and the bags that they are pooled in.

    Args:
        batch: those tables.
        requests: one for each of their positions.
        world_size: how many ranks there are.

    Attributes:
        counts: int64 ``[world_size, tables]``, keys of each table for each rank.

    Raises:
        TypeError, ValueError, IndexError: keys or offsets that a table cannot take.
    """

    def __init__(self, batch: TableBatch, requests: Sequence[Request], world_size: int) -> None:
        self.batch = batch
        weight = batch.tensors().weights[0]
        sources = describe(requests, batch, weight)
        owners, maps = batch.owners()
        try:
            with torch._C._AutoDispatchBelowAutograd():
                self._keys, self.counts, self._numbers, *found = _bucketize(
                    owners, maps, batch.key_ends, sources.keys, sources.offsets, sources.features,
                    world_size, batch.dedupe,
                )  # fmt: skip
        except Exception:
            explain(requests)
            raise
        self._inverse, self._places, self._bags, self._key_starts = found
        self._like = weight.detach()
        self._sample_weights, self._features = sources.sample_weights, sources.features
        self._shapes, self.width = sources.shapes, sources.width
        # Elements of which the begin of each table's vectors is a multiple.
        wide = ALIGNMENT // batch.wire_dtype.itemsize
        self._row_strides = [math.gcd(dim, wide) for dim in batch.dims]

    def bytes_of_bags(self) -> int:
        """The sum of a vector for each bag."""
        each = zip(self._shapes, self.batch.places, strict=True)
        return sum(math.prod(shape) * self.batch.sum_bytes[t] for shape, t in each)

    def write_keys(self, parts: Parts, keys: Layout, columns: slice) -> None:
        """Write the keys for each rank to what is sent.

        Args:
            parts: where to.
            keys: where in it.
            columns: which of the layout's tables these are.
        """
        words = parts.data.view(torch.int64)
        first = 0
        for begin, end in keys.ranges(parts.begins, columns):
            last = first + (end - begin) // 8
            words[begin // 8 : end // 8] = self._keys[first:last]
            first = last

    def pool(
        self,
        come: torch.Tensor,
        begins: Sequence[int],
        vectors: Layout,
        columns: slice,
        outs: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The outputs, from vectors that have come; with a width `outs`, if there are any yet.

        Args:
            come: elements of vectors.
            begins: the byte at which each rank's part begins between ranks.
            vectors: where they are in it.
            columns: which of the layout's tables these are.
            outs: made for other tables before.
        """
        outs = outs or new_outs(self.batch, self._shapes, self.width, self._like)
        found = self._found(vectors, columns, begins)
        with torch._C._AutoDispatchBelowAutograd():
            weights = [
                come.as_strided((max(0, (len(come) - dim) // unit + 1), dim), (unit, 1))
                for dim, unit in zip(self.batch.dims, self._row_strides, strict=True)
            ]
            _pool(
                outs, weights, *found, self._features, self._sample_weights, self._key_starts,
                [], [], None,
            )  # fmt: skip
        return outs

    def write_gradients(
        self,
        gradients: torch.Tensor,
        begins: Sequence[int],
        vectors: Layout,
        columns: slice,
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """Write the gradients of the vectors, given those of the outputs, to what is sent.

        Args:
            gradients: elements of those.
            begins: the byte at which each rank's part begins between ranks.
            vectors: where they go in it.
            columns: which of the layout's tables these are.
            grads: of the outputs; None where there is none.
        """
        batch = self.batch
        if self.width is None:
            grads = [grads[i] for i in batch.positions]
        given = batch.grads_or_zeros(grads, batch.dims, self._features)
        index, rows, *rest = self._found(vectors, columns, begins)
        with torch._C._AutoDispatchBelowAutograd():
            _backward_at(
                gradients, self._row_strides, given, batch.dims, index, rows, *rest, self._features,
                self._sample_weights, self._key_starts,
                torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip

    def _found(
        self, vectors: Layout, columns: slice, of_parts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """index, rows, counts and bags, of vectors that lie in parts that begin there."""
        unit_bytes = np.array(self._row_strides) * self.batch.wire_dtype.itemsize
        come = np.empty((len(unit_bytes), len(vectors.sizes), 2), dtype=np.int64)
        come[:, :, 0] = (vectors.begins(of_parts)[:, columns] // unit_bytes).T
        come[:, :, 1] = np.cumsum(vectors.counts[:, columns], axis=0).T
        steps = [dim // unit for dim, unit in zip(self.batch.dims, self._row_strides, strict=True)]
        rows = _rows_of(self._places, self._bags, self._features, torch.from_numpy(come), steps)
        return self._inverse, rows, self._numbers, self._bags
