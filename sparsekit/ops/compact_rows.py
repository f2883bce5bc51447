"""Numbers the rows that stay when others go."""

import torch

from ._op import Of, Op

_compact = Op("compact_rows", {"gone": Of((torch.int64,), 1)})


def compact_rows(gone: torch.Tensor, size: int) -> torch.Tensor:
    """Return new numbers of rows so that the rows that stay are the first ones.

    The last rows get, in order, the numbers of rows that go; all others keep theirs. The result is
    the argument ``new_rows`` of `move_rows_` and `HashTable`'s ops.

    Args:
        gone: int64 ``[k]``, the rows that go, in ascending order without repeats.
        size: number of rows in use, in [k, 2^31).

    Returns:
        int32 ``[size]``, the new number of each row, or -1 for a row that goes.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, or a number is out of range or out of order.
    """
    return _compact(gone, size)


@_compact.fake
def _(gone: torch.Tensor, size: int) -> torch.Tensor:
    return gone.new_empty([size], dtype=torch.int32)
