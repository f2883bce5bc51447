"""Requests: the bags of keys that a call looks up in a table, and the shape of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import torch

from .._reports import errors_are_deferred
from ..ops._checks import KEY_DTYPES, ROW_DTYPES, accumulate_dtype
from ..tables.embedding_table import EmbeddingTable
from .inputs import Bags, check_bags, check_device, is_jagged, read_bags
from .padding import is_padding, without_padding
from .slots import NO_LIMIT, slot_by_slot, within
from .without_waiting import Changes, changed, one_each

# Prefix for error messages about the input of a whole group.
GROUP = "EmbeddingGroup"


@dataclass(slots=True)
class Request:
    """Bags of keys to look up in one table; the result is a vector for each bag.

    The values of keys and offsets may be invalid until `check` has been called. On a single rank,
    the ops check the values too, and change nothing if they are invalid; `check` is then only
    needed to explain the error.
    """

    table: EmbeddingTable
    bags: Bags  # bags of keys, without padding
    # "none": a bag has at most one key; the output is the key's vector, or zeros for an empty bag.
    # A tuple has a combiner for each slot, and bags are sorted by slot.
    combiner: str | tuple[str, ...]
    max_nnz: int  # limit on the number of keys in a bag
    shape: tuple[int, ...]  # shape of the output without its last dimension: one element per bag
    max_feature_num: int | None = None
    checked: bool = False
    feature: str | None = None  # name of the EmbeddingGroup's feature that makes the request
    # If several requests share `bags`, each uses a range of them; this is the index of this
    # request's first bag.
    first_bag: int | None = None
    # If requests share an output: this request's first column, and the total number of columns in
    # the output.
    columns: tuple[int, int] | None = None
    # If the output is jagged, with a vector for each key: the offsets of the bags.
    jagged: torch.Tensor | None = None
    scores: tuple[torch.Tensor, torch.Tensor] | None = None  # int64 keys, and their scores

    @property
    def name(self) -> str:
        """Name at the beginning of error messages."""
        return name_of(self.table, self.feature)

    @property
    def keys(self) -> torch.Tensor:
        """The keys, int64 or int32 ``[n]``; repeats allowed."""
        return self.own_bags().values

    @property
    def offsets(self) -> torch.Tensor:
        """The offsets, int64 ``[bags + 1]``; call `check` first. Only for requests that pool."""
        return cast(torch.Tensor, self.bags.offsets)

    @property
    def weights(self) -> torch.Tensor | None:
        """The sample weights ``[n]``, one per key, in the dtype used to add up vectors."""
        weights = self.bags.weights
        return None if weights is None else weights.to(accumulate_dtype(self.table.weight.dtype))

    @property
    def weights_need_gradient(self) -> bool:
        """Return whether backward needs a gradient for the sample weights."""
        return weights_need_gradient(self.bags)

    @property
    def pooled_here(self) -> bool:
        """Return whether this rank pools the keys' vectors with differentiable ops."""
        return "max" in self.combiners or self.weights_need_gradient

    @property
    def combiners(self) -> tuple[str, ...]:
        """The combiner of each slot, or a single combiner for all slots."""
        return self.combiner if isinstance(self.combiner, tuple) else (self.combiner,)

    def check(self) -> None:
        """Raise an error if offsets or keys are not valid for the table; do not change the table.

        Afterwards the request no longer shares its bags with other requests.
        """
        if self.checked:
            return
        if self.first_bag is not None:
            self.bags = check_bags(self.bags, GROUP, 1, NO_LIMIT, None)
            self.bags = self.own_bags()
            self.first_bag = None
        if self.combiner != "none":
            slots = self.shape[1] if len(self.shape) > 1 else 1
            self.bags = check_bags(self.bags, self.name, slots, self.max_nnz, self.max_feature_num)
        self.check_weights()
        check_keys(self.table, self.bags.values, self.name, self.bags)
        self.checked = True

    def check_weights(self) -> None:
        """Raise ValueError if a request with the combiner ``"max"`` has sample weights."""
        if self.bags.weights is not None and "max" in self.combiners:
            raise ValueError(
                f"{self.name}: sample_weights must be None, as combiner is {self.combiner!r}: a "
                f"maximum has no weights"
            )

    def own_bags(self) -> Bags:
        """Return only this request's own bags; see `first_bag`."""
        bags, first, count = self.bags, self.first_bag, math.prod(self.shape)
        if first is None:
            return bags
        begin, end = (int(cast(torch.Tensor, bags.offsets)[b]) for b in (first, first + count))
        return bags.part(first, count, begin, end)

    def of_slots(self) -> list[Request]:
        """Split a checked request, whose bags are sorted by slot, into a request for each slot."""
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
        """Return the vectors of bags, ``[bags, dim]``, in the shape of the output."""
        if not self.bags.slot_major:
            return pooled.view(*self.shape, pooled.shape[1])
        batch, slots = self.shape
        return pooled.view(slots, batch, pooled.shape[1]).transpose(0, 1).contiguous()


