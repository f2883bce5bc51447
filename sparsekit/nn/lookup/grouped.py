"""Calls of the ops on many tables: rows of keys, vectors of bags, gradients of rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch.autograd.graph import increment_version

from ... import ops
from ...errors import TableFullError
from ...ops._checks import accumulate_dtype
from ...ops._group import GROUP_COMBINERS, split_by_table
from ..request import Request, check_weight, one_by_one
from ..weight import Update, deliver_gradients, update_of
from .numbered import numbered

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


@lru_cache(maxsize=256)
def _matrix(rows: tuple[tuple[float, ...], ...], dtype: torch.dtype) -> torch.Tensor:
    """A descriptor. Those of a call are mostly those of the call before."""
    return torch.tensor(rows, dtype=dtype)


@lru_cache(maxsize=64)
def _no_offsets(device: torch.device) -> torch.Tensor:
    """What stands for bags of one key each."""
    return torch.empty(0, dtype=torch.int64, device=device)


class Grouped:
    """A lookup of tables of this rank, in as few calls of the ops as dtypes and modes allow.

    Attributes:
        weights: those of the tables, each once, in the order of `gradients`.
    """

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self._calls: list[tuple[list[int], _Call]] = []

    def look_up(
        self, requests: Sequence[Request], divisors: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """The output of each request, without gradient; in training, keys that are new go in.

        Where all requests have columns of one output, it is the only one.

        Args:
            requests: what is asked, of any table more than once too.
            divisors: of the gradients of each request's table; None means 1.

        Raises:
            TypeError, ValueError, IndexError: keys or offsets that a table cannot take; nothing has
                been changed.
            TableFullError: a table is full. Tables that had room keep their new keys.
            RuntimeError: another thread is inserting into one of the tables.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, request in enumerate(requests):
            table, divisor = request.table, 1 if divisors is None else divisors[i]
            alike.setdefault((table.weight.dtype, table.training, divisor), []).append(i)
        if len(alike) > 1:
            # Else the first call would have inserted its keys when the second is refused.
            for request in requests:
                request.check()
        outputs: dict[int, torch.Tensor] = {}
        joined: list[torch.Tensor] = []
        self._join = all(request.columns is not None for request in requests)
        for (_, training, divisor), positions in alike.items():
            call = _Call([requests[i] for i in positions], training, self._join, divisor)
            call.find()
            if self._join:
                joined = call.pool(joined)
            else:
                outputs.update(zip(positions, call.pool(), strict=True))
            self._calls.append((positions, call))
            self.weights += call.weights
        return joined if self._join else [outputs[i] for i in range(len(outputs))]

    def saved(self) -> list[torch.Tensor | None]:
        """What `gradients` needs beside the shapes of the call; the rest is let go of."""
        return [tensor for _, call in self._calls for tensor in call.saved()]

    def gradients(
        self, grads: Sequence[torch.Tensor | None], saved: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The sparse gradient of each of the weights, or None: not wanted, or used up at once.

        Args:
            grads: of the outputs; None where there is none.
            saved: what `saved` has returned.
        """
        gradients: list[torch.Tensor | None] = []
        each = len(saved) // len(self._calls)
        for k, (positions, call) in enumerate(self._calls):
            own = saved[k * each : (k + 1) * each]
            of_call = grads if self._join else [grads[i] for i in positions]
            gradients += call.gradients(of_call, own)
        return gradients


def insert(table: ShardedTable, keys: torch.Tensor) -> torch.Tensor:
    """Rows, int64, of distinct keys of this rank; new ones go in, also in evaluation."""
    call = _Call([one_by_one(table, keys)], training=True, join=False)
    call.find()
    rows: torch.Tensor = call.saved()[1]
    return rows.to(torch.int64)


class _Call:
    """Requests of tables of one dtype, all of them in training or none: one call of each op.

    Requests of the same bags share a source. With join, there is one output for the columns of all.
    """

    def __init__(
        self, requests: Sequence[Request], training: bool, join: bool, divisor: int = 1
    ) -> None:
        self._requests = requests
        self._join = join
        self._divisor = divisor
        places: dict[ShardedTable, int] = {}
        self._places = [places.setdefault(r.table, len(places)) for r in requests]
        self.tables = list(places)
        self.weights = [table.weight for table in self.tables]
        self._training = training
        order: Sequence[int] = range(len(requests))
        if len(places) < len(requests):
            order = sorted(order, key=self._places.__getitem__)
        self._sources = {id(request.bags): request.bags for request in requests}
        source_of = {bags: s for s, bags in enumerate(self._sources)}
        rows = [
            _features(request, table, source_of[id(request.bags)], None if join else i)
            for i, (request, table) in enumerate(zip(requests, self._places, strict=True))
        ]
        self._features = _matrix(tuple(row for i in order for row in rows[i]), torch.int64)
        self._keys = [bags.values for bags in self._sources.values()]
        self._sample_weights: list[torch.Tensor] = []
        if any(bags.weights is not None for bags in self._sources.values()):
            weight = self.weights[0]
            dtype = accumulate_dtype(weight.dtype)
            none = weight.detach().new_empty(0, dtype=dtype)
            given = (bags.weights for bags in self._sources.values())
            self._sample_weights = [none if w is None else w.detach().to(dtype) for w in given]

    def find(self) -> None:
        """Find rows; in training, insert keys that are new. See `Grouped.look_up`."""
        none = _no_offsets(self._keys[0].device)
        offsets = [
            none if bags.offsets is None else bags.offsets for bags in self._sources.values()
        ]
        states: list[tuple[torch.Tensor, ...]] = []
        hashed = []
        described = []
        for table, weight in zip(self.tables, self.weights, strict=True):
            if weight.shape != (table.capacity, table.embedding_vec_size):
                check_weight(table)
            number = -1
            if (hash_table := table.table) is not None:
                number = len(states)
                states.append(hash_table.tensors())
                hashed.append(weight)
            described.append((number, table.capacity, table.world_size))
            table.prepare(self._training)
        buckets, hash_seeds, sizes = zip(*states, strict=True) if states else ((), (), ())
        asked = self._keys, offsets, self._features
        tables = _matrix(tuple(described), torch.int64)
        self._rows: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        if self._training:
            before = [_number(size) for size in sizes] if self._keys[0].is_cpu else []
            self._catch_up_free_rows()
        try:
            with torch._C._AutoDispatchBelowAutograd():
                if self._training:
                    self._rows, self._index, self._counts, *rest = _find_or_insert(
                        buckets, hash_seeds, sizes, self.weights, self._seeds(), tables,
                        self._initializers(), *asked
                    )  # fmt: skip
                else:
                    self._index, *rest = _find(buckets, hash_seeds, tables, *asked)
        except Exception as refusal:
            self._explain(refusal)
        self._bags, self._first_keys = rest
        if self._training:
            for table in self.tables:
                table.looked_at.add(True)
            # A backward that saved a weight would use its new rows in silence. On a device only the
            # device knows whether there are any, and mostly there is none.
            if self._index.is_cpu:
                grown = [_number(now) > then for now, then in zip(sizes, before, strict=True)]
                increment_version([w for w, has_new in zip(hashed, grown, strict=True) if has_new])
        self._catch_up()

    def _seeds(self) -> list[torch.Tensor]:
        return [table.seed for table in self.tables]

    def _initializers(self) -> torch.Tensor:
        return _matrix(tuple(table.initializer.numbers for table in self.tables), torch.float64)

    def pool(self, outs: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The outputs of requests; with join, `outs` if an earlier call has made it."""
        outs = outs or self._new_outs()
        found = self._index, self._rows, self._counts, self._bags, self._features
        given = self._sample_weights, self._first_keys
        with torch._C._AutoDispatchBelowAutograd():
            if self._training:
                _pool(outs, self.weights, *found, *given, [], [], None)
            else:
                # Keys that are not there read their initial vectors.
                unseen = self._keys, self._seeds(), self._initializers()
                _pool(outs, self.weights, *found, *given, *unseen)
        return outs

    def _new_outs(self) -> list[torch.Tensor]:
        like = self.weights[0]
        if self._join:
            (batch, *_), (_, width) = self._requests[0].shape, cast(Any, self._requests[0].columns)
            return [_output(like, batch, width)]
        return [
            _output(like, *request.shape, request.table.embedding_vec_size)
            for request in self._requests
        ]

    def saved(self) -> tuple[Any, ...]:
        """See `Grouped`."""
        self._requests, self._keys, self._sources = (), [], {}
        return self._index, self._rows, self._counts, self._bags, self._first_keys

    def gradients(
        self, grads: Sequence[torch.Tensor | None], saved: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """See `Grouped`."""
        index, rows, counts, bags, first_keys = saved
        if rows is None:
            index, rows, counts = numbered(index, self._entries(bags))
        of_requests = list(grads) * len(self._places) if self._join else grads
        asked = {t for t, g in zip(self._places, of_requests, strict=True) if g is not None}
        taken = [t for t, w in enumerate(self.weights) if w.requires_grad and t in asked]
        if not taken:
            return [None] * len(self.weights)
        dims = [0] * len(self.weights)  # what is not wanted has vectors without elements
        for t in taken:
            dims[t] = self.weights[t].shape[1]
        filled = self._filled(grads, dims)
        asked_of = index, rows, counts, bags, self._features, self._sample_weights, first_keys

        def updates() -> list[Update]:
            sorted_rows, sums = _backward(
                filled, dims, *asked_of, self._divisor, torch.are_deterministic_algorithms_enabled()
            )
            # Gradients of sums may be wider than the rows.
            sums = sums.to(self.weights[0].dtype)
            parts = split_by_table(dims, counts.tolist(), sorted_rows, sums)
            return [(self.weights[t], parts[0][t], parts[1][t]) for t in taken]

        def update(*step: Any, **options: Any) -> None:
            deterministic = torch.are_deterministic_algorithms_enabled()
            options |= {"divisor": self._divisor, "deterministic": deterministic}
            ops.group_embedding_bag_update_(filled, *asked_of, self.weights, *step, **options)

        in_backward = {update_of(self.weights[t]) for t in taken}
        (optimizer, *others) = in_backward
        if optimizer is not None and not others:
            everything = (
                len(taken) == len(self.weights) and filled[0].dtype == self.weights[0].dtype
            )
            optimizer([self.weights[t] for t in taken], updates, update if everything else None)
            return [None] * len(self.weights)
        delivered: list[torch.Tensor | None] = [None] * len(self.weights)
        for t, gradient in zip(taken, deliver_gradients(updates()), strict=True):
            delivered[t] = gradient
        return delivered

    def _filled(
        self, grads: Sequence[torch.Tensor | None], dims: Sequence[int]
    ) -> list[torch.Tensor]:
        """The gradients, with zeros for those that there are not."""
        given = [grad for grad in grads if grad is not None]
        if len(given) == len(grads):
            return given
        bags = self._features.new_zeros(len(grads))
        bags.index_add_(0, self._features[:, 6], self._features[:, 3])
        each = zip(grads, bags.tolist(), self._places, strict=True)
        return [given[0].new_zeros(n * dims[t]) if g is None else g for g, n, t in each]

    def _entries(self, bags: torch.Tensor) -> list[slice]:
        """The entries of each table."""
        counts = self._features[:, 3]
        last = self._features.new_zeros(len(self.weights) + 1)
        last[1:].index_add_(0, self._features[:, 0], counts)
        ends = bags[last.cumsum(0).to(bags.device)].tolist()
        return list(map(slice, ends, ends[1:]))

    def _catch_up_free_rows(self) -> None:
        """Have rows that new keys may get make the steps they have missed.

        A row may have moved before it had a key; what it has missed is not its new vector's.
        """
        for table, weight in zip(self.tables, self.weights, strict=True):
            if table.table is None or not _lags(weight):
                continue
            size = len(table.table)
            keys = sum(len(r.keys) for r in self._requests if r.table is table)
            end = min(size + keys, table.capacity)
            weight.catch_up(torch.arange(size, end, device=weight.device))

    def _catch_up(self) -> None:
        """Have the rows that are about to be read make the steps they have missed."""
        if not any(map(_lags, self.weights)):
            return
        entries = self._entries(self._bags)
        counts = None if self._counts is None else self._counts.tolist()
        for t, (weight, own) in enumerate(zip(self.weights, entries, strict=True)):
            if not _lags(weight):
                continue
            if counts is None or self._rows is None:
                rows = ops.unique(self._index[own])[0]
            else:
                rows = self._rows[own.start : own.start + counts[t]]
            weight.catch_up(rows.to(torch.int64))

    def _explain(self, refusal: Exception) -> NoReturn:
        """Raise what the op has refused, in the words of a layer."""
        for request in self._requests:
            request.check()
        if isinstance(refusal, RuntimeError):
            if "another thread" in str(refusal):
                names = ", ".join(table.name for table in self.tables)
                raise RuntimeError(f"{names}: {refusal}") from None
            for table in self.tables:
                self._refuse_if_full(table)
        raise refusal

    def _refuse_if_full(self, table: ShardedTable) -> None:
        if table.table is None:
            return
        keys = torch.cat([r.keys.to(torch.int64) for r in self._requests if r.table is table])
        new = ops.unique(keys[table.table.find(keys) < 0])[0]
        size = len(table.table)
        if size + len(new) > table.capacity:
            raise TableFullError(table.name, table.rank, size, table.capacity, len(new)) from None


def _output(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory for an output, with any content.

    On the CPU it is that of an earlier output if it is large: new memory can take longer to come
    than to be filled.
    """
    num_elements = math.prod(shape)
    if num_elements * like.element_size() < _LARGE_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return _new_out(like.detach(), num_elements).view(shape)


def _number(size: torch.Tensor) -> int:
    """The element of a tensor on the CPU; not by item(), which for a device would be a wait."""
    return ctypes.c_int64.from_address(size.data_ptr()).value


def _lags(weight: torch.Tensor) -> bool:
    """Whether rows may have missed steps of an optimizer."""
    return getattr(weight, "before_read", None) is not None


def _features(request: Request, table: int, source: int, out: int | None) -> list[tuple[int, ...]]:
    """The rows of features for a request: its vectors are tensor `out`, or columns of all."""
    dim = request.table.embedding_vec_size
    how = GROUP_COMBINERS[request.combiner], request.max_nnz, out or 0
    columns = request.columns if out is None else None
    if not request.bags.slot_major:
        first = request.first_bag or 0
        return [(table, source, first, math.prod(request.shape), *how, *(columns or (0, dim)))]
    batch, slots = request.shape
    begin, stride = columns or (0, slots * dim)
    return [
        (table, source, slot * batch, batch, *how, begin + slot * dim, stride)
        for slot in range(slots)
    ]
