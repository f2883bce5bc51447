"""Converts bags of keys, in any form that a layer accepts, to values and offsets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

from ..ops._checks import KEY_DTYPES, ROW_DTYPES
from .feature_matrix import is_scipy_csr, read_scipy_csr, read_torch_csr

# Largest number of bags whose offsets are cached: half a megabyte for each of up to 64 shapes.
_MOST_KEPT = 65536

FORMS = (
    "(values, offsets), a sparse COO or CSR tensor, a CSR matrix of scipy, a jagged nested tensor, "
    "a JaggedTensor, a KeyedJaggedTensor, or a dense [batch, slot_num, max_nnz] tensor"
)


@dataclass(slots=True)
class Bags:
    """Bags of keys: bag b holds ``values[offsets[b]:offsets[b + 1]]``.

    Bags are sorted by sample (bag = sample * slot_num + slot), or by slot if slot_major.
    """

    values: torch.Tensor  # keys, shape [n]
    offsets: torch.Tensor | None  # int64 or int32 [bags + 1]; None: each bag has one value
    weights: torch.Tensor | None  # sample weights, shape [n]
    slot_major: bool = False
    slots: int | None = None  # number of slots, if the form of the input implies it
    order: torch.Tensor | None = None  # input position of each value; None: start, start + 1, ...
    start: int = 0  # position of the first value in the input if order is None
    count: int = field(init=False)  # number of bags; -1 if offsets is empty
    # Number of keys in every bag, if the form of the input implies it; offsets then need no check.
    # `dataclasses.replace` does not copy it.
    each: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        offsets = self.offsets
        self.count = self.values.numel() if offsets is None else offsets.numel() - 1
        self.each = 1 if offsets is None else None

    def position(self, i: int) -> int:
        """Return the position of value i in the input."""
        return self.start + i if self.order is None else int(self.order[i])

    def part(self, first: int, count: int, begin: int, end: int) -> Bags:
        """Return `count` bags, starting at bag `first`; their values are ``values[begin:end]``."""
        offsets, weights = self.offsets, self.weights
        return Bags(
            self.values[begin:end],
            None if offsets is None else offsets[first : first + count + 1] - begin,
            None if weights is None else weights[begin:end],
            start=begin,
        )


def read_bags(
    inputs: Any, sample_weights: Any, layer: str, device: torch.device, matrix: bool = False
) -> Bags:
    """Read bags in any form that `DistributedEmbedding` accepts; with `matrix`, also ``[bags, m]``.

    The values of offsets are not read here; `check_bags` checks them.

    Raises:
        TypeError: inputs has none of these forms, or has the wrong dtype.
        ValueError: a shape or device is wrong, or sample_weights do not match inputs.
    """
    form = _form(inputs, layer, device)
    if matrix and form is _from_dense and inputs.dim() == 2:
        form = partial(_padded, count=inputs.shape[0], slots=None)
    # Check devices before reading values: a meta tensor has no values, and reading from CUDA waits
    # for the device.
    check_device(layer, "inputs", inputs, device)
    if sample_weights is not None:
        check_device(layer, "sample_weights", sample_weights, device)
    bags = form(inputs, sample_weights, layer)
    for name, part in (
        ("values", bags.values),
        ("offsets", bags.offsets),
        ("sample_weights", bags.weights),
    ):
        if part is not None and part.device != device:
            check_device(layer, name, part, device)
    _check_types(bags, layer)
    return bags


def check_device(layer: str, argument: str, tensor: Any, device: torch.device) -> None:
    """Raise ValueError for a tensor on another device; ignore objects that are not tensors."""
    if isinstance(tensor, torch.Tensor) and tensor.device != device:
        raise ValueError(f"{layer}: {argument} is on {tensor.device}, the weight on {device}")


def _form(inputs: Any, layer: str, device: torch.device) -> Callable[[Any, Any, str], Bags]:
    if isinstance(inputs, (tuple, list)) and len(inputs) == 2:
        return _from_values_offsets
    if isinstance(inputs, torch.Tensor):
        if inputs.is_nested:
            return _from_jagged
        if inputs.layout in _OF_LAYOUT:
            return _OF_LAYOUT[inputs.layout]
    if is_keyed_jagged(inputs):
        return _from_keyed_jagged
    if is_jagged(inputs):
        return _from_jagged_tensor
    if is_scipy_csr(inputs):
        return lambda matrix, weights, name: Bags(*read_scipy_csr(matrix, weights, name, device))
    raise TypeError(f"{layer}: inputs must be {FORMS}; got {_kind(inputs)}")


def is_keyed_jagged(inputs: Any) -> bool:
    """Return whether `inputs` looks like a KeyedJaggedTensor, without importing torchrec."""
    return all(callable(getattr(inputs, name, None)) for name in ("keys", "values", "offsets"))


def is_jagged(inputs: Any) -> bool:
    """Return whether `inputs` is a nested tensor or looks like torchrec's JaggedTensor."""
    if isinstance(inputs, torch.Tensor):
        return inputs.is_nested
    return all(callable(getattr(inputs, name, None)) for name in ("values", "offsets"))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {'nested ' if value.is_nested else ''}tensor of layout {value.layout}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def _flat_weights(weights: Any, n: int, layer: str, like: str) -> torch.Tensor | None:
    """Check that flat weights have one element for each value, and return them."""
    if weights is None:
        return None
    plain = isinstance(weights, torch.Tensor) and weights.layout == torch.strided
    if not plain or weights.is_nested:
        raise TypeError(
            f"{layer}: sample_weights must be a 1-D tensor or {like}; got {_kind(weights)}"
        )
    if weights.shape != (n,):
        raise ValueError(
            f"{layer}: sample_weights must have one weight for each of the {n} keys, "
            f"got shape {tuple(weights.shape)}"
        )
    return weights


