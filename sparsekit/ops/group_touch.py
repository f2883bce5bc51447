"""Updates the scores of the rows that a lookup has touched, in many tables."""

from collections.abc import Sequence
from enum import IntEnum

import torch

from ._group import TENSORS, Tensors
from ._op import Op

_touch = Op("group_touch_", TENSORS)


class ScorePolicy(IntEnum):
    """Values of the first column of ``policies``."""

    none = 0
    lru = 1
    lfu = 2


def group_touch_(
    scores: Tensors,
    index: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    bags: torch.Tensor,
    features: torch.Tensor,
    policies: torch.Tensor,
    clocks: Tensors,
    occurrences: torch.Tensor | None = None,
    ticks: Sequence[int] = (),
) -> None:
    """Write the score of each distinct row that a lookup has touched.

    ``sparsekit/ops/_group.py`` describes features and entries. A table's policy says what a score
    is:

    - ``ScorePolicy.none``: the table has no scores.
    - ``ScorePolicy.lru``: the clock at the last touch.
    - ``ScorePolicy.lfu``: the lower 32 bits are those of the clock at the last touch; the upper 32
      bits count touches of the row, one for each entry, up to 2^32 - 1. Before new touches are
      added, the count is halved once for each multiple of halve_every that the clock has reached
      since the last touch. Clocks are compared by their lower 32 bits; if the clock went back,
      nothing is halved.

    Args:
        scores: int64 ``[capacity]`` for each table, changed in place; ``[0]`` for a table without
            scores. Rows out of range are skipped.
        index: int32 with one element per entry, the result ``inverse`` of `group_find_or_insert_`.
            Entries whose index does not identify a distinct row are not counted.
        rows: int32, as `group_find_or_insert_` returns them.
        counts: int64 ``[T]``, number of distinct rows of each table.
        bags: int32, as `group_find_or_insert_` returns it.
        features: int64 ``[F, 9]`` on the CPU, runs of bags and their tables.
        policies: int64 ``[T, 2]`` on the CPU: a `ScorePolicy`, and halve_every, which only LFU
            uses; 0 if counts are never halved.
        clocks: int64 ``[1]`` for each table, advanced in place by the table's ticks, if any. A
            table without scores may have ``[0]``.
        occurrences: int64 with one element per entry: the number of touches that the entry stands
            for, clamped to [0, 2^32 - 1]. If None, each entry is one touch.
        ticks: for each table, how far its clock is advanced before scores are written; empty to
            leave all clocks unchanged.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, a mix of devices, bad features, bags, counts or policies; or
            scores share memory with another argument.
    """
    # Do not increment the tensors' versions: no backward saves scores, and for many tables this
    # takes as long as the op.
    _touch(scores, index, rows, counts, bags, features, policies, clocks, occurrences, ticks)


@_touch.fake
def _() -> None:
    return None
