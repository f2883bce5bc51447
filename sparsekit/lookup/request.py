"""Requests: the bags of keys that a call looks up in a table, and the shape of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import torch

from ..ops._checks import KEY_DTYPES, ROW_DTYPES, accumulate_dtype
from ..tables.embedding_table import EmbeddingTable
from .inputs import (
    Bags,
    check_bags,
    check_device,
    is_jagged,
    read_bags,
)
from .padding import is_padding, without_padding
from .slots import NO_LIMIT, slot_by_slot, within

# Prefix of errors about the input of a whole group.
GROUP = "EmbeddingGroup"


@dataclass(slots=True)
class Request:
    """Bags of keys for one table; each bag gives a vector.

    The values of keys and offsets may be wrong until `check` has been called. The ops of one rank
    check them as well, and change nothing if they are wrong; so before these ops `check` is not
    needed, except to explain what they refused.
    """

    table: EmbeddingTable
    bags: Bags  # bags of keys, without padding
    # "none": a bag has at most one key, whose vector is the output, or zeros without a key. A tuple
    # has a combiner for each slot, and bags lie slot by slot.
    combiner: str | tuple[str, ...]
    max_nnz: int  # largest number of keys in a bag
    shape: tuple[int, ...]  # shape of the output, without dim, with an element for each bag
    max_feature_num: int | None = None
    checked: bool = False
    feature: str | None = None  # the feature of an EmbeddingGroup that asks
    # The first bag of this request, if several requests share `bags` and each has a run of them.
    first_bag: int | None = None
    # First column, and number of columns, of an output that one rank may write for several
    # requests.
    columns: tuple[int, int] | None = None
    # Offsets of the bags among vectors of keys that are not pooled, if the output is jagged.
    jagged: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The prefix of errors."""
        return name_of(self.table, self.feature)

    @property
    def keys(self) -> torch.Tensor:
        """The keys, int64 or int32 ``[n]``; repeats allowed."""
        return self.bags.values if self.first_bag is None else self._own_bags(self.bags).values

    @property
    def offsets(self) -> torch.Tensor:
        """The offsets, int64 ``[bags + 1]``, after `check`, of a request that pools."""
        return cast(torch.Tensor, self.bags.offsets)

    @property
    def weights(self) -> torch.Tensor | None:
        """The weights ``[n]``, one for each key, in the dtype in which vectors are added."""
        weights = self.bags.weights
        return None if weights is None else weights.to(accumulate_dtype(self.table.weight.dtype))

    @property
    def weights_need_gradient(self) -> bool:
        """Return whether backward needs a gradient of the sample weights."""
        weights = self.bags.weights
        return weights is not None and weights.requires_grad and torch.is_grad_enabled()

    @property
    def pooled_here(self) -> bool:
        """Return whether this rank pools the vectors of keys by ops that autograd knows."""
        return "max" in self.combiners or self.weights_need_gradient

    @property
    def combiners(self) -> tuple[str, ...]:
        """The combiners of all slots, or the only one."""
        return self.combiner if isinstance(self.combiner, tuple) else (self.combiner,)

    def check(self) -> None:
        """Raise an error for offsets and keys that the table cannot take; change no table.

        Afterwards the request has bags of its own.
        """
        if self.checked:
            return
        if self.first_bag is not None:
            self.bags = self._own_bags(check_bags(self.bags, GROUP, 1, NO_LIMIT, None))
            self.first_bag = None
        if self.combiner != "none":
            slots = self.shape[1] if len(self.shape) > 1 else 1
            self.bags = check_bags(self.bags, self.name, slots, self.max_nnz, self.max_feature_num)
        if self.bags.weights is not None and "max" in self.combiners:
            raise ValueError(
                f"{self.name}: sample_weights must be None, as combiner is {self.combiner!r}: a "
                f"maximum has no weights"
            )
        check_keys(self.table, self.bags.values, self.name, self.bags)
        self.checked = True

    def _own_bags(self, bags: Bags) -> Bags:
        first, count = cast(int, self.first_bag), math.prod(self.shape)
        begin, end = (int(cast(torch.Tensor, bags.offsets)[b]) for b in (first, first + count))
        return bags.part(first, count, begin, end)

    def of_slots(self) -> list[Request]:
        """Return a request for each slot, from a checked request whose bags lie slot by slot."""
        samples, slots = self.shape
        firsts = torch.arange(slots + 1, device=self.offsets.device) * samples
        ends = self.offsets[firsts].tolist()
        return [
            replace(
                self,
                bags=self.bags.part(slot * samples, samples, *ends[slot : slot + 2]),
                combiner=self.combiners[slot],
                shape=(samples,),
            )
            for slot in range(slots)
        ]

    def shaped(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return the output, given the vectors ``[bags, dim]`` of bags."""
        if not self.bags.slot_major:
            return pooled.view(*self.shape, pooled.shape[1])
        batch, slots = self.shape
        return pooled.view(slots, batch, pooled.shape[1]).transpose(0, 1).contiguous()


class LazyRequests(Sequence[Request]):
    """Requests for runs of the same bags, made only when one is accessed.

    Args:
        bags: the bags of all requests.
        shapes: shapes of their outputs, without dim.
        width: columns of the output that they share, or None.
        make: makes the requests.
        form: equal for requests to the same tables that differ in values, offsets and weights only.
    """

    def __init__(
        self,
        bags: Bags,
        shapes: Sequence[tuple[int, ...]],
        width: int | None,
        make: Callable[[], list[Request]],
        form: Any,
    ) -> None:
        self.bags = bags
        self.shapes = shapes
        self.width = width
        self.form = form
        self._make = make
        self._made: list[Request] | None = None

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, i: int) -> Request: ...
    @overload
    def __getitem__(self, i: slice) -> list[Request]: ...
    def __getitem__(self, i: int | slice) -> Request | list[Request]:
        if self._made is None:
            self._made = self._make()
        return self._made[i]


def name_of(table: EmbeddingTable, feature: str | None) -> str:
    """Return the name of a table, or of a feature that asks it, for errors."""
    return table.name if feature is None else f"{table.name}: feature {feature!r}"


def ask_bags(
    table: EmbeddingTable,
    inputs: Any,
    sample_weights: Any,
    combiner: str | tuple[str, ...],
    slot_num: int | None,
    max_nnz: int | tuple[int | None, ...] | None = None,
    max_feature_num: int | None = None,
    truncate: bool = False,
) -> Request:
    """Read bags for a table; change nothing.

    If slot_num is None, there is one slot, for which inputs and output have no dimension.
    """
    one = slot_num is None
    bags = read_bags(inputs, sample_weights, table.name, table.weight.device, matrix=one)
    if slot_num is None:
        slot_num, samples, rest = 1, bags.count, 0
        bags.slot_major = False
        shape: tuple[int, ...] = (samples,)
    else:
        samples, rest = divmod(bags.count, slot_num)
        shape = samples, slot_num
    by_slot = isinstance(max_nnz, tuple)
    # The ops know one limit, and refuse bags beyond it.
    limit = max_nnz if isinstance(max_nnz, int) and not truncate else NO_LIMIT
    request = Request(table, bags, combiner, limit, shape, max_feature_num)
    check_key_dtype(table, bags.values)
    odd = samples < 0 or rest != 0 or bags.slots not in (None, slot_num)
    # Bags are checked before they are changed.
    changes = truncate or by_slot or isinstance(combiner, tuple)
    if odd or changes or max_feature_num is not None or table.padding_key is not None:
        request.check()
        leave_padding_out(request)
    if truncate or by_slot:
        limits = max_nnz if isinstance(max_nnz, tuple) else (max_nnz,) * slot_num
        request.bags = within(request.bags, request.name, limits, truncate)
    if isinstance(combiner, tuple) and not bags.slot_major:
        request.bags = slot_by_slot(request.bags, slot_num)
    return request


def leave_padding_out(request: Request) -> None:
    """Remove the layer's padding_key from a checked request."""
    if request.table.padding_key is not None:
        request.bags = without_padding(request.bags, request.table.padding_key)


def ask_vectors(table: EmbeddingTable, keys: torch.Tensor) -> Request:
    """Read keys of any shape for a table, or jagged ones; change nothing."""
    name = table.name
    if is_jagged(keys):
        bags = read_bags(keys, None, name, table.weight.device)
        request = Request(table, replace(bags, slot_major=False), "sum", NO_LIMIT, (bags.count,))
        request.check()
        return vectors_of_bags(request)
    if not isinstance(keys, torch.Tensor):
        raise TypeError(f"{name}: keys must be a tensor, got {type(keys).__name__}")
    if keys.layout != torch.strided:
        raise TypeError(
            f"{name}: keys must be a dense tensor, got layout {keys.layout}; look up its values()"
        )
    if keys.dtype not in KEY_DTYPES:
        raise TypeError(f"{name}: keys must be int64 or int32, got {keys.dtype}")
    check_device(name, "keys", keys, table.weight.device)
    bags = Bags(keys.reshape(-1), None, None)
    request = Request(table, bags, "none", 1, tuple(keys.shape))
    check_key_dtype(table, keys)
    if table.padding_key is not None:
        request.check()
        leave_padding_out(request)
    return request


def vectors_of_bags(request: Request) -> Request:
    """Request the vectors of a checked request's keys, jagged; a padding key gives zeros."""
    made = one_by_one(request.table, request.keys)
    made.jagged = request.offsets
    leave_padding_out(made)
    return made


def one_by_one(table: EmbeddingTable, keys: torch.Tensor) -> Request:
    """Request the vector of each key, for keys that have been checked."""
    return Request(table, Bags(keys, None, None), "none", 1, (len(keys),), checked=True)


def check_key_dtype(table: EmbeddingTable, keys: torch.Tensor) -> None:
    """Raise TypeError for keys wider than those of the table."""
    if keys.dtype != table.key_dtype and table.key_dtype == torch.int32:
        raise TypeError(f"{table.name}: keys must be {table.key_dtype}, got {keys.dtype}")


def check_keys(
    table: EmbeddingTable, keys: torch.Tensor, name: str | None = None, bags: Bags | None = None
) -> None:
    """Check that a table can take keys, padding included.

    Args:
        table: the table in which they are looked up.
        keys: int64 or int32.
        name: the name with which errors begin; None means the table's.
        bags: the bags of the keys, which know the places of keys in the input.
    """
    check_key_dtype(table, keys)
    check_weight(table)
    if table.table is not None or keys.numel() == 0:
        return
    low, high = torch.stack(keys.aminmax()).tolist()
    end = table.capacity * table.world_size
    if low >= 0 and high < end:
        return
    outside = (keys < 0) | (keys >= end)
    if table.padding_key is not None:
        outside &= ~is_padding(keys, table.padding_key)
    if outside.any():
        first = int(outside.nonzero()[0])
        position = first if bags is None else bags.position(first)
        raise IndexError(
            f"{name or table.name}: key {int(keys[first])} at position {position} is outside "
            f"[0, {end}), the range of keys without the hash table"
        )


def check_weight(table: EmbeddingTable) -> None:
    """Raise TypeError or ValueError if a lookup cannot use the weight, before keys are inserted."""
    weight = table.weight
    if weight.dtype not in ROW_DTYPES:  # for example after half()
        raise TypeError(
            f"{table.name}: weight must be float32, float64 or bfloat16, got {weight.dtype}"
        )
    shape = (table.capacity, table.embedding_vec_size)
    if weight.shape != shape or not weight.is_contiguous():
        raise ValueError(
            f"{table.name}: weight must be contiguous and of shape {shape}, got shape "
            f"{tuple(weight.shape)} and strides {weight.stride()}"
        )
