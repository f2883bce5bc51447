"""Pooling of many tables in one call, its gradients, and the step that they are for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ._checks import KEY_DTYPES, ROW_DTYPES, signed_64
from ._group import (
    GroupOp,
    Tensors,
    check_descriptor,
    check_devices,
    check_lists,
    check_numbers,
)

_WEIGHT_DTYPES = (torch.float32, torch.float64)


def _check_pool(
    outs: Tensors,
    weights: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    keys: Tensors,
    seeds: Tensors,
    initializers: torch.Tensor | None,
) -> None:
    op = "group_embedding_bag_"
    lists = {
        "weights": (weights, ROW_DTYPES, 2),
        "sample_weights": (sample_weights, _WEIGHT_DTYPES, 1),
        "keys": (keys, KEY_DTYPES, 1),
        "seeds": (seeds, (torch.int64,), 1),
    }
    check_lists(op, lists)
    check_numbers(op, index, rows, counts, bags, features, first_keys)
    if initializers is not None:
        check_descriptor(op, "initializers", initializers, torch.float64)
    lists_of_all = [*outs, *weights, *sample_weights, *keys, *seeds]
    check_devices(op, [index, rows, counts, bags, first_keys, *lists_of_all])


def _check_backward(
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    divisor: int = 1,
    deterministic: bool = True,
) -> None:
    op = "group_embedding_bag_backward"
    lists = {
        "grads": (grads, ROW_DTYPES, None),
        "sample_weights": (sample_weights, _WEIGHT_DTYPES, 1),
    }
    check_lists(op, lists)
    check_numbers(op, index, rows, counts, bags, features, first_keys)
    check_devices(op, [index, rows, counts, bags, first_keys, *grads, *sample_weights])


def _check_update(
    grads: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    weights: Tensors,
    states: Tensors,
    row_steps: Tensors,
    steps: Tensors,
    *rest: Any,
) -> None:
    op = "group_embedding_bag_update_"
    lists = {
        "grads": (grads, ROW_DTYPES, None),
        "sample_weights": (sample_weights, _WEIGHT_DTYPES, 1),
        "weights": (weights, ROW_DTYPES, 2),
    }
    check_lists(op, lists)
    check_numbers(op, index, rows, counts, bags, features, first_keys)
    lists_of_all = [*grads, *sample_weights, *weights, *states, *row_steps, *steps]
    check_devices(op, [index, rows, counts, bags, first_keys, *lists_of_all])


_pool = GroupOp(torch.ops.sparsekit.group_embedding_bag_.default, _check_pool)
_backward = GroupOp(torch.ops.sparsekit.group_embedding_bag_backward.default, _check_backward)
_update = GroupOp(torch.ops.sparsekit.group_embedding_bag_update_.default, _check_update)


def group_embedding_bag_(
    outs: Tensors,
    weights: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    first_keys: torch.Tensor | None = None,
    keys: Tensors = (),
    seeds: Tensors = (),
    initializers: torch.Tensor | None = None,
) -> None:
    """Pool the bags of all features, each as `embedding_bag` does, into outs.

    ``sparsekit/ops/_group.py`` describes features and entries. After `group_find_or_insert_`, index
    is its inverse, and rows and counts are what it calls so. After `group_find`, index is its rows,
    and rows and counts are None; a negative index then reads zeros or, with initializers, the
    initial vector of its key.

    Args:
        outs: contiguous, any shape, in the dtype of weights. Elements of no bag are left alone.
        weights: float32, float64 or bfloat16 ``[num_rows, dim]`` for each table, all of one dtype.
        index: int32 with one element per entry.
        rows: int32 with one element per entry, or None.
        counts: int64 ``[T]``, or None.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, which table each bag asks.
        sample_weights: empty, or for each source ``[n]``, float64 for float64 rows, else float32;
            without elements for a source that has none.
        first_keys: int64 ``[F]``, as `group_find` returns it; for sample_weights and keys.
        keys: int64 or int32 ``[n]`` for each source; for initializers.
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
        outs,
        weights,
        index,
        rows,
        counts,
        bags,
        features,
        sample_weights,
        first_keys,
        keys,
        seeds,
        initializers,
    )
    increment_version(outs)