class OnDemand(Sequence[Request]):
    """A sequence of requests that is made only when it is first used."""

    def __init__(self, make: Callable[[], list[Request]]) -> None:
        self._make = make
        self._made: list[Request] | None = None

    def __len__(self) -> int:
        return len(self[:])

    @overload
    def __getitem__(self, i: int) -> Request: ...
    @overload
    def __getitem__(self, i: slice) -> list[Request]: ...
    def __getitem__(self, i: int | slice) -> Request | list[Request]:
        if self._made is None:
            self._made = self._make()
        return self._made[i]


class LazyRequests(OnDemand):
    """Requests for runs of shared bags; their number is known before they are made.

    Args:
        bags: the bags of all requests.
        shapes: shapes of the outputs without the last dimension.
        width: number of columns of the shared output; None if each request has its own output.
        make: returns the requests.
        form: a cache key; two calls on the same tables have equal forms if their requests differ
            only in values, offsets and weights.
    """

    def __init__(
        self,
        bags: Bags,
        shapes: Sequence[tuple[int, ...]],
        width: int | None,
        make: Callable[[], list[Request]],
        form: Any,
    ) -> None:
        super().__init__(make)
        self.bags = bags
        self.shapes = shapes
        self.width = width
        self.form = form
        # The plan that the requests were made for; set by `EmbeddingGroup`.
        self.plan: Any = None

    def __len__(self) -> int:
        return len(self.shapes)


def weights_need_gradient(bags: Bags) -> bool:
    """Return whether backward needs a gradient for the sample weights of these bags."""
    weights = bags.weights
    return weights is not None and weights.requires_grad and torch.is_grad_enabled()


def name_of(table: EmbeddingTable, feature: str | None) -> str:
    """Return the name for error messages: the table's, then the feature's if there is one."""
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
    """Make a request from bags in any form, without changing the table.

    If slot_num is None, there is one slot, and inputs and output have no dimension for slots.
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
    # The ops accept one limit for all slots, and refuse longer bags.
    limit = max_nnz if isinstance(max_nnz, int) and not truncate else NO_LIMIT
    request = Request(table, bags, combiner, limit, shape, max_feature_num)
    check_key_dtype(table, bags.values)
    odd = rest != 0 or bags.slots not in (None, slot_num)
    # Bags that will be changed must be checked first, unless change_without_waiting does both.
    changes = truncate or by_slot or isinstance(combiner, tuple) or max_feature_num is not None
    if not (changes or odd or table.padding_key is not None):
        return request
    limits = max_nnz if isinstance(max_nnz, tuple) else (max_nnz,) * slot_num
    own_limits = limits if truncate or by_slot else ()
    if not odd and change_without_waiting(request, slot_num, own_limits, truncate):
        return request
    request.check()
    leave_padding_out(request)
    if truncate or by_slot:
        request.bags = within(request.bags, request.name, limits, truncate)
    if isinstance(combiner, tuple) and not bags.slot_major:
        request.bags = slot_by_slot(request.bags, slot_num)
    return request


def change_without_waiting(
    request: Request,
    slots: int = 1,
    limits: Sequence[int | None] = (),
    truncate: bool = False,
) -> bool:
    """Change the bags of a request on a device without waiting; see `without_waiting.Changes`.

    Returns:
        True if the bags have been changed; False if that is impossible without waiting.
    """
    table = request.table
    pooled_here = request.pooled_here and errors_are_deferred(table.weight.device)
    if not (pooled_here or on_device(table)):
        return False
    request.check_weights()
    changes = _changes(request, slots, limits, truncate)
    request.bags, request.checked = changed(request.bags, changes), True
    return True


def _changes(
    request: Request, slots: int, limits: Sequence[int | None] = (), truncate: bool = False
) -> Changes:
    padding_key, most = request.table.padding_key, request.max_nnz
    return Changes(
        slots,
        () if padding_key is None else (padding_key,) * slots,
        () if most == NO_LIMIT else (most,) * slots,
        request.max_feature_num,
        limits,
        truncate,
        by_slot=isinstance(request.combiner, tuple),
    )


def on_device(table: EmbeddingTable) -> bool:
    """Return whether the host can change a table's bags without waiting for the device.

    This needs deferred errors and the by-key route, since the by-bag route sends whole bags.
    """
    by_key = table.world_size == 1 or table.strategy == "all_to_all"
    return by_key and errors_are_deferred(table.weight.device)


def leave_padding_out(request: Request) -> None:
    """Remove the layer's padding_key from the bags of a checked request."""
    if request.table.padding_key is not None:
        request.bags = without_padding(request.bags, request.table.padding_key)


