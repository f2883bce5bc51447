"""Converts quantised rows between FBGEMM's layouts and the snapshot layout, byte for byte.

=========  ================================  =======================================================
layout     bytes of a row                    where it is used
=========  ================================  =======================================================
snapshot   q, f16 scale, f16 bias            here; ``FloatToFusedNBitRowwiseQuantizedSBHalf``
front      f16 scale, f16 bias, q            weights of ``IntNBitTableBatchedEmbeddingBagsCodegen``
fused      q (8 bits), f32 scale, f32 bias   ``FloatToFused8BitRowwiseQuantized``
=========  ================================  =======================================================

q has one byte per column in int8, and half a byte in int4, with the first column in the low half.
To build a snapshot's table from such rows::

    table = snapshot.table("user", dim, rows="int8", miss="zeros")
    table.append_encoded(keys, fbgemm.from_front(weights, dim, "int8"))
"""

from __future__ import annotations

import numpy as np

from . import encoding

# Size in bytes of a row's scale and bias together, as stored in snapshots.
_SCALES = 4
_BITS = {"int8": 8, "int4": 4}


def to_front(rows: np.ndarray, dim: int, word: str, row_bytes: int | None = None) -> np.ndarray:
    """Move the scale and bias of each row to its front.

    Args:
        rows: rows of a snapshot, uint8 ``[n, row_bytes]``.
        dim: number of elements in a vector.
        word: ``"int8"`` or ``"int4"``.
        row_bytes: size of the result's rows, which are padded with zeros: FBGEMM aligns rows to 16
            bytes on a GPU. None for no padding.

    Returns:
        uint8 ``[n, row_bytes]``.

    Raises:
        ValueError: rows have the wrong shape or dtype, or row_bytes is too small.
    """
    size = _size(dim, word)
    rows = _checked("to_front", rows, size, size)
    wanted = size if row_bytes is None else row_bytes
    if wanted < size:
        raise ValueError(f"to_front: row_bytes must be >= {size} for dim {dim}, got {wanted}")
    out = np.zeros((len(rows), wanted), np.uint8)
    out[:, :_SCALES], out[:, _SCALES:size] = rows[:, -_SCALES:], rows[:, :-_SCALES]
    return out


def from_front(rows: np.ndarray, dim: int, word: str) -> np.ndarray:
    """Move the scale and bias of each row from its front to its end; see `to_front`.

    Args:
        rows: uint8 ``[n, row_bytes]``; bytes beyond those needed for dim columns are dropped.
        dim: number of elements in a vector.
        word: ``"int8"`` or ``"int4"``.

    Returns:
        Rows of a snapshot, uint8 ``[n, dim + 4]`` or ``[n, ceil(dim / 2) + 4]``.

    Raises:
        ValueError: rows have the wrong shape or dtype, or a scale or bias is not finite.
    """
    size = _size(dim, word)
    rows = _checked("from_front", rows, size, None)
    out = np.concatenate([rows[:, _SCALES:size], rows[:, :_SCALES]], axis=1)
    _refuse_not_finite("from_front", _scales_of(out))
    return out


def to_fused(rows: np.ndarray) -> np.ndarray:
    """Widen the scale and bias of int8 rows to float32, without loss.

    Args:
        rows: rows of a snapshot, uint8 ``[n, dim + 4]``.

    Returns:
        uint8 ``[n, dim + 8]``; FBGEMM decodes them to the same vectors.

    Raises:
        ValueError: rows have the wrong shape or dtype.
    """
    rows = _checked("to_fused", rows, _SCALES + 1, None)
    scales = _scales_of(rows).astype("<f4").view(np.uint8)
    return np.concatenate([rows[:, :-_SCALES], scales], axis=1)


def from_fused(rows: np.ndarray) -> np.ndarray:
    """Narrow scale and bias to float16 without loss, which always works after `to_fused`.

    Rows quantised by FBGEMM have scales that float16 cannot represent. Rounding them here would
    silently change the vectors by more than quantisation does; `requantize_fused` rounds them.

    Args:
        rows: uint8 ``[n, dim + 8]``.

    Returns:
        Rows of a snapshot in int8, uint8 ``[n, dim + 4]``.

    Raises:
        ValueError: rows have the wrong shape or dtype, or a scale or bias is not a finite float16
            number.
    """
    rows = _checked("from_fused", rows, 2 * _SCALES + 1, None)
    wide = np.ascontiguousarray(rows[:, -2 * _SCALES :]).view("<f4")
    _refuse_not_finite("from_fused", wide)
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f2")
    inexact = (narrow.astype("<f4") != wide).any(1)
    if inexact.any():
        row = int(inexact.argmax())
        raise ValueError(
            f"from_fused: row {row} has scale {wide[row, 0]:.9g} and bias {wide[row, 1]:.9g}, "
            f"which are not both float16 numbers; requantize_fused decodes and quantises rows anew"
        )
    return np.concatenate([rows[:, : -2 * _SCALES], narrow.view(np.uint8)], axis=1)


def requantize_fused(rows: np.ndarray, word: str = "int8") -> np.ndarray:
    """Decode rows whose scale and bias are float32, and re-encode their vectors.

    Vectors change by up to the bound in docs/serving_format.md.

    Args:
        rows: uint8 ``[n, dim + 8]``.
        word: row format of the result.

    Returns:
        Rows of a snapshot, uint8 ``[n, row_bytes]``.

    Raises:
        ValueError: rows have the wrong shape or dtype, or the format cannot hold a row.
    """
    rows = _checked("requantize_fused", rows, 2 * _SCALES + 1, None)
    wide = np.ascontiguousarray(rows[:, -2 * _SCALES :]).view("<f4")
    vectors = rows[:, : -2 * _SCALES].astype(np.float32) * wide[:, :1] + wide[:, 1:]
    return encoding.encode_rows(vectors, word)


def _size(dim: int, word: str) -> int:
    """Return the size in bytes of a row whose scale and bias are float16."""
    if word not in _BITS:
        raise ValueError(f"FBGEMM has rows of {' and '.join(_BITS)}; got {word!r}")
    return encoding.row_bytes(word, dim)


def _checked(function: str, rows: np.ndarray, least: int, most: int | None) -> np.ndarray:
    rows = np.asarray(rows)
    fits = rows.ndim == 2 and rows.shape[1] >= least and (most is None or rows.shape[1] <= most)
    if rows.dtype != np.uint8 or not fits:
        wanted = f"{least}" if most == least else f"at least {least}"
        raise ValueError(
            f"{function}: rows must be uint8 [n, {wanted}], got {rows.dtype} {list(rows.shape)}"
        )
    return rows


def _scales_of(rows: np.ndarray) -> np.ndarray:
    """Return scales and biases of a snapshot's rows, float16 ``[n, 2]``."""
    return np.ascontiguousarray(rows[:, -_SCALES:]).view("<f2")


def _refuse_not_finite(function: str, scales: np.ndarray) -> None:
    bad = ~np.isfinite(scales).all(1)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"{function}: row {row} has scale {scales[row, 0]} and bias {scales[row, 1]}, which "
            f"must be finite"
        )
