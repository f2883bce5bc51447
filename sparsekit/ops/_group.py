"""Describes the arguments that the ops on many tables share, and the requirements on them.

**Sources** are two lists of the same length: ``keys``, int64 or int32 ``[n]`` each, and
``offsets``, int64 or int32 ``[bags + 1]`` each, rising from 0 to n. With empty offsets, each bag
has one key.

**features**, int64 ``[F, 9]``, assigns bags to tables. A row describes a run of bags from one
source; its columns are those in `FeatureColumn`:

- ``table``: index of the table; the rows of ``features`` are sorted by it.
- ``source``, ``first_bag``, ``bags``: bags first_bag to first_bag + bags - 1 of that source. A bag
  belongs to at most one feature: if two tables look up the same keys, pass the source twice.
- ``combiner``: a number from `GROUP_COMBINERS`. With ``"none"`` a bag has at most one key, whose
  vector is copied; its weight is ignored.
- ``max_nnz``: largest number of keys in a bag.
- ``tensor``, ``begin``, ``stride``: the output of the feature's bag b is
  ``tensors[tensor].view(-1)[begin + b * stride:][:dim]``; gradients have the same layout.

**tables**, int64 ``[T, 3]``; its columns are:

- ``hash_table``: index into the lists of hash tables, or -1 if keys are row numbers.
- ``capacity``: largest number of rows.
- ``world_size``: without a hash table, keys are in [0, capacity * world_size) and the row of a key
  is key // world_size.

**initializers**, float64 ``[T, 3]``: a number from `DISTRIBUTIONS`, a and b, as in `init_rows_`.

These three tensors are on the CPU, even if the tables are on another device. Make them once and
reuse them.

An **entry** is a key in a feature's bag. Entries are counted feature by feature, so the entries of
a table are contiguous. A tensor with one element per entry has as many elements as there are keys
in all sources; its elements beyond the last entry are undefined.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from ._checks import KEY_DTYPES, ROW_DTYPES
from ._op import Of
from .embedding_bag import COMBINERS


class FeatureColumn(IntEnum):
    """Columns of ``features``."""

    table = 0
    source = 1
    first_bag = 2
    bags = 3
    combiner = 4
    max_nnz = 5
    tensor = 6
    begin = 7
    stride = 8


GROUP_COMBINERS = {**COMBINERS, "none": 3}

Tensors = Sequence[torch.Tensor]

_INT64 = (torch.int64,)
_INT32 = (torch.int32,)
# Dtypes and dimensions of arguments, by name. A name means the same thing in every op on tables.
TENSORS = {
    "features": Of(_INT64, 2, on_cpu=True),
    "tables": Of(_INT64, 2, on_cpu=True),
    "initializers": Of((torch.float64,), 2, on_cpu=True),
    "come": Of(_INT64, 3, on_cpu=True),
    "keys": Of(KEY_DTYPES, 1),
    "offsets": Of(KEY_DTYPES, 1),
    "sample_weights": Of((torch.float32, torch.float64), 1),
    "buckets": Of(_INT64, 2),
    "hash_seeds": Of(_INT64, 1),
    "sizes": Of(_INT64, 1),
    "seeds": Of(_INT64, 1),
    "weights": Of(ROW_DTYPES, 2),
    "grads": Of(ROW_DTYPES, None),
    "owners": Of((torch.int16,), 1),
    "places": Of(_INT32, 1),
    "index": Of(_INT32, 1),
    "rows": Of(_INT32, 1),
    "counts": Of(_INT64, 1),
    "bags": Of(_INT32, 1),
    "key_starts": Of(_INT64, 1),
    "scores": Of(_INT64, 1),
    "policies": Of(_INT64, 2, on_cpu=True),
    "clocks": Of(_INT64, 1),
    "occurrences": Of(_INT64, 1),
}


def split_by_table(
    dims: Sequence[int], counts: Sequence[int], rows: torch.Tensor, sums: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """Split the results of `group_embedding_bag_backward` by table.

    Args:
        dims: row length of each table.
        counts: number of rows of each table.
        rows: the rows of all tables.
        sums: the gradients of all tables; each table's gradients begin at a multiple of 16
            elements.
    """
    if len(dims) == 1:
        return [rows], [sums.view(counts[0], dims[0])]
    sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
    gaps = [-size % 16 for size in sizes[:-1]]
    parts = sums.split([size for pair in zip(sizes, [*gaps, 0], strict=True) for size in pair])
    shaped = zip(parts[::2], counts, dims, strict=True)
    return rows.split(list(counts)), [part.view(count, dim) for part, count, dim in shaped]


def bags_like(
    like: torch.Tensor, keys: Tensors, offsets: Tensors, features: torch.Tensor
) -> Tensors:
    """Return the results ``bags`` and ``key_starts`` for a fake kernel."""
    each = zip(keys, offsets, strict=True)
    count = sum(o.shape[0] - 1 if o.shape[0] else k.shape[0] for k, o in each)
    key_starts = like.new_empty([features.shape[0]], dtype=torch.int64)
    return like.new_empty([count + 1], dtype=torch.int32), key_starts


def length_of(keys: Tensors) -> Any:
    """Return the largest possible number of entries, for fake kernels."""
    return sum(k.shape[0] for k in keys)
