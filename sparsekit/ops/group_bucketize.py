"""Groups keys from many tables by owner, and locates the vectors that owners send back."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import check_int
from ._group import TENSORS, Tensors, bags_like, length_of
from ._op import Op
from .bucketize import MAX_WORLD_SIZE


class _Bucketize(Op):
    def check(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Check the arguments as `Op` does, and the range of world_size."""
        named = super().check(*args, **named)
        check_int("group_bucketize", "world_size", named["world_size"], 1, MAX_WORLD_SIZE)
        return named


_bucketize = _Bucketize("group_bucketize", TENSORS)
_exchange_rows = Op("group_exchange_rows", TENSORS)


def group_bucketize(
    owners: Tensors,
    maps: Sequence[int],
    ends: Sequence[int],
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
    world_size: int,
    distinct: bool = True,
    max_keys_per_rank: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Group the distinct keys of each table by the rank that owns them.

    ``sparsekit/ops/_group.py`` describes sources, features and entries. On CUDA the host does not
    wait for the device.

    Args:
        owners: owner maps, int16 ``[65536]`` each: the rank that owns each virtual shard.
        maps: for each of the T tables, the index of its map in owners; -1 means rank
            ``unsigned(key) % world_size``, as in `bucketize`.
        ends: for each table, the end of its keys' range, which begins at 0; -1 allows any key.
        keys: int64 or int32 ``[n]`` for each source.
        offsets: int64 or int32 ``[bags + 1]`` for each source, or empty.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables. The columns combiner,
            tensor, begin and stride are ignored.
        world_size: number of ranks, 1 to 2048.
        distinct: whether a key that occurs several times in a table is sent once. If False, every
            entry counts as a key of its own.
        max_keys_per_rank: for each table, the number of places for its keys in each rank's part of
            by_owner, at least 1; if empty, the keys are packed without unused places.

    Returns:
        ``by_owner``, int64 with one element per entry: the keys for rank 0, table by table, and
        within a table in order of first occurrence; then the keys for rank 1, and so on. The rest
        is undefined. With max_keys_per_rank, it has ``world_size * sum(max_keys_per_rank)``
        elements, and a table's keys for a rank begin at the first of their places.
        ``counts``, int64 ``[world_size, T]``: how many of each table's keys each rank owns.
        ``numbers``, int64 ``[T]``: the number of keys of each table.
        ``inverse``, int32 with one element per entry: the index of the entry's key among its
        table's keys, in order of first occurrence.
        ``places``, int32 with one element per entry. Starting at the first entry of table t,
        numbers[t] elements belong to the table's keys, in order of first occurrence. Each element
        is the position of its key when the table's keys are listed for rank 0, then for rank 1, and
        so on; the rest of the table's part is undefined. With max_keys_per_rank, the list for each
        rank has max_keys_per_rank[t] positions.
        ``bags`` and ``key_starts`` are as in `group_find`.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or number, a mix of devices, a bad feature, offsets that do not
            rise from 0 to the number of keys, a bag with more keys than max_nnz, a key that owners
            give to a rank that does not exist, or more keys for a rank than places. On CUDA the
            last two errors are raised only if checks are on; otherwise such a key goes to rank 0,
            and a key without a place is left out: its element of places belongs to another key.
        IndexError: a key is outside its table's range.
    """
    results: tuple[torch.Tensor, ...] = _bucketize(
        owners, maps, ends, keys, offsets, features, world_size, distinct, max_keys_per_rank
    )
    return results


def group_exchange_rows(
    places: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    come: torch.Tensor,
    steps: Sequence[int],
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Locate the vectors that owners have sent, as input for `group_embedding_bag_`.

    Args:
        places: int32, as `group_bucketize` returns them.
        bags: int32, as `group_bucketize` returns them.
        features: int64 ``[F, 9]`` on the CPU, as passed to `group_bucketize`.
        come: int64 ``[T, world_size, 2]`` on the CPU. For a table and a rank, the first number is
            the row where the vectors from that rank begin; the second is the number of vectors from
            this and all earlier ranks, at most the table's number of entries if numbers is None.
        steps: for each table, the distance between consecutive vectors, in rows.
        numbers: int64 ``[T]``, the number of keys of each table, as `group_bucketize` returns them;
            None if that is also the number of vectors.

    Returns:
        int32 with one element per entry. Starting at a table's first entry, the elements are the
        rows of its keys' vectors, in order of the keys' first occurrence; the rest is undefined.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a mix of devices, a bad feature; bags that are not in ascending
            order, exceed the length of places, or give a table fewer entries than it has keys; a
            step below 1, or rows that are not in [0, 2^31).
        IndexError: a place >= the number of the table's vectors. On CUDA with checks off, the row
            is -1 instead.
    """
    rows: torch.Tensor = _exchange_rows(places, bags, features, come, steps, numbers)
    return rows


@_bucketize.fake
def _(
    owners: Tensors,
    maps: Sequence[int],
    keys: Tensors,
    offsets: Tensors,
    features: torch.Tensor,
    world_size: int,
    max_keys_per_rank: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    like = keys[0] if keys else owners[0] if owners else features
    entries, tables = length_of(keys), len(maps)
    places_of_all = world_size * sum(max_keys_per_rank) if max_keys_per_rank else entries
    by_owner = like.new_empty([places_of_all], dtype=torch.int64)
    counts = like.new_empty([world_size, tables], dtype=torch.int64)
    numbers = like.new_empty([tables], dtype=torch.int64)
    inverse, places = (like.new_empty([entries], dtype=torch.int32) for _ in range(2))
    bags = bags_like(like, keys, offsets, features)
    return (by_owner, counts, numbers, inverse, places, *bags)


@_exchange_rows.fake
def _(places: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(places, memory_format=torch.contiguous_format)
