"""Converts the results of a lookup in evaluation to the form that backward needs."""

from collections.abc import Sequence

import torch

from .. import ops


def numbered(
    rows_of_entries: torch.Tensor, entries: Sequence[slice]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number the distinct rows of each table, as a lookup in training does.

    Returns:
        index, rows and counts, like the results ``inverse``, ``rows`` and ``counts`` of
        `group_find_or_insert_`. The index of an entry without a row is -1.
    """
    index, rows = rows_of_entries.clone(), torch.empty_like(rows_of_entries)
    counts = []
    for own in entries:
        of_table = rows_of_entries[own]
        distinct, inverse, _ = ops.unique(of_table)
        known = distinct >= 0
        numbers = known.cumsum(0).to(torch.int32) - 1
        index[own] = torch.where(of_table < 0, of_table, numbers[inverse])
        distinct = distinct[known].to(torch.int32)
        counts.append(len(distinct))
        rows[own.start : own.start + len(distinct)] = distinct
    return index, rows, torch.tensor(counts, device=index.device)
