"""Requests for lookups in a snapshot, and the arrays that the library reads and writes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._library import COMBINERS
from .inputs import Keys, read_keys


@dataclass(frozen=True)
class TableInfo:
    """Describes a table in a snapshot.

    Attributes:
        name: name of the table.
        rows: number of rows in use.
        dim: length of a vector.
        row_format: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or ``"int4"``.
        row_bytes: size of a row in bytes.
        miss: how lookups treat a key without a row: its ``"initial"`` vector in training,
            ``"zeros"``, a ``"fallback"`` row that unknown keys share, or an ``"error"``.
        combiner: how the layer pools: ``"sum"``, ``"mean"``, ``"sqrtn"``, ``"max"`` or ``"none"``.
        padding_key: key that lookups leave out; None if there is none.
    """

    name: str
    rows: int
    dim: int
    row_format: str
    row_bytes: int
    miss: str
    combiner: str
    padding_key: int | None


@dataclass(frozen=True)
class Request:
    """Keys to look up in one table; `Snapshot.lookup` explains the fields."""

    table: str
    keys: Any
    offsets: Any = None
    weights: Any = None
    combiner: str | None = None
    found: bool = False


class ReadRequest:
    """A request for a table in a snapshot, read and checked.

    Attributes:
        number: number of the table.
        combiner: number of the combiner.
        keys: keys, bags and weights.
        bags: number of bags; 0 if each key is a bag of its own.
        vectors, dim: shape of the result; without pooling, `vectors` is the number of keys.
        founds: number of keys if the result must tell which keys have a row; otherwise -1.
    """

    def __init__(self, path: str, number: int, info: TableInfo, request: Request) -> None:
        name = f"{path}: table {request.table!r}"
        self.number = number
        self.keys: Keys = read_keys(name, request.keys, request.offsets, request.weights)
        combiner = request.combiner
        if combiner is None:
            combiner = "none" if self.keys.is_plain else info.combiner
        if combiner not in COMBINERS:
            raise ValueError(
                f"{name}: combiner must be one of {', '.join(COMBINERS)}; got {combiner!r}"
            )
        if self.keys.weights is not None and combiner in ("none", "max"):
            raise ValueError(f"{name}: weights must be None, as combiner is {combiner!r}")
        self.combiner = COMBINERS.index(combiner)
        self.dim = info.dim
        self.bags = 0 if self.keys.offsets is None else len(self.keys.offsets) - 1
        self._is_each = combiner == "none" or self.keys.offsets is None
        self.vectors = len(self.keys.values) if self._is_each else self.bags
        self._with_found = request.found
        self.founds = len(self.keys.values) if request.found else -1

    def result(self, out: np.ndarray, found: np.ndarray) -> Any:
        """Return the vectors or, if the request says so, a pair of the vectors and `found`."""
        keys, dim = self.keys, self.dim
        if self._is_each:
            out = out.reshape(*keys.each, dim)
        elif keys.slot_major:
            samples, slots = keys.shape
            out = np.ascontiguousarray(out.reshape(slots, samples, dim).transpose(1, 0, 2))
        else:
            out = out.reshape(*keys.shape, dim)
        parts = [out, found.reshape(keys.each)] if self._with_found else [out]
        if keys.is_torch:
            parts = [sys.modules["torch"].from_numpy(part) for part in parts]
        return tuple(parts) if self._with_found else parts[0]


def joined(arrays: list[np.ndarray | None]) -> tuple[np.ndarray | None, list[int]]:
    """Join 1-D arrays; return the joined array, and each array's address in it (0 for None)."""
    given = [array for array in arrays if array is not None]
    if not given:
        return None, [0] * len(arrays)
    whole = given[0] if len(given) == 1 else np.concatenate(given)
    address, addresses = whole.ctypes.data, []
    for array in arrays:
        addresses.append(0 if array is None else address)
        address += 0 if array is None else array.nbytes
    return whole, addresses


def room(counts: list[int], dtype: Any) -> tuple[list[np.ndarray], list[int]]:
    """Return uninitialized arrays of these lengths, and each address (0 for a negative length)."""
    whole = np.empty(sum(max(count, 0) for count in counts), dtype)
    address, begin, parts, addresses = whole.ctypes.data, 0, [], []
    for count in counts:
        addresses.append(address + begin * whole.itemsize if count >= 0 else 0)
        parts.append(whole[begin : begin + max(count, 0)])
        begin += max(count, 0)
    return parts, addresses
