"""The client's side of the by-key route: sends keys, and pools the vectors received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch

from ..distributed.wire import ALIGNMENT, Layout, Parts
from ..ops._group import FeatureColumn
from .descriptors import describe
from .explain import explain
from .plan import TableBatch
from .record import entries_of_tables, grads_or_zeros
from .request import Request
from .table_ops import new_outs

# Ops without the checks in their Python wrappers. `Request.check` makes the same checks, or
# explains why an op refused its arguments.
_bucketize = torch.ops.sparsekit.group_bucketize.default
_rows_of = torch.ops.sparsekit.group_exchange_rows.default
_pool = torch.ops.sparsekit.group_embedding_bag_.default
_backward_at = torch.ops.sparsekit.group_embedding_bag_backward_at_.default


class KeyClient:
    """The distinct keys for a batch of tables, grouped by owner, and the bags to pool.

    Args:
        batch: the tables.
        requests: one for each of `TableBatch.positions`.
        world_size: number of ranks.
        places: for each table, the number of places for its keys in the message to each rank; empty
            if messages are only as large as their keys.

    Attributes:
        counts: int64 ``[world_size, tables]``, number of keys to send to each rank, by table.

    Raises:
        TypeError, ValueError, IndexError: keys or offsets are not valid for a table.
    """

    def __init__(
        self,
        batch: TableBatch,
        requests: Sequence[Request],
        world_size: int,
        places: Sequence[int] = (),
    ) -> None:
        self.batch = batch
        weight = batch.tensors()[0].weights[0]
        sources = describe(requests, batch, weight)
        owners, maps = batch.owners()
        try:
            with torch._C._AutoDispatchBelowAutograd():
                self._keys, self.counts, self._numbers, *found = _bucketize(
                    owners, maps, batch.key_ends, sources.keys, sources.offsets, sources.features,
                    world_size, batch.dedupe, places,
                )  # fmt: skip
        except Exception:
            explain(requests)
            raise
        # If messages have more places than keys, only the device knows the number of keys.
        self._counted = [self._numbers] if places else []
        self._inverse, self._places, self._bags, self._key_starts = found
        self._like = weight.detach()
        self._sample_weights, self._features = sources.sample_weights, sources.features
        self._shapes, self.width = sources.shapes, sources.width
        # Alignment of each table's vectors, in elements.
        wide = ALIGNMENT // batch.wire_dtype.itemsize
        self._row_strides = [math.gcd(dim, wide) for dim in batch.dims]

    def bytes_of_bags(self) -> int:
        """Return the total size in bytes of all bags' sums."""
        each = zip(self._shapes, self.batch.table_of_request, strict=True)
        return sum(math.prod(shape) * self.batch.sum_bytes[t] for shape, t in each)

    def write_keys(self, parts: Parts, keys: Layout, columns: slice) -> None:
        """Write the keys for each rank to that rank's part of the message.

        Args:
            parts: the parts to write to.
            keys: layout of the keys in the parts.
            columns: columns of the layout that belong to these tables.
        """
        words = parts.data.view(torch.int64)
        first = 0
        for begin, end in keys.ranges(parts.begins, columns):
            last = first + (end - begin) // 8
            words[begin // 8 : end // 8] = self._keys[first:last]
            first = last

    def write_occurrences(self, parts: Parts, keys: Layout, t: int, column: int) -> None:
        """Write how often this rank inserts each key of a table, in the order of `write_keys`.

        Args:
            parts: the parts to write to.
            keys: layout of the keys, and of their occurrence counts, in the parts.
            t: index of the table.
            column: the layout's column for this table's occurrence counts.
        """
        own = entries_of_tables(self._bags, self._features, len(self.batch.dims))[t]
        numbers = self._inverse[own]
        count = int(self._numbers[t])
        occurrences = torch.empty(count, dtype=torch.int64, device=numbers.device)
        places = self._places[own.start : own.start + count].to(torch.int64)
        if self.batch.reads:
            numbers = numbers[self._inserted()[own]]
        occurrences[places] = torch.bincount(numbers, minlength=count)
        words, first = parts.data.view(torch.int64), 0
        for begin, end in keys.ranges(parts.begins, slice(column, column + 1)):
            last = first + (end - begin) // 8
            words[begin // 8 : end // 8] = occurrences[first:last]
            first = last

    def _inserted(self) -> torch.Tensor:
        """Return, for each entry, whether its request inserts keys."""
        bags = self._bags
        ends = bags[self._features[:, FeatureColumn.bags].cumsum(0).to(bags.device)]
        # Each feature of a group has one row in `features`; rows are sorted by table.
        of_requests = zip(self.batch.table_of_request, self.batch.reads, strict=True)
        rows = sorted(of_requests, key=itemgetter(0))
        inserts = torch.tensor([not read for _, read in rows], device=bags.device)
        return inserts.repeat_interleave(ends.diff(prepend=bags[:1]))

    def pool(
        self,
        come: torch.Tensor,
        begins: Sequence[int],
        vectors: Layout,
        columns: slice,
        outs: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Pool the received vectors into `outs`, or into new outputs if `outs` is empty.

        Args:
            come: the receive buffer with the vectors, 1-D.
            begins: byte offset of each rank's part in the exchange's buffer.
            vectors: layout of the vectors in the parts.
            columns: columns of the layout that belong to these tables.
            outs: outputs partly filled by earlier batches of tables; empty for the first batch.
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
        """Compute the gradients of the vectors, and write them to the send buffer.

        Args:
            gradients: the send buffer for the gradients, 1-D.
            begins: byte offset of each rank's part in the exchange's buffer.
            vectors: layout of the gradients in the parts.
            columns: columns of the layout that belong to these tables.
            grads: gradients of the outputs; None for an output without a gradient.
        """
        batch = self.batch
        if self.width is None:
            grads = [grads[i] for i in batch.positions]
        given = grads_or_zeros(batch, grads, batch.dims, self._features, self._like)
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
        """Return the op arguments index, rows, counts and bags for parts at these offsets."""
        unit_bytes = np.array(self._row_strides) * self.batch.wire_dtype.itemsize
        come = np.empty((len(unit_bytes), len(vectors.sizes), 2), dtype=np.int64)
        come[:, :, 0] = (vectors.begins(of_parts)[:, columns] // unit_bytes).T
        come[:, :, 1] = np.cumsum(vectors.counts[:, columns], axis=0).T
        steps = [dim // unit for dim, unit in zip(self.batch.dims, self._row_strides, strict=True)]
        rows = _rows_of(
            self._places, self._bags, self._features, torch.from_numpy(come), steps, *self._counted
        )
        return self._inverse, rows, self._numbers, self._bags
