"""Finds the rows of keys in many tables in one call."""

import torch

from ._group import TENSORS, Tensors, bags_like, length_of
from ._op import Op

_find = Op("group_find", TENSORS)
_find_or_insert = Op("group_find_or_insert_", TENSORS)


def group_find(
    buckets: Tensors,
    hash_seeds: Tensors,
    tables: torch.Tensor,
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the row of each entry, without changing any table.

    ``sparsekit/ops/_group.py`` describes tables, sources, features and entries.

    Args:
        buckets: buckets of each hash table, as in `hash_table_find`.
        hash_seeds: seed of each hash table.
        tables: int64 ``[T, 3]`` on the CPU.
        keys: int64 or int32 ``[n]`` for each source.
        offsets: int64 or int32 ``[bags + 1]`` for each source, or empty.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.

    Returns:
        ``rows``, int32 with one element per entry: the row of its key, -1 if the key is absent.
        ``bags``, int32 ``[bags of all sources + 1]``: the entry where each of the features' bags
        begins, feature by feature, then the number of entries; the rest is undefined.
        ``key_starts``, int64 ``[F]``: the position of each feature's first key in its source.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a mix of devices, a bad feature, offsets that do not rise from 0
            to the number of keys, or a bag with more keys than max_nnz.
        IndexError: a key out of the range of a table without a hash table.
    """
    return _find(buckets, hash_seeds, tables, keys, offsets, features)


def group_find_or_insert_(
    buckets: Tensors,
    hash_seeds: Tensors,
    sizes: Tensors,
    weights: Tensors,
    seeds: Tensors,
    tables: torch.Tensor,
    initializers: torch.Tensor,
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
    larger: Tensors = [],  # noqa: B006
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the rows of each table's distinct keys; absent keys are inserted.

    New keys get the next free rows of their table in order of first occurrence, and their initial
    vectors are written there.

    ``sparsekit/ops/_group.py`` describes tables, sources, features and entries.

    Args:
        buckets: buckets of each hash table, as in `hash_table_find_or_insert_`, changed in place.
        hash_seeds: seed of each hash table.
        sizes: number of rows in use in each hash table, changed in place.
        weights: float32, float64 or bfloat16 ``[at least capacity, dim]`` for each table, all of
            one dtype; new rows are written.
        seeds: int64 ``[1]`` for each table, the seed of its initial vectors.
        tables: int64 ``[T, 3]`` on the CPU.
        initializers: float64 ``[T, 3]`` on the CPU.
        keys: int64 or int32 ``[n]`` for each source.
        offsets: int64 or int32 ``[bags + 1]`` for each source, or empty.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.
        larger: for each hash table that is about to grow, larger buckets with the same seed, into
            which new keys are inserted too; an empty tensor for each other hash table.

    Returns:
        ``rows`` and ``inverse``, int32 with one element per entry, and ``counts``, int64 ``[T]``.
        counts[t] is the number of distinct keys for table t. Their rows, in order of first
        occurrence, are in ``rows``, starting at the table's first entry; the rest of the table's
        part is undefined. inverse[e] is the index of entry e's key among the distinct keys.
        ``bags`` and ``key_starts`` are as in `group_find`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: as for `group_find`; a tensor to change shares memory with another argument; or
            a table is damaged.
        IndexError: as for `group_find`.
        RuntimeError: another thread is inserting into one of the tables, or a table is full. A full
            table is left unchanged; keys of tables that are not full have been inserted.
    """
    # Do not increment the tensors' versions: no backward saves a hash table, and for many tables
    # this would take a tenth of the call's time.
    return _find_or_insert(
        buckets, hash_seeds, sizes, weights, seeds, tables, initializers, keys, offsets, features,
        larger,
    )  # fmt: skip


@_find.fake
def _(keys: Tensors, offsets: Tensors, features: torch.Tensor) -> Tensors:
    like = keys[0] if keys else features
    rows = like.new_empty([length_of(keys)], dtype=torch.int32)
    return (rows, *bags_like(like, keys, offsets, features))


@_find_or_insert.fake
def _(tables: torch.Tensor, keys: Tensors, offsets: Tensors, features: torch.Tensor) -> Tensors:
    like = keys[0] if keys else features
    rows, inverse = (like.new_empty([length_of(keys)], dtype=torch.int32) for _ in range(2))
    counts = like.new_empty([tables.shape[0]], dtype=torch.int64)
    return (rows, inverse, counts, *bags_like(like, keys, offsets, features))
