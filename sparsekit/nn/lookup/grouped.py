"""Calls of the ops on many tables: rows of keys, vectors of bags, gradients of rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from ... import ops
from ...ops._group import split_by_table
from ..request import Request, one_by_one
from ..weight import Update, deliver_gradients, update_of_all
from .explain import explain_refusal
from .max_norm import limit_norms
from .numbered import numbered
from .second import Gradients, pooled_again
from .sources import Sources, sources_of
from .tables import Alike, Tables

if TYPE_CHECKING:
    from ..shard import ShardedTable

# What is passed to them has been read by a request; what they refuse, it explains.
_find = torch.ops.sparsekit.group_find.default
_find_or_insert = torch.ops.sparsekit.group_find_or_insert_.default
_pool = torch.ops.sparsekit.group_embedding_bag_.default
_backward = torch.ops.sparsekit.group_embedding_bag_backward.default
_new_out = torch.ops.sparsekit.group_embedding_bag_out.default

# From this size on the CPU's memory is worth keeping; see csrc/torch_ops/large_memory.h.
_LARGE_BYTES = 2 << 20


class Grouped:
    """A lookup of tables of this rank, in as few calls of the ops as dtypes and modes allow."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._calls: list[_Call] = []

    def look_up(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """The output of each request, without gradient; in training, keys that are new go in.

        Where all requests have columns of one output, it is the only one.

        Args:
            requests: one for each of the tables.

        Raises:
            TypeError, ValueError, IndexError: keys or offsets that a table cannot take; nothing has
                been changed.
            TableFullError: a table is full. Tables that had room keep their new keys.
            RuntimeError: another thread is inserting into one of the tables.
        """
        alike = self._tables.alike
        if len(alike) == 1:
            call = _Call(alike[0], requests, None)
            self._calls = [call]
            call.find()
            return call.pool()
        # Else the first call would have inserted its keys when the second is refused.
        for request in requests:
            request.check()
        outputs: dict[int, torch.Tensor] = {}
        joined: list[torch.Tensor] = []
        for tables in alike:
            call = _Call(tables, [requests[i] for i in tables.positions], None)
            self._calls.append(call)
            call.find()
            if call.width is not None:
                joined = call.pool(joined)
            else:
                outputs.update(zip(tables.positions, call.pool(), strict=True))
        return joined or [outputs[i] for i in range(len(outputs))]

    def fill(
        self,
        asked: Sequence[tuple[Sequence[Request], Sources]],
        outs: Sequence[torch.Tensor],
    ) -> None:
        """As `look_up`, of checked keys, with the outputs where the sources say.

        Args:
            asked: for each of `Tables.alike` the requests, and what they come to.
            outs: for each of those what is written to.
        """
        for tables, (requests, sources), out in zip(self._tables.alike, asked, outs, strict=True):
            call = _Call(tables, requests, sources)
            self._calls.append(call)
            call.find()
            call.pool([out])

    def takers(self) -> list[torch.Tensor]:
        """What autograd is to hand gradients to: the weights, each once, or one for all of them.

        Each input of a backward costs time, and those that an optimizer takes do not pass through.
        """
        weights = [weight for call in self._calls for weight in call.weights]
        self._bypass = update_of_all(weights) is not None
        if not self._bypass:
            return weights
        return [next((weight for weight in weights if weight.requires_grad), weights[0])]

    def saved(self) -> list[torch.Tensor | None]:
        """What `gradients` needs beside the shapes of the call; the rest is let go of."""
        return [tensor for call in self._calls for tensor in call.saved()]

    def gradients(
        self, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The sparse gradient of each of the takers, or None: not wanted, or used up at once.

        Args:
            grads: of the outputs; None where there is none.
            saved: what `saved` has returned.
        """
        calls = len(self._calls)
        return self._gradients([grads] * calls, saved, [None] * calls)

    def gradients_at(
        self,
        grads: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None],
        features: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """The same, after `fill`.

        Args:
            grads: of what was written to; as often as that.
            saved: what `saved` has returned.
            features: as in the sources, but for where gradients lie.
        """
        return self._gradients([[grad] for grad in grads], saved, features)

    def pooled_again(
        self, of_gradients: Gradients, grads: Gradients, saved: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """See `second.pooled_again`."""
        return pooled_again(self._calls, of_gradients, grads, saved)

    def _gradients(
        self,
        grads: Sequence[Sequence[torch.Tensor | None]],
        saved: Sequence[torch.Tensor | None],
        features: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = []
        weights: list[torch.Tensor] = []
        each = len(saved) // len(self._calls)
        for k, call in enumerate(self._calls):
            own = saved[k * each : (k + 1) * each]
            gradients += call.gradients(grads[k], own, features[k])
            weights += call.weights
        if not self._bypass:
            return gradients
        # None is left, unless the optimizer has been detached since.
        left = [(w, g) for w, g in zip(weights, gradients, strict=True) if g is not None]
        if left:
            torch.autograd.backward([w for w, _ in left], [g for _, g in left])
        return [None]


def insert(table: ShardedTable, keys: torch.Tensor) -> torch.Tensor:
    """Rows, int64, of distinct keys of this rank; new ones go in, also in evaluation."""
    call = _Call(Alike([0], [table], inserts=True), [one_by_one(table, keys)], None)
    call.find()
    rows: torch.Tensor = call.saved()[1]
    return rows.to(torch.int64)


class _Call:
    """Requests of tables of one dtype, all of which insert keys or none: one call of each op.

    With a width, there is one output for the columns of all.
    """

    def __init__(self, tables: Alike, requests: Sequence[Request], sources: Sources | None) -> None:
        self._tables = tables
        self._requests = requests
        self._tensors = tables.tensors()
        self.weights = self._tensors.weights
        if sources is None:
            sources = sources_of(requests, tables, self.weights[0])
        self._sources: Any = sources
        self._sample_weights, self._features = sources.sample_weights, sources.features
        self.shards_of = tables.shards_of
        self.width = sources.width

    def find(self) -> None:
        """Find rows; insert keys that are new where tables do that. See `Grouped.look_up`."""
        tables, sources = self._tables, self._sources
        _, seeds, *hash_tables = self._tensors
        asked = sources.keys, sources.offsets, sources.features
        # Weights whose rows may have missed steps of an optimizer, by table.
        late = {t: w for t, w in enumerate(self.weights) if getattr(w, "before_read", None)}
        self._rows: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        # On a device only the device knows whether keys are new, and mostly none is.
        sizes = self._tensors.sizes if tables.inserts and sources.keys[0].is_cpu else []
        before = _numbers(sizes)
        if late and tables.inserts:
            self._catch_up_free_rows(late)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                if tables.inserts:
                    self._rows, self._index, self._counts, self._bags, self._first_keys = (
                        _find_or_insert(
                            *hash_tables, self.weights, seeds, tables.described,
                            tables.initializers, *asked
                        )
                    )  # fmt: skip
                else:
                    self._index, self._bags, self._first_keys = _find(
                        *hash_tables[:2], tables.described, *asked
                    )
        except Exception as refusal:
            explain_refusal(refusal, self._requests, self._tables.tables)
        if tables.inserts and not tables.seen:
            tables.have_keys()
        if (now := _numbers(sizes)) != before:
            # A backward that saved a weight would use its new rows in silence.
            each = zip(tables.hashed, before, now, strict=True)
            increment_version([self.weights[t] for t, then, size in each if size > then])
        if late or tables.max_norms:
            self._prepare(late)

    def pool(self, outs: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The outputs of requests; with a width, `outs` if an earlier call has made it."""
        outs = outs or new_outs(self._tables, self._sources.shapes, self.width, self.weights[0])
        found = self._index, self._rows, self._counts, self._bags, self._features
        given = self._sample_weights, self._first_keys
        with torch._C._AutoDispatchBelowAutograd():
            if self._tables.inserts:
                _pool(outs, self.weights, *found, *given, [], [], None)
            else:
                # Keys that are not there read their initial vectors.
                keys = self._sources.keys
                unseen = keys, self._tensors.seeds, self._tables.initializers
                _pool(outs, self.weights, *found, *given, *unseen)
        return outs

    def saved(self) -> tuple[Any, ...]:
        """See `Grouped`."""
        self._requests, self._sources = (), None
        return self._index, self._rows, self._counts, self._bags, self._first_keys

    def gradients(
        self,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[Any],
        features: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """See `Grouped`."""
        features = self._features if features is None else features
        index, rows, counts, bags, first_keys = saved
        if self.width is None:
            grads = [grads[i] for i in self._tables.positions]
        if rows is None:
            index, rows, counts = numbered(index, self._entries(bags))
        of_requests = list(grads) * len(self._tables.places) if self.width is not None else grads
        asked = {t for t, g in zip(self._tables.places, of_requests, strict=True) if g is not None}
        taken = [t for t, w in enumerate(self.weights) if w.requires_grad and t in asked]
        if not taken:
            return [None] * len(self.weights)
        dims = self._tables.dims
        if len(taken) < len(dims):
            wanted = set(taken)  # what is not has vectors without elements
            dims = [dim if t in wanted else 0 for t, dim in enumerate(dims)]
        given = self._tables.filled(grads, dims, features)
        asked_of = index, rows, counts, bags, features, self._sample_weights, first_keys

        def updates() -> list[Update]:
            sorted_rows, sums = _backward(
                given,
                dims,
                *asked_of,
                self._tables.divisor,
                torch.are_deterministic_algorithms_enabled(),
            )
            # Gradients of sums may be wider than the rows.
            sums = sums.to(self.weights[0].dtype)
            parts = split_by_table(dims, counts.tolist(), sorted_rows, sums)
            return [(self.weights[t], parts[0][t], parts[1][t]) for t in taken]

        def update(*step: Any, **options: Any) -> None:
            deterministic = torch.are_deterministic_algorithms_enabled()
            options |= {"divisor": self._tables.divisor, "deterministic": deterministic}
            ops.group_embedding_bag_update_(given, *asked_of, self.weights, *step, **options)

        taking = [self.weights[t] for t in taken]
        if (in_backward := update_of_all(taking)) is not None:
            everything = len(taken) == len(self.weights) and given[0].dtype == self.weights[0].dtype
            in_backward(taking, updates, update if everything else None)
            return [None] * len(self.weights)
        delivered: list[torch.Tensor | None] = [None] * len(self.weights)
        shards_of = [self.shards_of[t] for t in taken]
        for t, gradient in zip(taken, deliver_gradients(updates(), shards_of), strict=True):
            delivered[t] = gradient
        return delivered

    def pool_again(
        self,
        vectors: Gradients,
        grads: Gradients,
        saved: Sequence[Any],
        outs: list[torch.Tensor | None],
    ) -> None:
        """See `second.pooled_again`: add to outs."""
        positions = self._tables.positions if self.width is None else [0]
        given = self._tables.filled(
            [grads[i] for i in positions], self._tables.dims, self._features
        )
        index, rows, counts, bags, first_keys = saved
        tables = [
            torch.zeros_like(weight) if own is None else own.to_dense().contiguous()
            for weight, own in zip(self.weights, vectors, strict=True)
        ]
        own_outs = [torch.zeros_like(grad) for grad in given]
        found = index, rows, counts, bags, self._features
        with torch._C._AutoDispatchBelowAutograd():
            _pool(own_outs, tables, *found, self._sample_weights, first_keys, [], [], None)
        for i, out in zip(positions, own_outs, strict=True):
            before = outs[i]
            outs[i] = out if before is None else before + out

    def _entries(self, bags: torch.Tensor) -> list[slice]:
        """The entries of each table."""
        counts = self._features[:, 3]
        last = self._features.new_zeros(len(self.weights) + 1)
        last[1:].index_add_(0, self._features[:, 0], counts)
        ends = bags[last.cumsum(0).to(bags.device)].tolist()
        return list(map(slice, ends, ends[1:]))

    def _catch_up_free_rows(self, late: dict[int, Any]) -> None:
        """Have rows that new keys may get make the steps they have missed.

        A row may have moved before it had a key; what it has missed is not its new vector's.
        """
        for t, weight in late.items():
            table = self._tables.tables[t]
            if table.table is None:
                continue
            size = len(table.table)
            keys = sum(len(r.keys) for r in self._requests if r.table is table)
            end = min(size + keys, table.capacity)
            weight.catch_up(torch.arange(size, end, device=weight.device))

    def _prepare(self, late: dict[int, Any]) -> None:
        """Have the rows that are about to be read make the steps they have missed; limit norms."""
        limits = self._tables.max_norms
        entries = self._entries(self._bags)
        counts = None if self._counts is None else self._counts.tolist()
        for t in {**late, **limits}:
            own = entries[t]
            if counts is None or self._rows is None:
                rows = ops.unique(self._index[own])[0]
            else:
                rows = self._rows[own.start : own.start + counts[t]]
            if t in late:
                late[t].catch_up(rows.to(torch.int64))
            if t in limits:
                limit_norms(self.weights[t], rows, *limits[t])


def new_outs(
    tables: Alike, shapes: Sequence[tuple[int, ...]], width: int | None, like: torch.Tensor
) -> list[torch.Tensor]:
    """Outputs of requests of these shapes, or the one of which they have columns."""
    if width is not None:
        return [_output(like, shapes[0][0], width)]
    each = zip(shapes, tables.places, strict=True)
    return [_output(like, *shape, tables.dims[t]) for shape, t in each]


def _output(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory for an output, with any content.

    On the CPU it is that of an earlier output if it is large: new memory can take longer to come
    than to be filled.
    """
    num_elements = math.prod(shape)
    if num_elements * like.element_size() < _LARGE_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return _new_out(like.detach(), num_elements).view(shape)


def _numbers(sizes: Sequence[torch.Tensor]) -> list[int]:
    """The elements of tensors of one, on the CPU; an op would be a good part of a small lookup."""
    at = ctypes.c_int64.from_address
    return [at(size.data_ptr()).value for size in sizes]
