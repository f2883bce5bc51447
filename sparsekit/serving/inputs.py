"""Converts keys, in any form that a layer accepts, to NumPy arrays for lookups in a snapshot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

FORMS = (
    "a NumPy array or a tensor on the CPU, (values, offsets), a CSR matrix of scipy, or, with "
    "torch, a sparse COO or CSR tensor, a jagged nested tensor, a JaggedTensor or a "
    "KeyedJaggedTensor"
)


@dataclass
class Keys:
    """Bags of keys: bag b holds ``values[offsets[b]:offsets[b + 1]]``."""

    values: np.ndarray  # int64 [n]
    offsets: np.ndarray | None  # int64 [bags + 1]; None if each key is a bag
    weights: np.ndarray | None  # float32 [n]
    shape: tuple[int, ...]  # shape of the pooled result without its last dimension
    each: tuple[int, ...]  # the same for a result that has a vector for each key
    is_torch: bool
    slot_major: bool = False  # the bags of each slot are contiguous; there are shape[1] slots

    @property
    def is_plain(self) -> bool:
        """Return whether these are single keys, without bags or weights."""
        return self.offsets is None and self.weights is None


def read_keys(name: str, keys: Any, offsets: Any, weights: Any) -> Keys:
    """Read keys, their bags and their weights in any form.

    Raises:
        TypeError: keys have none of the accepted forms, or an array has the wrong dtype.
        ValueError: a shape or device is wrong, or weights do not match the keys.
    """
    if isinstance(keys, np.ndarray) or _is_dense(keys):
        if offsets is None:
            return _dense(name, keys, weights)
        keys = (keys, offsets)
    elif offsets is not None:
        raise ValueError(f"{name}: offsets must be None, as keys has bags of its own")
    if isinstance(keys, (tuple, list)) and len(keys) == 2:
        values, ends = keys
        return _flat(name, values, ends, weights)
    if getattr(keys, "format", None) == "csr" and hasattr(keys, "indptr"):
        if weights is not None:
            raise ValueError(f"{name}: keys has weights of its own; pass no weights")
        if len(keys.shape) != 2:
            raise ValueError(f"{name}: a feature matrix must be 2-D, got {tuple(keys.shape)}")
        return _flat(name, keys.indices, keys.indptr, _real(name, keys.data))
    torch = sys.modules.get("torch")
    is_jagged = all(callable(getattr(keys, part, None)) for part in ("values", "offsets"))
    if torch is None or not (isinstance(keys, torch.Tensor) or is_jagged):
        raise TypeError(f"{name}: keys must be {FORMS}; got {type(keys).__name__}")
    return _of_torch(name, keys, weights)


def _real(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biuf" or values.itemsize > 8:
        raise TypeError(f"{name}: a feature matrix must have real numbers, got {values.dtype}")
    return values.astype(np.float32)


def _is_dense(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_nested
    )


def array_of(name: str, argument: str, value: Any) -> np.ndarray:
    """Return an array or a dense tensor as a NumPy array, without copying if possible."""
    if isinstance(value, np.ndarray):
        return value
    if not _is_dense(value):
        raise TypeError(
            f"{name}: {argument} must be a NumPy array or a dense tensor, got "
            f"{type(value).__name__}"
        )
    if value.device.type != "cpu":
        raise ValueError(f"{name}: {argument} must be on the CPU, but is on {value.device}")
    value = value.detach()
    torch = sys.modules["torch"]
    if value.dtype == torch.bfloat16:  # NumPy has no such type
        value = value.to(torch.float32)
    return value.numpy()


def _integers(name: str, argument: str, value: Any) -> np.ndarray:
    array = array_of(name, argument, value)
    if array.dtype.kind != "i" or array.itemsize not in (4, 8):
        raise TypeError(f"{name}: {argument} must be int64 or int32, got {array.dtype}")
    return np.ascontiguousarray(array, np.int64)


def _floats(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    if value is None:
        return None
    array = array_of(name, "weights", value)
    if array.dtype.kind != "f" or array.itemsize > 8:
        raise TypeError(f"{name}: weights must be floating point, got {array.dtype}")
    if array.shape not in (shape, (int(np.prod(shape)),)):
        raise ValueError(
            f"{name}: weights must have one weight for each key, flat or in the shape {shape}; "
            f"got shape {array.shape}"
        )
    return np.ascontiguousarray(array, np.float32).reshape(-1)


def _dense(name: str, keys: Any, weights: Any) -> Keys:
    array = _integers(name, "keys", keys)
    shape = array.shape
    flat = _floats(name, weights, shape)
    is_torch = not isinstance(keys, np.ndarray)
    if array.ndim < 2:
        return Keys(array.reshape(-1), None, flat, shape, shape, is_torch)
    bags, width = int(np.prod(shape[:-1])), shape[-1]
    offsets = np.arange(bags + 1, dtype=np.int64) * width
    return Keys(array.reshape(-1), offsets, flat, shape[:-1], shape, is_torch)


def _flat(name: str, values: Any, offsets: Any, weights: Any, slots: int | None = None) -> Keys:
    is_torch = not isinstance(values, np.ndarray)
    keys = _integers(name, "keys", values)
    ends = _integers(name, "offsets", offsets)
    for argument, part in (("keys", keys), ("offsets", ends)):
        if part.ndim != 1:
            raise ValueError(f"{name}: {argument} must be 1-D, got shape {part.shape}")
    if len(ends) == 0:
        raise ValueError(f"{name}: offsets must start at 0, but offsets[0] is missing")
    bags = len(ends) - 1
    shape = (bags,) if slots is None else (bags // slots, slots)
    flat = _floats(name, weights, keys.shape)
    return Keys(keys, ends, flat, shape, keys.shape, is_torch, slots is not None)


def _of_torch(name: str, keys: Any, weights: Any) -> Keys:
    """Read the forms that only torch has, using the layers' parser."""
    import torch

    from ..lookup.inputs import read_bags

    bags = read_bags(keys, weights, name, torch.device("cpu"), matrix=True)
    slots = bags.slots if bags.slot_major else None
    if slots is not None and (slots == 0 or bags.count % slots):
        raise ValueError(
            f"{name}: the number of bags must be a multiple of the {slots} keys of the "
            f"KeyedJaggedTensor, got {bags.count}"
        )
    if bags.offsets is None:
        raise TypeError(f"{name}: keys must be {FORMS}; got {type(keys).__name__}")
    return _flat(name, bags.values, bags.offsets, bags.weights, slots)
