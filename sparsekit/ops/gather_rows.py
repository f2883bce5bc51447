"""Copies table rows by index."""

from typing import Any

import torch

from ._checks import KEY_DTYPES, ROW_DTYPES
from ._op import Of, Op

_gather = Op("gather_rows", {"table": Of(ROW_DTYPES, 2), "rows": Of(KEY_DTYPES, 1)}, gradient=True)


def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Copy rows of a table by index.

    The gradient of ``table`` is dense; `DistributedEmbedding` computes a sparse gradient.

    Args:
        table: float32, float64 or bfloat16 ``[num_rows, dim]``.
        rows: int64 or int32 ``[n]``; a negative row, such as -1 from `HashTable.find`, gives zeros
            and gets no gradient.

    Returns:
        ``[n, dim]`` in the dtype of table.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape.
        IndexError: a row >= num_rows; the message gives its position.
    """
    return _gather(table, rows)


@_gather.fake
def _(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table.new_empty([rows.shape[0], table.shape[1]])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    table, rows = inputs
    ctx.save_for_backward(rows)
    ctx.num_rows = table.shape[0]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (rows,) = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    segment_sum = torch.ops.sparsekit.unsorted_segment_sum.default
    return segment_sum(grad, rows, ctx.num_rows, deterministic), None


torch.library.register_autograd("sparsekit::gather_rows", _backward, setup_context=_setup)
