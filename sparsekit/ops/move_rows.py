"""Moves the last rows of tensors to free places nearer the start."""

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ._op import Of, Op

_move = Op("move_rows_", {"new_rows": Of((torch.int32,), 1), "initial": Of(None, 0, on_cpu=True)})


def move_rows_(
    tensors: Sequence[torch.Tensor],
    new_rows: torch.Tensor,
    left: int,
    initial: Sequence[torch.Tensor],
) -> None:
    """Move the last rows of tensors to other places, and write initial values where they were.

    Each row r in [left, n) is copied to row ``new_rows[r]``, unless that is -1; row r then gets the
    initial value in all its elements.

    Args:
        tensors: of any dtype, each with at least n rows, changed in place. Each row must be
            contiguous; there may be gaps between rows.
        new_rows: int32 ``[n]``; values at r >= left are -1 or a place below left, each place at
            most once. Other values are not read.
        left: number of rows that remain, in [0, n].
        initial: for each tensor, one element of its dtype, on the CPU.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape or layout, a mix of devices, tensors share memory with one another
            or with new_rows, or ``new_rows[r]`` is out of range. On the CPU, nothing has been
            changed; on CUDA, row r is unchanged.
    """
    _move(tensors, new_rows, left, initial)
    increment_version(tensors)


@_move.fake
def _() -> None:
    return None