def _from_values_offsets(inputs: Any, weights: Any, layer: str) -> Bags:
    values, offsets = inputs
    for name, part in (("values", values), ("offsets", offsets)):
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{layer}: {name} must be a tensor, got {type(part).__name__}")
        if part.dim() != 1:
            raise ValueError(f"{layer}: {name} must be 1-D, got shape {tuple(part.shape)}")
    return Bags(values, offsets, _flat_weights(weights, len(values), layer, "None"))


def _same_form(inputs: torch.Tensor, weights: Any) -> bool:
    return (
        isinstance(weights, torch.Tensor)
        and weights.layout == inputs.layout
        and weights.is_nested == inputs.is_nested
    )


def _check_structure(layer: str, **parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Raise ValueError unless these parts of inputs and sample_weights are equal."""
    for name, (mine, theirs) in parts.items():
        if mine.shape != theirs.shape:
            raise ValueError(
                f"{layer}: sample_weights must have the {name} of inputs, but their shapes are "
                f"{tuple(theirs.shape)} and {tuple(mine.shape)}"
            )
        if not torch.equal(mine, theirs):
            at = int((mine != theirs).view(-1, mine.shape[-1]).any(0).nonzero()[0])
            raise ValueError(
                f"{layer}: sample_weights must have the {name} of inputs, but at position {at} "
                f"they are {theirs[..., at].tolist()} and {mine[..., at].tolist()}"
            )


def _check_2d(inputs: torch.Tensor, layer: str) -> None:
    if inputs.dim() != 2 or inputs.dense_dim() != 0:
        raise ValueError(
            f"{layer}: a sparse input must have shape [batch * slot_num, max_nnz] and no dense "
            f"dimension, got {tuple(inputs.shape)} with {inputs.dense_dim()} of them"
        )


def _from_coo(inputs: torch.Tensor, weights: Any, layer: str) -> Bags:
    _check_2d(inputs, layer)
    # Never call coalesce(), which would add up keys at the same position.
    indices, values = inputs._indices(), inputs._values()
    if _same_form(inputs, weights):
        _check_structure(layer, indices=(indices, weights._indices()))
        if weights.requires_grad and not weights.is_coalesced():
            raise ValueError(
                f"{layer}: sample_weights requires a gradient but is not coalesced, and torch "
                f"would lose the gradient; pass the weights flat, shape ({len(values)},)"
            )
        # Unlike values(), _values() accepts an uncoalesced tensor, but stops the gradient.
        weights = weights.values() if weights.is_coalesced() else weights._values()
    flat = _flat_weights(weights, len(values), layer, "a sparse tensor like inputs")
    bag, order = indices[0], None
    if not inputs.is_coalesced():
        bag, order = bag.sort(stable=True)
        values = values[order]
        flat = None if flat is None else flat[order]
    counts = torch.bincount(bag, minlength=inputs.shape[0])
    return Bags(values, offsets_of(counts), flat, order=order)


def _from_csr(inputs: torch.Tensor, weights: Any, layer: str) -> Bags:
    _check_2d(inputs, layer)
    if inputs.is_floating_point():
        return Bags(*read_torch_csr(inputs, weights, layer))
    if _same_form(inputs, weights):
        _check_structure(
            layer,
            crow_indices=(inputs.crow_indices(), weights.crow_indices()),
            col_indices=(inputs.col_indices(), weights.col_indices()),
        )
        weights = weights.values()
    values = inputs.values()
    flat = _flat_weights(weights, len(values), layer, "a sparse tensor like inputs")
    return Bags(values, inputs.crow_indices(), flat)


def _from_jagged(inputs: Any, weights: Any, layer: str) -> Bags:
    if inputs.layout != torch.jagged or inputs.dim() != 2 or inputs._lengths is not None:
        raise ValueError(
            f"{layer}: a nested input must have layout=torch.jagged, shape [batch * slot_num, j] "
            f"and no holes (call .contiguous()); got layout {inputs.layout}, {inputs.dim()} "
            f"dimensions"
        )
    if _same_form(inputs, weights):
        _check_structure(layer, offsets=(inputs.offsets(), weights.offsets()))
        weights = weights.values()
    flat = _flat_weights(weights, len(inputs.values()), layer, "a nested tensor like inputs")
    return Bags(inputs.values(), inputs.offsets(), flat)


def _from_keyed_jagged(inputs: Any, weights: Any, layer: str) -> Bags:
    if getattr(inputs, "variable_stride_per_key", lambda: False)():
        strides = list(inputs.stride_per_key())
        # With inverse_indices, samples share bags even if all keys have the same stride.
        if len(set(strides)) > 1 or inputs.inverse_indices_or_none() is not None:
            raise ValueError(
                f"{layer}: inputs has a stride of its own for each key, {strides} samples; expand "
                f"it by its inverse_indices, so that every key has the bags of every sample"
            )
    bags = _from_jagged_tensor(inputs, weights, layer)
    return replace(bags, slot_major=True, slots=len(inputs.keys()))


def _from_jagged_tensor(inputs: Any, weights: Any, layer: str) -> Bags:
    own = getattr(inputs, "weights_or_none", lambda: None)()
    if weights is None:
        weights = own
    elif own is not None:
        raise ValueError(f"{layer}: inputs has weights of its own; pass no sample_weights")
    return _from_values_offsets((inputs.values(), inputs.offsets()), weights, layer)


def _from_dense(inputs: torch.Tensor, weights: Any, layer: str) -> Bags:
    if inputs.dim() != 3:
        raise ValueError(
            f"{layer}: a dense input must have shape [batch, slot_num, max_nnz], "
            f"got {tuple(inputs.shape)}; flat keys go in a tuple with their offsets, and "
            f"sparsekit.EmbeddingBag takes bags as torch's does, [batch, max_nnz] for one"
        )
    batch, slots, _ = inputs.shape
    return _padded(inputs, weights, layer, batch * slots, slots)


def _padded(inputs: torch.Tensor, weights: Any, layer: str, count: int, slots: int | None) -> Bags:
    """Return `count` bags of equal length, each along the last dimension of inputs."""
    nnz = inputs.shape[-1]
    if weights is not None:
        if _same_form(inputs, weights) and weights.shape == inputs.shape:
            weights = weights.reshape(-1)
        like = f"have the shape of inputs, {tuple(inputs.shape)}"
        weights = _flat_weights(weights, inputs.numel(), layer, like)
    offsets = None if nnz == 1 else _equal_offsets(count, nnz, inputs.device)
    bags = Bags(inputs.reshape(-1), offsets, weights, slots=slots)
    bags.each = nnz
    return bags


_OF_LAYOUT = {torch.sparse_coo: _from_coo, torch.sparse_csr: _from_csr, torch.strided: _from_dense}


def _equal_offsets(bags: int, nnz: int, device: torch.device) -> torch.Tensor:
    """Return the offsets of `bags` bags with nnz keys each, usually from a cache."""
    on_device = device.type == "cuda"
    # Do not cache while a graph is captured: memory that is allocated then belongs to the graph.
    if bags > _MOST_KEPT or (on_device and torch.cuda.is_current_stream_capturing()):
        return _new_offsets(bags, nnz, device)
    # Cache per stream, so that no stream has to wait for another one to write the offsets.
    stream = torch.cuda.current_stream(device).cuda_stream if on_device else 0
    return _kept_offsets(bags, nnz, device, stream)


def _new_offsets(bags: int, nnz: int, device: torch.device) -> torch.Tensor:
    # arange with a step of nnz would fail if nnz is 0.
    return torch.arange(bags + 1, device=device) * nnz


@lru_cache(maxsize=64)
def _kept_offsets(bags: int, nnz: int, device: torch.device, stream: int) -> torch.Tensor:
    return _new_offsets(bags, nnz, device)


def _check_types(bags: Bags, layer: str) -> None:
    if bags.values.dtype not in KEY_DTYPES:
        raise TypeError(f"{layer}: keys must be int64 or int32, got {bags.values.dtype}")
    if bags.offsets is not None and bags.offsets.dtype not in KEY_DTYPES:
        raise TypeError(f"{layer}: offsets must be int64 or int32, got {bags.offsets.dtype}")
    if bags.weights is not None and bags.weights.dtype not in (*ROW_DTYPES, torch.float16):
        raise TypeError(f"{layer}: sample_weights must be floating point, got {bags.weights.dtype}")


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """Return the offsets ``[bags + 1]`` of bags, given their sizes ``[bags]``."""
    offsets = counts.new_zeros(len(counts) + 1)
    torch.cumsum(counts, 0, out=offsets[1:])
    return offsets


def check_bags(
    bags: Bags, layer: str, slot_num: int, max_nnz: int, max_feature_num: int | None
) -> Bags:
    """Check bags, and return them with int64 offsets.

    Raises:
        ValueError: offsets do not rise from 0 to len(values), slot_num does not divide the number
            of bags, or a bag or sample has too many keys; the message gives its position.
    """
    if bags.slots not in (None, slot_num):
        raise ValueError(f"{layer}: inputs has {bags.slots} slots, but slot_num={slot_num}")
    if bags.offsets is None:
        offsets = torch.arange(len(bags.values) + 1, device=bags.values.device)
    else:
        offsets = bags.offsets.to(torch.int64)
    if len(offsets) == 0:
        raise ValueError(f"{layer}: offsets must start at 0, but offsets[0] is missing")
    counts = offsets.diff()
    by_sample = None
    if max_feature_num is not None and len(counts) and len(counts) % slot_num == 0:
        by_slot = counts.view(slot_num, -1).T if bags.slot_major else counts.view(-1, slot_num)
        by_sample = by_slot.sum(1)
    if bags.each is None:
        facts = [offsets[0], offsets[-1], *(counts.aminmax() if len(counts) else ())]
        facts += [] if by_sample is None else [by_sample.max()]
        # Read everything in one go, since each read from a device waits for the device.
        first, last, *of_counts = torch.stack(facts).tolist()
    else:
        first, last = 0, len(bags.values)
        of_counts = [bags.each, bags.each, bags.each * slot_num] if len(counts) else []
    if first != 0:
        raise ValueError(f"{layer}: offsets must start at 0, but offsets[0] is {first}")
    if (len(offsets) - 1) % slot_num != 0:
        raise ValueError(
            f"{layer}: the number of bags must be a multiple of slot_num={slot_num}, "
            f"got {len(offsets) - 1}"
        )
    if of_counts:
        low, high = of_counts[:2]
        if low < 0:
            b = int((counts < 0).nonzero()[0])
            raise ValueError(
                f"{layer}: offsets must not decrease, but offsets[{b}] is {int(offsets[b])} and "
                f"offsets[{b + 1}] is {int(offsets[b + 1])}"
            )
        if high > max_nnz:
            b = int((counts > max_nnz).nonzero()[0])
            raise ValueError(
                f"{layer}: bag {b} has {int(counts[b])} keys, more than max_nnz={max_nnz}"
            )
    if last != len(bags.values):
        raise ValueError(
            f"{layer}: offsets must end at len(values)={len(bags.values)}, but offsets[-1] is "
            f"{last} (the end is included, as with include_last_offset=True)"
        )
    if max_feature_num is not None and by_sample is not None and of_counts[2] > max_feature_num:
        sample = int((by_sample > max_feature_num).nonzero()[0])
        raise ValueError(
            f"{layer}: sample {sample} has {int(by_sample[sample])} keys, more than "
            f"max_feature_num={max_feature_num}"
        )
    return replace(bags, offsets=offsets)
