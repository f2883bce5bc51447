"""Makes rows, indexes and checksums for files, in NumPy arrays, with the serving library."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _library
from .format import BUCKET, ROW_FORMATS

_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def _function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_library.load(), name)
    function.restype, function.argtypes = result, arguments
    return function


def row_format(name: str, word: str) -> int:
    """Return the number that stands for a row format in files; errors begin with ``name``.

    Raises:
        ValueError: there is no such format.
    """
    if word not in ROW_FORMATS:
        raise ValueError(f"{name}: rows must be one of {', '.join(ROW_FORMATS)}; got {word!r}")
    return ROW_FORMATS.index(word)


def row_bytes(word: str, dim: int) -> int:
    """Return the size of a row in bytes; ``word`` is one of `ROW_FORMATS`."""
    function = _function("sk_row_bytes", _NUMBER, ctypes.c_int32, _NUMBER)
    return int(function(row_format("row_bytes", word), dim))


class RowError(ValueError):
    """Raised when a format cannot hold a row.

    Attributes:
        row: position of the row.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row} {reason}")
        self.row = row
        self.reason = reason


def encode_rows(vectors: npt.ArrayLike, word: str) -> np.ndarray:
    """Encode vectors as rows of a file.

    Args:
        vectors: ``[n, dim]``, converted to float32.
        word: one of `ROW_FORMATS`.

    Returns:
        uint8 ``[n, row_bytes]``.

    Raises:
        RowError: the format cannot hold a row: NaN; infinities, except in float32 and bfloat16;
            finite values that become infinite; for int8 and int4, a scale or bias that float16
            cannot hold.
    """
    given = np.asarray(vectors)
    with np.errstate(over="ignore"):  # infinities are refused below
        rows = np.ascontiguousarray(given, dtype=np.float32)
    n, dim = rows.shape
    out = np.empty((n, row_bytes(word, dim)), dtype=np.uint8)
    bad = _NUMBER(-1)
    function = _function(
        "sk_encode_rows", ctypes.c_int, ctypes.c_int32, _POINTER, _NUMBER, _NUMBER, _POINTER,
        ctypes.POINTER(_NUMBER),
    )  # fmt: skip
    status = function(
        ROW_FORMATS.index(word), rows.ctypes.data, n, dim, out.ctypes.data, ctypes.byref(bad)
    )
    row = bad.value
    if row < 0:
        _library.check(status)
    if given.dtype.itemsize > 4 and row < 0:  # float32 rows may be infinite, so check the source
        became = (np.isinf(rows) & np.isfinite(given)).any(1)
        row = int(became.argmax()) if became.any() else -1
    if row >= 0:
        raise RowError(row, f"cannot be stored as {word}: {_why(given[row], word)}")
    return out


def _why(vector: np.ndarray, word: str) -> str:
    """Describe why a format cannot hold a row."""
    if np.isnan(vector).any():
        return f"column {int(np.isnan(vector).argmax())} is nan"
    least, most = float(vector.min()), float(vector.max())
    if word in ("int8", "int4"):
        return f"its values from {least:.6g} to {most:.6g} are beyond the range of float16"
    worst = most if most > -least else least
    return f"{worst:.6g} is beyond its range"


def decode_rows(rows: np.ndarray, word: str, dim: int) -> np.ndarray:
    """Decode rows of a file, uint8 ``[n, row_bytes]``, to float32 ``[n, dim]``.

    Raises:
        ValueError: the rows have the wrong shape or dtype.
    """
    wanted = row_bytes(word, dim)
    if rows.dtype != np.uint8 or rows.shape[1:] != (wanted,):
        raise ValueError(
            f"decode_rows: rows must be uint8 [n, {wanted}], got {rows.dtype} {list(rows.shape)}"
        )
    rows = np.ascontiguousarray(rows)
    out = np.empty((len(rows), dim), dtype=np.float32)
    function = _function(
        "sk_decode_rows", ctypes.c_int, ctypes.c_int32, _POINTER, _NUMBER, _NUMBER, _POINTER
    )
    status = function(ROW_FORMATS.index(word), rows.ctypes.data, len(rows), dim, out.ctypes.data)
    _library.check(status)
    return out


def num_buckets(num_keys: int) -> int:
    """Return the number of buckets of an index for this number of keys."""
    return int(_function("sk_num_buckets", _NUMBER, _NUMBER)(num_keys))


def build_index(keys: np.ndarray, seed: int, buckets: np.ndarray) -> None:
    """Fill buckets, uint8 ``[num_buckets * 64]``, with an index that maps key i to row i.

    Args:
        keys: int64 ``[n]``.
        seed: seed of the hash function, a signed 64-bit integer.
        buckets: contiguous memory, which the index fills.

    Raises:
        ValueError: a key occurs twice.
        MemoryError: there is not enough memory for the 4 bytes needed per key.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    function = _function(
        "sk_build_index", ctypes.c_int, _POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER
    )
    count = buckets.nbytes // BUCKET.itemsize
    _library.check(function(keys.ctypes.data, len(keys), seed, buckets.ctypes.data, count))


def crc32(data: bytes | memoryview | np.ndarray, crc: int = 0) -> int:
    """Return the CRC-32 of bytes, as zlib defines it, continued from ``crc``."""
    view = np.frombuffer(data, dtype=np.uint8) if not isinstance(data, np.ndarray) else data
    function = _function("sk_crc32", ctypes.c_uint32, ctypes.c_uint32, _POINTER, ctypes.c_size_t)
    view = np.ascontiguousarray(view)
    return int(function(crc, view.ctypes.data, view.nbytes))
