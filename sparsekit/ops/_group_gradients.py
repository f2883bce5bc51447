"""Computes gradients of rows from gradients of bags for many tables, or applies them to rows."""

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ._checks import signed_64
from ._group import TENSORS, Tensors
from ._op import Op

_backward = Op("group_embedding_bag_backward", TENSORS)
_backward_at = Op("group_embedding_bag_backward_at_", TENSORS)
_update = Op("group_embedding_bag_update_", TENSORS)


def group_embedding_bag_backward(
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    key_starts: torch.Tensor | None = None,
    divisor: int = 1,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of all tables' distinct rows from the gradients of the outputs.

    Args:
        grads: gradients of outs, with the layout of outs, all of one dtype.
        dims: row length of each table.
        index: int32 with one element per entry: the index of the entry's row among its table's
            distinct rows; an entry with a negative index gets no gradient.
        rows: int32, as `group_find_or_insert_` returns them, or None.
        counts: int64 ``[T]``, number of distinct rows of each table.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.
        sample_weights: as in `group_embedding_bag_`.
        key_starts: as in `group_embedding_bag_`.
        divisor: number to divide the sums by, after rounding them to the dtype of grads.
        deterministic: has no effect yet; terms are always added in the order of entries.

    Returns:
        The rows, int64 ``[sum of counts]``, table by table and in ascending order within each
        table; and their gradients in the same order, 1-D, in the dtype of grads. Each table's
        gradients begin at the next multiple of 16 elements; elements in between are undefined. If
        rows is None, the first result is empty and the gradients are in the order of the row
        indices in `index`. The third result is counts, on the CPU.

    Raises:
        TypeError, ValueError: as for `group_embedding_bag_`.
        IndexError: an element of index is not below its table's count, or a row is negative.
    """
    return _backward(
        grads, dims, index, rows, counts, bags, features, sample_weights, key_starts, divisor,
        deterministic,
    )  # fmt: skip


def group_embedding_bag_backward_at_(
    out: torch.Tensor,
    row_strides: Sequence[int],
    grads: Tensors,
    dims: Sequence[int],
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors = (),
    key_starts: torch.Tensor | None = None,
    deterministic: bool = True,
) -> None:
    """Write the gradients of `group_embedding_bag_backward` to given rows of out.

    The gradient of a row of table t is ``out.view(-1)[row * row_strides[t]:][:dims[t]]``; other
    elements of out are left unchanged. Where two rows overlap, out has either gradient or parts of
    both. On CUDA the host does not wait for the device.

    Args:
        out: contiguous, any shape, in the dtype of grads, changed in place.
        row_strides: for each table, the distance between rows of out, in elements.
        grads: as in `group_embedding_bag_backward`.
        dims: gradient length of each table.
        index: as in `group_embedding_bag_backward`.
        rows: int32 with one element per entry. Starting at a table's first entry, the elements are
            the rows of out that get the gradients of the table's distinct rows.
        counts: int64 ``[T]``, number of distinct rows of each table.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.
        sample_weights: as in `group_embedding_bag_`.
        key_starts: as in `group_embedding_bag_`.
        deterministic: has no effect yet; terms are always added in the order of entries.

    Raises:
        TypeError, ValueError: as for `group_embedding_bag_backward`; or out has the wrong dtype, is
            not contiguous, or shares memory with another argument.
        IndexError: an element of index is not below its table's count, or a gradient would be
            outside out. On the CPU nothing has been written; on CUDA the other gradients have been.
    """
    _backward_at(
        out, row_strides, grads, dims, index, rows, counts, bags, features, sample_weights,
        key_starts, deterministic,
    )  # fmt: skip
    increment_version(out)


def group_embedding_bag_update_(
    grads: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    sample_weights: Tensors,
    key_starts: torch.Tensor | None,
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
    lr: torch.Tensor | None = None,
) -> None:
    """Apply an optimizer step to all tables' distinct rows, given the gradients of the outputs.

    The result is bitwise the same as from `group_embedding_bag_backward` followed by `update_rows_`
    for all tables. On the CPU the gradients are not stored: the thread that sums the gradients of a
    table updates its rows while the gradients are in the cache.

    Args:
        grads: gradients of outs, with the layout of outs, in the dtype of weights.
        index: int32 with one element per entry: the index of the entry's row among its table's
            distinct rows; an entry with a negative index gets no gradient.
        rows: int32, as `group_find_or_insert_` returns them.
        counts: int64 ``[T]``, number of distinct rows of each table. If count_steps is set, the
            step is also counted for a table without rows.
        bags: int32, as `group_find` returns it.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.
        sample_weights: as in `group_embedding_bag_`.
        key_starts: as in `group_embedding_bag_`.
        weights: as in `update_rows_`, one for each table, changed in place.
        states: as in `update_rows_`, table after table, changed in place.
        row_steps: as in `update_rows_`, one for each table, or empty.
        steps: as in `update_rows_`, one for each table.
        rule: the optimizer, as in `update_rows_`.
        settings: as in `update_rows_`.
        divisor: as in `group_embedding_bag_backward`.
        per_row: as in `update_rows_`.
        rounding_seed: as in `update_rows_`.
        count_steps: as in `update_rows_`.
        deterministic: has no effect yet; terms are always added in the order of entries.
        lr: as in `update_rows_`.

    Raises:
        TypeError, ValueError: as for `group_embedding_bag_backward` and `update_rows_`.
        IndexError: an element of index is not below its table's count, or a row is not in its
            table. On the CPU nothing has been changed; on CUDA other rows may have been.
    """
    rounding = None if rounding_seed is None else signed_64(rounding_seed)
    _update(
        grads, index, rows, counts, bags, features, sample_weights, key_starts, weights, states,
        row_steps, steps, rule, settings, divisor, per_row, rounding, count_steps, deterministic,
        lr,
    )  # fmt: skip
    increment_version(weights)


@_backward.fake
def _(
    grads: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    features: torch.Tensor,
    dims: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    context = torch.library.get_ctx()
    num_rows = 0 if rows is None else context.new_dynamic_size()
    like = grads[0] if grads else index
    return (
        index.new_empty([num_rows], dtype=torch.int64),
        like.new_empty([context.new_dynamic_size()]),
        features.new_empty([len(dims)]),
    )


@_backward_at.fake
def _() -> None:
    return None


@_update.fake
def _() -> None:
    return None