def ask_vectors(table: EmbeddingTable, keys: torch.Tensor) -> Request:
    """Return a request for each key's vector (keys of any shape, or jagged); change no table."""
    name = table.name
    if is_jagged(keys):
        bags = read_bags(keys, None, name, table.weight.device)
        request = Request(table, bags, "sum", NO_LIMIT, (bags.count,))
        check_key_dtype(table, bags.values)
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
    if table.padding_key is not None and not change_without_waiting(request):
        request.check()
        leave_padding_out(request)
    return request


def vectors_of_bags(request: Request) -> Request:
    """Request each key's vector, unpooled, with jagged output; padding keys give zeros."""
    table = request.table
    if request.checked or not on_device(table):
        request.check()
        made = one_by_one(table, request.keys)
        made.jagged = request.offsets
        leave_padding_out(made)
        return made
    made = one_by_one(table, request.bags.values)
    made.bags, made.jagged = one_each(request.bags, _changes(request, 1))
    return made


def one_by_one(table: EmbeddingTable, keys: torch.Tensor) -> Request:
    """Return a request for the vector of each key; the keys must have been checked."""
    return Request(table, Bags(keys, None, None), "none", 1, (len(keys),), checked=True)


def check_key_dtype(table: EmbeddingTable, keys: torch.Tensor) -> None:
    """Raise TypeError if the keys have a wider dtype than the table's keys."""
    if keys.dtype != table.key_dtype and table.key_dtype == torch.int32:
        raise TypeError(f"{table.name}: keys must be {table.key_dtype}, got {keys.dtype}")


def check_keys(
    table: EmbeddingTable, keys: torch.Tensor, name: str | None = None, bags: Bags | None = None
) -> None:
    """Check that keys are valid for a table; padding keys are valid.

    Args:
        table: the table where the keys are looked up.
        keys: int64 or int32.
        name: name at the beginning of error messages; None means the table's name.
        bags: bags of the keys, used for positions in error messages.
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
    """Raise TypeError or ValueError if a lookup cannot use the table's weight."""
    weight = table.weight
    if weight.dtype not in ROW_DTYPES:  # possible after half(), for example
        told = f"weight must be float32, float64 or bfloat16, got {weight.dtype}"
        raise TypeError(f"{table.name}: {told}")
    shape = (table.capacity, table.embedding_vec_size)
    gaps = table.files is not None and weight.stride(1) == 1
    if weight.shape != shape or not (weight.is_contiguous() or gaps):
        raise ValueError(
            f"{table.name}: weight must be contiguous and of shape {shape}, got shape "
            f"{tuple(weight.shape)} and strides {weight.stride()}"
        )
