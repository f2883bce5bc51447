"""Renumbers the rows that stay when others are removed."""

import torch

from ._op import Of, Op

_compact = Op("compact_rows", {"gone": Of((torch.int64,), 1)})


def compact_rows(gone: torch.Tensor, size: int) -> torch.Tensor:
    """Return new row numbers such that the rows that stay come first.

    The last of the remaining rows take over the numbers of removed rows, in order; all other rows
    keep their numbers. The result can be passed as ``new_rows`` to `move_rows_` and
    `hash_table_renumber_`.

    Args:
        gone: int64 ``[k]``, the rows to remove, in ascending order without repeats.
        size: number of rows in use, in [k, 2^31).

    Returns:
        int32 ``[size]``, the new number of each row, or -1 for a removed row.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, or a number is out of range or out of order.
    """
    return _compact(gone, size)


@_compact.fake
def _(gone: torch.Tensor, size: int) -> torch.Tensor:
    return gone.new_empty([size], dtype=torch.int32)
