"""Sums rows by segment."""

from typing import Any

import torch

from ..errors import check_int
from ._checks import KEY_DTYPES, ROW_DTYPES
from ._op import Of, Op

_sum = Op(
    "unsorted_segment_sum",
    {"data": Of(ROW_DTYPES, 2), "segment_ids": Of(KEY_DTYPES, 1)},
    gradient=True,
)
_gather_rows = torch.ops.sparsekit.gather_rows.default


def unsorted_segment_sum(
    data: torch.Tensor, segment_ids: torch.Tensor, num_segments: int
) -> torch.Tensor:
    """Sum the rows of each segment; segment ids may be in any order.

    Args:
        data: float32, float64 or bfloat16 (added in float32) ``[n, dim]``.
        segment_ids: int64 or int32 ``[n]``; rows with an id below 0 are dropped.
        num_segments: number of rows of the result.

    Returns:
        ``[num_segments, dim]`` in the dtype of data; a segment without rows is zero. On the
        CPU, and on CUDA under ``torch.use_deterministic_algorithms(True)``, the order of additions
        depends on the ids only, so repeated calls give the same bits.

    Raises:
        TypeError: a wrong dtype, or num_segments is not an int.
        ValueError: a wrong shape, or num_segments outside [0, 2^48).
        IndexError: an id >= num_segments; the message gives its position.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    # The op itself refuses an int that is out of range.
    count = check_int("unsorted_segment_sum", "num_segments", num_segments, -(2**63), 2**63 - 1)
    return _sum(data, segment_ids, count, deterministic)


@_sum.fake
def _(data: torch.Tensor, num_segments: int) -> torch.Tensor:
    return data.new_empty([num_segments, data.shape[1]])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (segment_ids,) = ctx.saved_tensors
    return _gather_rows(grad, segment_ids), None, None, None


torch.library.register_autograd("sparsekit::unsorted_segment_sum", _backward, setup_context=_setup)
