"""Finds a table's lowest-scoring rows."""

import torch

from ._op import Of, Op

_lowest = Op(
    "lowest_rows",
    {
        "scores": Of((torch.int64,), 1),
        "buckets": Of((torch.int64,), 2),
        "pinned": Of((torch.int64,), 1),
    },
)


def lowest_rows(
    scores: torch.Tensor,
    buckets: torch.Tensor,
    size: int,
    kind: int,
    halve_every: int,
    now: int,
    pinned: torch.Tensor,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find a table's lowest-scoring rows, without sorting all rows.

    Rows are compared by a number, their order: with ``ScorePolicy.lru`` the score itself, with
    ``ScorePolicy.lfu`` the count in the score, halved as `group_touch_` would do now. Ties are
    broken by a hash of the key, the finaliser of splitmix64, compared as an unsigned number.

    Args:
        scores: int64 ``[capacity]``, as `group_touch_` writes them.
        buckets: int64 ``[num_buckets, 8]``, the hash table with the keys of the rows.
        size: number of rows in use, at most capacity.
        kind: `ScorePolicy.lru` or `ScorePolicy.lfu`.
        halve_every: LFU counts are halved after this many units of the clock; 0 for never.
        now: the clock's value at which LFU counts are read.
        pinned: int64 ``[p]``, rows to leave out; values outside [0, size) are ignored.
        count: number of rows to find; if there are fewer, all are found.

    Returns:
        ``rows``, ``orders`` and ``keys``, int64 ``[k]`` each, in ascending order of row.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a mix of devices, or a number out of range.
    """
    return _lowest(scores, buckets, size, kind, halve_every, now, pinned, count)


@_lowest.fake
def _(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = torch.library.get_ctx().new_dynamic_size()
    return scores.new_empty([found]), scores.new_empty([found]), scores.new_empty([found])
