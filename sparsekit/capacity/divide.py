"""Divides memory among tables, so that as many keys as possible have rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..nn import Embedding, memory_report
from ..tables.life import DEFAULT_BUDGET
from .curve import Curve
from .policy import Policy

# Number of rows in the table whose memory is measured to get the bytes per row.
_ROWS = 1 << 16


class Allotment(NamedTuple):
    """Rows allotted to a table.

    Attributes:
        policy: the policy with the highest predicted hit rate for this many rows.
        max_rows: budget of rows over all ranks.
        rows_per_rank: number of rows to create on each rank; ``max_rows`` is by default nine tenths
            of the total over ranks, since ranks get uneven shares.
        bytes: memory on all ranks.
        hit_rate: predicted hit rate.
    """

    policy: Policy
    max_rows: int
    rows_per_rank: int
    bytes: int
    hit_rate: float


def bytes_per_row(
    dim: int, optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
) -> float:
    """Return the bytes per row for vector, optimizer states, score and index; see `memory_report`.

    Memory for counting keys that wait for admission is not included.

    Args:
        dim: elements of a float32 vector.
        optimizer: function that makes the optimizer for a list of parameters; None for a table that
            is not trained.
    """
    with torch.enable_grad():
        layer = Embedding(_ROWS, dim, on_full="evict", device="cpu", dtype=torch.float32)
        if optimizer is not None:
            layer(torch.zeros(1, dtype=torch.int64, device="cpu")).sum().backward()
            made = optimizer(list(layer.parameters()))
            made.step()  # memory_report finds states only while their optimizer exists
    return memory_report(layer).total.reserved / _ROWS


def size_of(max_rows: int, row_bytes: float, ranks: int = 1) -> tuple[int, int]:
    """Return the rows per rank for a budget of rows, and the total bytes of all ranks' rows."""
    each = math.ceil(max_rows / DEFAULT_BUDGET / ranks)
    return each, round(each * ranks * row_bytes)


def divide(
    budget: int,
    curves: Mapping[str, Curve],
    row_bytes: Mapping[str, float],
    ranks: int = 1,
) -> dict[str, Allotment]:
    """Divide memory among tables to maximize the total number of predicted hits.

    Every table first gets rows for its largest lookup. The rest is spent where each byte brings the
    most hits, along the concave hull of each table's predictions. This is optimal where the
    predictions are concave: Fox, "Discrete Optimization via Marginal Analysis", Management Science
    13, 1966. Between two predictions, hit rates are interpolated.

    Args:
        budget: bytes for all tables on all ranks.
        curves: predictions by table.
        row_bytes: bytes per row, by table; see `bytes_per_row`.
        ranks: number of ranks.

    Returns:
        The allotment of each table, in the order of curves.

    Raises:
        ValueError: the budget is too small for the largest lookups.
    """
    rows = {name: max(1, curve.most_at_once) for name, curve in curves.items()}
    free = budget - sum(size_of(rows[name], row_bytes[name], ranks)[1] for name in rows)
    if free < 0:
        raise ValueError(
            f"a budget of {budget:,} bytes is {-free:,} too small: all tables must have rows for "
            f"the keys of one lookup"
        )
    steps: list[tuple[float, int, str, int]] = []
    for name, curve in curves.items():
        hull = _hull([(rows[name], _best(curve, rows[name])[1]), *_sizes(curve, rows[name])])
        for (before, hits), (after, more) in pairwise(hull):
            gain = (more - hits) * curve.keys / ((after - before) * row_bytes[name])
            steps.append((-gain, len(steps), name, after))
    for _, _, name, after in sorted(steps):
        cost = row_bytes[name]
        more = size_of(after, cost, ranks)[1] - size_of(rows[name], cost, ranks)[1]
        if more > free:
            # Find how many rows fit into this table's bytes, with the same number on every rank.
            most = size_of(rows[name], cost, ranks)[1] + free
            fit = int(int(most / cost / ranks) * ranks * DEFAULT_BUDGET)
            rows[name] = max(rows[name], fit)
            break
        rows[name], free = after, free - more
    allotted = {}
    for name, curve in curves.items():
        policy, hit_rate = _best(curve, rows[name])
        each, size = size_of(rows[name], row_bytes[name], ranks)
        allotted[name] = Allotment(policy, rows[name], each, size, hit_rate)
    return allotted


def _best(curve: Curve, rows: int) -> tuple[Policy, float]:
    """Return the policy with the highest hit rate at a number of rows, and its hit rate."""
    found: dict[Policy, list[tuple[int, float]]] = {}
    for policy, size, hit_rate in curve.points:
        if policy.ttl is None:
            found.setdefault(policy, [(0, 0.0)]).append((size, hit_rate))
    rates = {policy: _between(points, rows) for policy, points in found.items()}
    best = max(rates, key=lambda policy: rates[policy])
    return best, rates[best]


def _between(points: list[tuple[int, float]], rows: int) -> float:
    for (before, low), (after, high) in pairwise(points):
        if rows <= after:
            return low + (high - low) * (rows - before) / (after - before)
    return points[-1][1]


def _sizes(curve: Curve, least: int) -> list[tuple[int, float]]:
    """Return the predicted sizes above `least`, ascending, each with its best hit rate."""
    sizes = {rows for policy, rows, _ in curve.points if policy.ttl is None and rows > least}
    return [(rows, _best(curve, rows)[1]) for rows in sorted(sizes)]


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the vertices of the points' upper concave hull, up to its highest point."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        if not hull or y > hull[-1][1]:
            hull.append((x, y))
    return hull
