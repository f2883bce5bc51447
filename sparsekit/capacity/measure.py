"""Measures the hit rates of real tables, to compare with predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..nn import Embedding
from ..tables.options import TableOptions
from .curve import Curve, Point


class Measure:
    """Real tables, one for each prediction in a curve, that all get the same lookups.

    Args:
        curve: the predictions.
        low_watermark: low watermark of the predicted tables.
    """

    def __init__(self, curve: Curve, low_watermark: float = TableOptions.low_watermark) -> None:
        self._layers = [
            _table(point, curve.most_at_once, low_watermark, f"measured {i}")
            for i, point in enumerate(curve.points)
        ]

    def add(self, keys: torch.Tensor) -> None:
        """Look up the same int64 keys ``[n]`` in all tables."""
        with torch.no_grad():
            for layer in self._layers:
                layer(keys)

    def hit_rates(self) -> list[float]:
        """Return the hit rate of each table, in the order of the points."""
        counts = [layer.row_counts() for layer in self._layers]
        return [each.found / each.asked if each.asked else 0.0 for each in counts]


def measured(
    curve: Curve, lookups: Sequence[torch.Tensor], low_watermark: float = TableOptions.low_watermark
) -> list[float]:
    """Return real tables' hit rates for lookups of int64 keys ``[n]``, in the order of points."""
    measure = Measure(curve, low_watermark)
    for keys in lookups:
        measure.add(keys)
    return measure.hit_rates()


def _table(point: Point, most_at_once: int, low_watermark: float, name: str) -> Embedding:
    options = point.policy.options()
    rows = None
    if point.policy.ttl is None:
        # A lookup may exceed the budget, since a sweep drops no rows of the lookup's own keys.
        rows = point.rows + most_at_once
        options |= {"max_rows": point.rows, "low_watermark": low_watermark}
    return Embedding(rows, 1, name=name, device="cpu", **options)
