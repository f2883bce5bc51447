"""Copies of table rows."""

from typing import Any

import torch

from ._checks import KEY_DTYPES, ROW_DTYPES, CheckedOp

_op = torch.ops.sparsekit.gather_rows.default
_checked = CheckedOp(_op, gradient=True, table=(ROW_DTYPES, 2), rows=(KEY_DTYPES, 1))


def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a table by number.

    Its gradient for ``table`` is dense; `DistributedEmbedding` has the sparse one.

    Args:
        table: float32, float64 or bfloat16 ``[num_rows, dim]``.
        rows: int64 or int32 ``[n]``; a negative one, such as the -1 of `HashTable.find`, reads
            zeros and gets no gradient.

    Returns:
        ``[n, dim]`` in the dtype of table.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape.
        IndexError: a row >= num_rows; the message has its position.
    """
    return _checked(table, rows)


@torch.library.register_fake("sparsekit::gather_rows")
def _(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    _checked.check(table, rows)
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
