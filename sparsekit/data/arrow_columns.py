"""Checks the types of Arrow columns, and converts the columns to keys and numbers.

Imported only to read Parquet, so that other code works without pyarrow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute, types

from ..hashing import xxh64
from .columns import Keys

# Largest number of decimal digits such that every number of that length fits in an int64.
_INT64_DIGITS = 18


def check_type(place: str, kind: Any, keys: Keys | None) -> None:
    """Raise ValueError if a column cannot be converted to keys, or to numbers if keys is None.

    Args:
        place: start of the error message, which names the column.
        kind: the column's pyarrow type.
        keys: how the column's values become keys; None for a column of numbers.
    """
    if keys is None:
        if not (_is_plain(kind) or types.is_floating(kind) or types.is_decimal(kind)):
            raise ValueError(
                f"{place} must have numbers, booleans, decimals or dates, but has {kind}"
            )
        return
    item = kind.value_type if is_list(kind) else kind
    if types.is_dictionary(item):
        item = item.value_type
    if _is_plain(item):
        return
    if keys.kind == "hash":
        if not (_is_text(item) or types.is_decimal(item)):
            raise ValueError(
                f"{place} must have integers, strings, binary, booleans, dates or decimals, or "
                f"lists of them, but has {kind}"
            )
    elif not types.is_decimal(item) or item.scale != 0 or item.precision > _INT64_DIGITS:
        raise ValueError(
            f"{place} must have integers, booleans, dates or whole decimals of at most "
            f"{_INT64_DIGITS} digits for kind 'int', or lists of them, but has {kind}"
        )


def floats(column: Any, missing: float) -> np.ndarray:
    """Copy a column to float32; null and NaN become `missing`, dates become days since 1970."""
    column = compute.cast(_days(column), pa.float32(), safe=False)
    numbers = np.array(column.to_numpy(), np.float32)
    numbers[np.isnan(numbers)] = missing
    return numbers


def bags(column: Any, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of all bags in a column, and the number of keys in each bag."""
    column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if is_list(column.type):
        lengths = torch.from_numpy(
            compute.fill_null(compute.list_value_length(column), 0).to_numpy(False).astype("q")
        )
        items = column.flatten()
        if items.null_count:
            ends = torch.cumsum(lengths, 0)
            there = np.concatenate([[0], np.cumsum(items.is_valid().to_numpy(False))])
            lengths = torch.from_numpy(there[ends.numpy()] - there[(ends - lengths).numpy()])
            items = items.drop_null()
        empty = lengths == 0
        values = _keys(items, keys)
    else:
        valid = torch.from_numpy(column.is_valid().to_numpy(False).astype(bool))
        lengths, empty = valid.long(), ~valid
        values = _keys(column.drop_null() if column.null_count else column, keys)
    if keys.missing is None or not empty.any():
        return values, lengths
    places = (torch.cumsum(lengths, 0) - lengths)[empty].numpy()
    filled = np.insert(values.numpy(), places, keys.missing)
    return torch.from_numpy(filled), lengths + empty


def without_views(table: Any) -> Any:
    """Convert string views to strings, since Arrow cannot select rows of views."""
    for i, column in enumerate(table.columns):
        if (kind := _without_views(column.type)) != column.type:
            table = table.set_column(i, table.column_names[i], column.cast(kind))
    return table


def is_list(kind: Any) -> bool:
    """Return whether a type is a list type; each list becomes a bag."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_plain(kind: Any) -> bool:
    """Return whether a type can be converted both to numbers and to keys of every kind."""
    tests = types.is_integer, types.is_boolean, types.is_date, types.is_null
    return any(test(kind) for test in tests)


def _is_text(kind: Any) -> bool:
    strings = types.is_string, types.is_large_string, types.is_string_view
    binary = types.is_binary, types.is_large_binary, types.is_binary_view
    return any(test(kind) for test in (*strings, *binary, types.is_fixed_size_binary))


def _without_views(kind: Any) -> Any:
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if not is_list(kind):
        return kind
    item = _without_views(kind.value_type)
    if item == kind.value_type:
        return kind
    if types.is_fixed_size_list(kind):
        return pa.list_(item, kind.list_size)
    return pa.large_list(item)


def _days(column: Any) -> Any:
    """Convert dates to days since 1970; return other columns unchanged."""
    if not types.is_date(column.type):
        return column
    return compute.cast(compute.cast(column, pa.date32(), safe=False), pa.int32())


def _keys(items: Any, keys: Keys) -> torch.Tensor:
    """Convert an Arrow array without nulls to int64 keys."""
    if types.is_dictionary(items.type) and not _is_text(items.type.value_type):
        items = items.dictionary_decode()
    if keys.kind == "hash":
        return xxh64(_as_in_text(items), keys.seed)
    items = _days(items)
    if types.is_uint64(items.type):
        items = items.view(pa.int64())
    if not types.is_int64(items.type):
        items = items.cast(pa.int64())
    return (
        torch.utils.dlpack.from_dlpack(items) if len(items) else torch.empty(0, dtype=torch.int64)
    )


def _as_in_text(items: Any) -> Any:
    """Convert booleans, decimals and dates to strings or integers, as they appear in text files."""
    if types.is_boolean(items.type):
        return items.cast(pa.uint8())
    if types.is_decimal(items.type):
        return items.cast(pa.string())
    if types.is_date(items.type):
        return items.cast(pa.date32(), safe=False).cast(pa.string())
    return items
