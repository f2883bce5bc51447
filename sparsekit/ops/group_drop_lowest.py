"""Drops the rows with the lowest scores from many tables."""

from typing import cast

import torch
from torch.autograd.graph import increment_version

from ._group import TENSORS, Tensors
from ._op import Of, Op

_drop = Op(
    "group_drop_lowest_",
    {
        **{name: TENSORS[name] for name in ("buckets", "hash_seeds", "sizes")},
        "initial": Of(None, 0, on_cpu=True),
        "lists": Of((torch.int32,), 1),
        "tables": Of((torch.int64,), 2, on_cpu=True),
    },
)


def group_drop_lowest_(
    buckets: Tensors,
    hash_seeds: Tensors,
    sizes: Tensors,
    tensors: Tensors,
    initial: Tensors,
    lists: Tensors,
    tables: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop the rows with the lowest scores from each table, on the CPU.

    The results are those of `lowest_rows`, then `compact_rows`, `hash_table_renumber_` and
    `move_rows_`, but only the buckets of keys that leave or move are written, and one call serves
    many tables. Tables on other devices are left unchanged.

    Args:
        buckets: int64 ``[num_buckets, 8]`` for each table, changed in place.
        hash_seeds: int64 ``[1]`` for each table.
        sizes: int64 ``[1]`` for each table, its number of rows in use, changed in place.
        tensors: table by table, all tensors with a row for each row of the table, changed in
            place. Each table's first tensor is its scores, int64 ``[capacity]``. Rows must be
            contiguous, but there may be gaps between them.
        initial: one element for each of ``tensors``, in its dtype, on the CPU: the value of rows
            that have become free.
        lists: table by table, lists of row numbers, int32 ``[n]`` each, changed in place to the
            rows' new numbers, or -1 for a dropped row. Numbers outside [0, size) stay as they are.
        tables: int64 ``[T, 7]`` on the CPU; the columns are a `ScorePolicy`, LRU or LFU;
            halve_every; the clock at which LFU counts are read; the number of rows to drop; the
            number of the table's ``tensors``; the number of its ``lists``; and how many of them
            have rows that must stay. These lists come first. If fewer rows need not stay than
            are to be dropped, all of those are dropped.

    Returns:
        dropped: int64 ``[T]`` on the CPU, the number of rows that each table has lost; -1 for
            tables that are not on the CPU, which are unchanged.
        lost: int64 ``[len(lists)]`` on the CPU, 1 for a list with a dropped row, otherwise 0.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a mix of devices, a number out of range, or arguments that share
            memory. Nothing has been changed.
        RuntimeError: another thread is inserting into one of the tables.
    """
    results = _drop(buckets, hash_seeds, sizes, tensors, initial, lists, tables)
    increment_version([*buckets, *sizes, *tensors, *lists])
    return cast(tuple[torch.Tensor, torch.Tensor], results)


@_drop.fake
def _(lists: Tensors, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tables.new_empty([len(tables)]), tables.new_empty([len(lists)])
