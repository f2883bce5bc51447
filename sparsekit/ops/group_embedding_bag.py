"""Pools bags from many tables in one call; `_group_gradients` computes the gradients."""

import torch
from torch.autograd.graph import increment_version

from ._group import TENSORS, Tensors
from ._op import Op

_out = Op("group_embedding_bag_out", {})
_pool = Op("group_embedding_bag_", TENSORS)


def group_embedding_bag_(
    outs: Tensors,
    weights: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    key_starts: torch.Tensor | None = None,
    keys: Tensors = (),
    seeds: Tensors = (),
    initializers: torch.Tensor | None = None,
) -> None:
    """Pool the bags of all features into outs, each bag as `embedding_bag` does.

    ``sparsekit/ops/_group.py`` describes features and entries. After `group_find_or_insert_`, pass
    its results ``inverse`` as index, ``rows`` and ``counts``. After `group_find`, pass its result
    ``rows`` as index, and None for rows and counts; a negative index then gives zeros or, with
    initializers, the initial vector of its key.

    Args:
        outs: contiguous, any shape, in the dtype of weights. Elements that belong to no bag are
            left unchanged.
        weights: float32, float64 or bfloat16 ``[num_rows, dim]`` for each table, all of one dtype.
            The rows may have any stride, and may overlap.
        index: int32 with one element per entry.
        rows: int32 with one element per entry, or None.
        counts: int64 ``[T]``, or None.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.
        sample_weights: empty, or for each source ``[n]``, float64 for float64 rows, else float32;
            an empty tensor for a source without weights.
        key_starts: int64 ``[F]``, as `group_find` returns it; needed for sample_weights and keys.
        keys: int64 or int32 ``[n]`` for each source; needed for initializers.
        seeds: int64 ``[1]`` for each table, the seed of its initial vectors.
        initializers: float64 ``[T, 3]`` on the CPU, or None.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a mix of devices, or bad features or bags; a feature whose
            vectors overlap or do not fit their tensor; or an element of outs shares memory with
            another argument.
        IndexError: an index or a row out of range; outs is then undefined.
    """
    _pool(
        outs, weights, index, rows, counts, bags, features, sample_weights, key_starts, keys, seeds,
        initializers,
    )  # fmt: skip
    increment_version(outs)


@_out.fake
def _(like: torch.Tensor, num_elements: int) -> torch.Tensor:
    return like.new_empty([num_elements])


@_pool.fake
def _() -> None:
    return None
