"""Calls sk_top_k for one or more queries."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from . import _library
from .inputs import array_of


def best_rows(
    handle: ctypes.c_void_p,
    pin: _library.Pin,
    table: int,
    dim: int,
    queries: Any,
    k: int,
    name: str,
) -> tuple[Any, Any]:
    """Return the keys and scores of the best rows; see `Snapshot.top_k`.

    Args:
        handle: the sk_snapshot.
        pin: version to search.
        table: number of the table.
        dim: length of its vectors.
        queries: see `Snapshot.top_k`, which also lists the errors.
        k: see `Snapshot.top_k`.
        name: start of error messages.
    """
    array = array_of(name, "queries", queries)
    if array.dtype.kind != "f" or array.itemsize > 8:
        raise TypeError(f"{name}: queries must be floating point, got {array.dtype}")
    if array.ndim not in (1, 2) or array.shape[-1] != dim:
        raise ValueError(f"{name}: queries must be [{dim}] or [n, {dim}], got {list(array.shape)}")
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"{name}: k must be an int, got {type(k).__name__}")
    if not 1 <= k < 2**31:
        raise ValueError(f"{name}: k must be in [1, 2**31 - 1], got {k}")
    with np.errstate(over="ignore"):  # the library refuses infinities
        rows = np.ascontiguousarray(array, np.float32).reshape(-1, dim)
    # Callers may pass a huge k to get all rows; memory that is never written to takes no space.
    keys, scores = np.empty(k, np.int64), np.empty(k, np.float32)
    library, found = _library.load(), ctypes.c_int32()
    parts = []
    for row in rows:
        status = library.sk_top_k(
            handle,
            ctypes.byref(pin),
            table,
            row.ctypes.data,
            k,
            keys.ctypes.data,
            scores.ctypes.data,
            ctypes.byref(found),
        )
        _library.check(status)
        parts.append((keys[: found.value].copy(), scores[: found.value].copy()))
    most = max((len(part) for part, _ in parts), default=0)
    all_keys = np.zeros((len(parts), most), np.int64)
    all_scores = np.full((len(parts), most), -np.inf, np.float32)
    for i, (its_keys, its_scores) in enumerate(parts):
        all_keys[i, : len(its_keys)], all_scores[i, : len(its_keys)] = its_keys, its_scores
    results = [each if array.ndim == 2 else each[0] for each in (all_keys, all_scores)]
    if not isinstance(queries, np.ndarray):
        results = [sys.modules["torch"].from_numpy(each) for each in results]
    return results[0], results[1]
