"""Writes the scores of rows found by a lookup, and lets these rows be renumbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch

from .._reports import errors_are_deferred
from ..tables import saved_state as saved
from ..tables.in_flight import InFlight
from ..tables.life import begin_ticks, end_ticks
from ..tables.weight import EmbeddingWeight
from .descriptors import Descriptors
from .numbered import numbered
from .plan import TableBatch
from .record import entries_of_tables
from .scored import Scored
from .user_scores import UserScores, score_writes

_touch = torch.ops.sparsekit.group_touch_.default

# Results of a lookup: index, rows, counts and bags; rows and counts may be None.
Found = Sequence[Any]


def touch(
    batch: TableBatch,
    scored: Scored,
    found: Found,
    given: Descriptors,
    new: Mapping[int, int] | None,
    user_scores: UserScores,
) -> None:
    """Write the scores of rows found by a lookup, advance clocks, and count the keys.

    Args:
        batch: the tables of the lookup.
        scored: the tables with scores.
        found: results of the lookup.
        given: the lookup's keys.
        new: number of new rows, by table; 0 for tables not listed. None leaves clocks and counters
            unchanged.
        user_scores: the scores of keys in the tables of `Scored.by_user`.
    """
    lives = scored.clocks(batch.buffers)
    ticks = [int(new is not None and not life.set_by_user) for life, _ in lives]
    scores, clocks = scored.lists(batch.buffers)
    index, rows, counts, bags = found
    if rows is None:  # a plain find, since admitted keys were inserted before it
        index, rows, counts = numbered(
            index, entries_of_tables(bags, given.features, len(batch.dims))
        )
    arguments = scores, index, rows, counts, bags, given.features, scored.policies, clocks
    more = given.occurrences, scored.of_all(ticks)
    before = begin_ticks(lives)
    shown = [now + by for now, by in zip(before, ticks, strict=True)]
    with torch._C._AutoDispatchBelowAutograd():
        if not scored.by_user:
            _touch(*arguments, *more)
        else:
            now, tables = scored.of_all(shown), batch.tables
            each = [(t, tables[t]) for t in scored.by_user]
            calls = [score_writes(x, user_scores[x], scores[t], now[t]) for t, x in each]
            # No row may be left without its score, even if the program is interrupted.
            saved.run_all([partial(_touch, *arguments, *more), *calls])
    end_ticks(lives, shown)
    if new is not None and not errors_are_deferred(counts.device):
        scored.count(counts.tolist(), new)


def hold_rows(
    batch: TableBatch, weights: Sequence[torch.Tensor], found: Found, features: torch.Tensor
) -> tuple[InFlight, ...]:
    """Register a lookup with the weights of its tables, so that its rows can be renumbered."""
    held = []
    index, rows, counts, bags = found
    entries = cache(partial(entries_of_tables, bags, features, len(weights)))
    for t, _ in batch.scored.lives if batch.scored is not None else ():
        weight = weights[t]
        if isinstance(weight, EmbeddingWeight):
            own = partial(_rows_in, t, entries, index, rows, counts)
            held.append(InFlight(batch.names[t], own, (index, rows)))
            weight.is_looked_up_by(held[-1])
    return tuple(held)


def _rows_in(
    t: int,
    entries: Callable[[], Sequence[slice]],
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
) -> torch.Tensor:
    """Return the rows that a lookup found in table t, as in `InFlight`.

    Args:
        t: index of the table.
        entries: returns the entries of each table.
        index: result of the lookup.
        rows: result of the lookup.
        counts: result of the lookup.
    """
    own = entries()[t]
    if rows is None or counts is None:
        return index[own]
    return rows[own.start : own.start + int(counts[t])]
