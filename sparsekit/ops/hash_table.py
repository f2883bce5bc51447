"""Ops on a hash table's plain tensors; `sparsekit.HashTable` wraps them.

``buckets`` is int64 ``[num_buckets, 8]``. A bucket takes 64 bytes: 5 int64 keys, 5 int32 rows (-1
in an empty place) and an int32 count of the keys that found the bucket full. ``hash_seed`` is int64
``[1]``, a random number that determines the bucket of each key, so it is valid for these buckets
only. ``size`` is int64 ``[1]``, the number of rows in use.
"""

import torch
from torch.autograd.graph import increment_version

from ._checks import KEY_DTYPES
from ._op import Of, Op

SLOTS_PER_BUCKET = 5
_TENSORS = {
    "buckets": Of((torch.int64,), 2),
    "to": Of((torch.int64,), 2),
    "hash_seed": Of((torch.int64,), 1),
    "size": Of((torch.int64,), 1),
    "keys": Of(KEY_DTYPES, 1),
    "new_rows": Of((torch.int32,), 1),
    "num_keys": Of((torch.int64,), None),
}
_clear = Op("hash_table_clear_", _TENSORS)
_find = Op("hash_table_find", _TENSORS)
_find_or_insert = Op("hash_table_find_or_insert_", _TENSORS)
_keys = Op("hash_table_keys", _TENSORS)
_copy = Op("hash_table_copy_", _TENSORS)
_renumber = Op("hash_table_renumber_", _TENSORS)


def hash_table_clear_(buckets: torch.Tensor) -> None:
    """Empty all buckets, in place."""
    _clear(buckets)
    increment_version(buckets)


def hash_table_find(
    buckets: torch.Tensor, hash_seed: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Find the rows of keys.

    Args:
        buckets: int64 ``[num_buckets, 8]``.
        hash_seed: int64 ``[1]``, the seed of the buckets.
        keys: int64 or int32 ``[n]``, any values.

    Returns:
        The rows, int64 ``[n]``; -1 for an absent key.

    Raises:
        TypeError: keys has a wrong dtype.
        ValueError: a wrong shape or a mix of devices.
    """
    return _find(buckets, hash_seed, keys)


def hash_table_find_or_insert_(
    buckets: torch.Tensor,
    hash_seed: torch.Tensor,
    size: torch.Tensor,
    keys: torch.Tensor,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find rows of keys; absent keys get rows size, size + 1, ... in order of first occurrence.

    If the rows would exceed capacity, nothing is inserted: buckets and size are left unchanged.

    Args:
        buckets: int64 ``[num_buckets, 8]``, changed in place.
        hash_seed: int64 ``[1]``, the seed of the buckets.
        size: int64 ``[1]``, changed in place.
        keys: int64 or int32 ``[n]``, any values, repeats allowed.
        capacity: largest number of rows, at most ``5 * num_buckets`` and below 2^31.

    Returns:
        ``rows`` int64 ``[n]`` and ``status`` int64 ``[2]``. The status holds the size before the
        call, which is the first new row, and the number of elements of keys that were refused for
        lack of free rows (their rows are -1).

    Raises:
        TypeError: keys has a wrong dtype.
        ValueError: a wrong shape, capacity or size, a mix of devices, or buckets or size share
            memory with another argument.
        RuntimeError: another thread is inserting into this table.
    """
    result = _find_or_insert(buckets, hash_seed, size, keys, capacity)
    increment_version([buckets, size])
    return result


def hash_table_keys(
    buckets: torch.Tensor, hash_seed: torch.Tensor, size: torch.Tensor
) -> torch.Tensor:
    """Return the keys in the table, int64 ``[size]``, in row order.

    Raises:
        ValueError: the table is damaged: it does not have exactly one key for each row, the counts
            do not match its keys, or hash_seed does not match the buckets.
    """
    return _keys(buckets, hash_seed, size)


def hash_table_copy_(
    to: torch.Tensor, buckets: torch.Tensor, hash_seed: torch.Tensor, rows: int
) -> None:
    """Insert the keys in buckets into another table, with their rows; this is how a table grows.

    Args:
        to: int64 ``[other num_buckets, 8]``, changed in place; must not contain any of the keys.
        buckets: int64 ``[num_buckets, 8]``, all or some consecutive buckets of a table.
        hash_seed: int64 ``[1]``, the seed of both tables.
        rows: only keys whose row is below this number are inserted.

    Raises:
        ValueError: a wrong shape, a mix of devices, the tables share memory, or ``to`` has no room
            for all keys; some of them have then been inserted.
        RuntimeError: another thread is inserting into ``to``.
    """
    _copy(to, buckets, hash_seed, rows)
    increment_version(to)


def hash_table_renumber_(
    buckets: torch.Tensor, hash_seed: torch.Tensor, new_rows: torch.Tensor
) -> None:
    """Give keys new row numbers or remove them, in one pass over the buckets.

    The key of row r gets the row ``new_rows[r]``, or is removed if that is -1. The caller sets the
    table's size. The table stays valid if the remaining keys get the rows 0, 1, ..., each once.

    Args:
        buckets: int64 ``[num_buckets, 8]``, changed in place.
        hash_seed: int64 ``[1]``, the seed of the buckets.
        new_rows: int32 ``[n]``, values in [-1, n), where n is the number of rows in use.

    Raises:
        TypeError: new_rows has a wrong dtype.
        ValueError: a wrong shape, a mix of devices, buckets share memory with another argument, or
            a value of new_rows is out of range. On the CPU, nothing has been changed; on CUDA, the
            key of that row has been removed.
        RuntimeError: another thread is inserting into this table.
    """
    _renumber(buckets, hash_seed, new_rows)
    increment_version(buckets)


@_clear.fake
def _() -> None:
    return None


@_find.fake
def _(keys: torch.Tensor) -> torch.Tensor:
    return keys.new_empty(keys.shape, dtype=torch.int64)


@_find_or_insert.fake
def _(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return keys.new_empty(keys.shape, dtype=torch.int64), keys.new_empty([2], dtype=torch.int64)


@_copy.fake
def _() -> None:
    return None


@_renumber.fake
def _() -> None:
    return None


@_keys.fake
def _(buckets: torch.Tensor) -> torch.Tensor:
    return buckets.new_empty([torch.library.get_ctx().new_dynamic_size()])