def group_embedding_bag_backward(
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    first_keys: torch.Tensor | None = None,
    divisor: int = 1,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the distinct rows of all tables, given those of the outputs.

    Args:
        grads: gradients of outs, laid out like them, all of one dtype.
        dims: length of a row of each table.
        index: int32 with one element per entry: which of the distinct rows of its table it is; a
            negative one gets no gradient.
        rows: int32, as `group_find_or_insert_` returns them, or None.
        counts: int64 ``[T]``, number of distinct rows of each table.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, which table each bag asks.
        sample_weights: as in `group_embedding_bag_`.
        first_keys: as in `group_embedding_bag_`.
        divisor: divides the sums after they have been rounded to the dtype of grads.
        deterministic: without effect so far; sums always go in the order of entries.

    Returns:
        The rows, int64 ``[sum of counts]``, rising within each table, table after table; and their
        gradients in the same order, 1-D, in the dtype of grads. The gradients of a table begin at
        the next multiple of 16 elements; what lies between has any content. If rows is None, the
        first result has no elements and the gradients are in the order that index counts in.

    Raises:
        TypeError, ValueError: as `group_embedding_bag_`.
        IndexError: an element of index that is not below its table's count, or a negative row.
    """
    return _backward(
        grads,
        dims,
        index,
        rows,
        counts,
        bags,
        features,
        sample_weights,
        first_keys,
        divisor,
        deterministic,
    )


def group_embedding_bag_update_(
    grads: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    weights: Tensors,
    states: Tensors,
    row_steps: Tensors,
    steps: Tensors,
    rule: str,
    settings: Sequence[float],
    divisor: int = 1,
    per_row: bool = False,
    rounding_seed: int | None = None,
    count_steps: bool = False,
    deterministic: bool = True,
) -> None:
    """An optimizer's step on the distinct rows of all tables, given the gradients of the outputs.

    The result has the bits of `group_embedding_bag_backward` and then `update_rows_` of all tables,
    but on the CPU no tensor of gradients is made: the thread that has summed those of a table
    updates its rows while they are in the cache.

    Args:
        grads: gradients of outs, laid out like them, in the dtype of weights.
        index: int32 with one element per entry: which of the distinct rows of its table it is; a
            negative one gets no gradient.
        rows: int32, as `group_find_or_insert_` returns them.
        counts: int64 ``[T]``, number of distinct rows of each table. A table without any makes a
            step all the same, if steps are counted.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, which table each bag asks.
        sample_weights: as in `group_embedding_bag_`.
        first_keys: as in `group_embedding_bag_`.
        weights: as in `update_rows_`, one for each table, changed in place.
        states: as in `update_rows_`, those of one table after another, changed in place.
        row_steps: as in `update_rows_`, one for each table or none at all.
        steps: as in `update_rows_`, one for each table.
        rule: the optimizer, as in `update_rows_`.
        settings: as in `update_rows_`.
        divisor: as in `group_embedding_bag_backward`.
        per_row: as in `update_rows_`.
        rounding_seed: as in `update_rows_`.
        count_steps: as in `update_rows_`.
        deterministic: without effect so far; sums always go in the order of entries.

    Raises:
        TypeError, ValueError: as `group_embedding_bag_backward` and `update_rows_`.
        IndexError: an element of index that is not below its table's count, or a row that its table
            does not have; on the CPU nothing has been changed, on CUDA the other rows may have.
    """
    _update(
        grads,
        index,
        rows,
        counts,
        bags,
        features,
        sample_weights,
        first_keys,
        weights,
        states,
        row_steps,
        steps,
        rule,
        settings,
        divisor,
        per_row,
        None if rounding_seed is None else signed_64(rounding_seed),
        count_steps,
        deterministic,
    )
    increment_version(weights)


@torch.library.register_fake("sparsekit::group_embedding_bag_out")
def _(like: torch.Tensor, num_elements: int) -> torch.Tensor:
    return like.new_empty([num_elements])


@torch.library.register_fake("sparsekit::group_embedding_bag_")
def _(
    outs: Tensors,
    weights: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    keys: Tensors,
    seeds: Tensors,
    initializers: torch.Tensor | None,
) -> None:
    _check_pool(
        outs,
        weights,
        index,
        rows,
        counts,
        bags,
        features,
        sample_weights,
        first_keys,
        keys,
        seeds,
        initializers,
    )


@torch.library.register_fake("sparsekit::group_embedding_bag_backward")
def _(
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    divisor: int = 1,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_backward(grads, dims, index, rows, counts, bags, features, sample_weights, first_keys)
    context = torch.library.get_ctx()
    num_rows = 0 if rows is None else context.new_dynamic_size()
    like = grads[0] if grads else index
    return (
        index.new_empty([num_rows], dtype=torch.int64),
        like.new_empty([context.new_dynamic_size()]),
    )


@torch.library.register_fake("sparsekit::group_embedding_bag_update_")
def _(
    grads: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    first_keys: torch.Tensor | None,
    weights: Tensors,
    states: Tensors,
    row_steps: Tensors,
    steps: Tensors,
    rule: str,
    settings: Sequence[float],
    divisor: int = 1,
    per_row: bool = False,
    rounding_seed: int | None = None,
    count_steps: bool = False,
    deterministic: bool = True,
) -> None:
    _check_update(
        grads,
        index,
        rows,
        counts,
        bags,
        features,
        sample_weights,
        first_keys,
        weights,
        states,
        row_steps,
        steps,
    )
