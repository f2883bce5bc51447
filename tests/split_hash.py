"""Computes the columns that `SplitHashEncoder` should give to a value, and those that it gives."""

import math

from xxh64_oracle import unsigned


def expected_columns(value, length, splits=4, salt=0):
    """Return a value's columns by the formula, computed with Python integers."""
    h, bucket = unsigned(value, salt), max(32, 4 * math.ceil(math.sqrt(length)))
    if splits == 1:
        return [h % bucket]
    w = bucket // 4
    return [k * w + (h >> (48 - 16 * k) & 0xFFFF) % w for k in range(4)]


def columns_of(encoder, columns):
    """Encode columns of values; return int64 [n, row_nnz]."""
    keys, offsets = encoder.encode(columns, to="bags")
    n = len(offsets) - 1
    assert offsets.tolist() == list(range(0, n * encoder.row_nnz + 1, encoder.row_nnz))
    return keys.view(n, encoder.row_nnz)
