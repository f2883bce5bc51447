"""Shows predictions as text, JSON or a plot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._sizes import size_text
from ..train.plots import pyplot
from .curve import Curve, Point
from .divide import Allotment, size_of

# Maximum number of features in a plot; those with the most keys are shown.
_MOST_PLOTS = 9
# Style of the measured hit rates in a plot.
_CIRCLES = {"linestyle": "", "marker": "o", "markerfacecolor": "none", "markersize": 9}


class Feature(NamedTuple):
    """Predictions for a feature, and the memory of a row in its table.

    Attributes:
        curve: the predictions.
        row_bytes: bytes per row.
        measured: hit rate of a real table for each point; None if nothing was measured.
    """

    curve: Curve
    row_bytes: float
    measured: Sequence[float] | None = None


def as_text(name: str, feature: Feature, ranks: int = 1) -> str:
    """Return a feature's predictions as a text table."""
    curve, measured = feature.curve, feature.measured
    how = "exact" if curve.rate == 1 else f"from 1 in {round(1 / curve.rate):,} of the keys"
    title = (
        f"{name}: {curve.lookups:,} lookups, {curve.keys:,} keys, {curve.distinct:,} distinct, at "
        f"most {curve.most_at_once:,} in a lookup; {how}"
    )
    lines = [["policy", "rows", "of keys", "memory", "hit rate"]]
    for point in curve.points:
        size = size_of(point.rows, feature.row_bytes, ranks)[1]
        part = f"{point.rows / max(1, curve.distinct):.1%}"
        lines.append(
            [_called(point), f"{point.rows:,}", part, size_text(size), f"{point.hit_rate:.4f}"]
        )
    if measured is not None:
        lines[0].append("measured")
        for line, rate in zip(lines[1:], measured, strict=True):
            line.append(f"{rate:.4f}")
    return f"{title}\n{_aligned(lines)}"


def allotted_as_text(allotted: Mapping[str, Allotment], features: Mapping[str, Feature]) -> str:
    """Return how memory is divided among tables, as a text table."""
    lines = [["table", "policy", "max_rows", "rows a rank", "memory", "hit rate"]]
    for name, each in allotted.items():
        lines.append(
            [name, str(each.policy), f"{each.max_rows:,}", f"{each.rows_per_rank:,}",
             size_text(each.bytes), f"{each.hit_rate:.4f}"]
        )  # fmt: skip
    size = sum(each.bytes for each in allotted.values())
    rate = f"{total_hit_rate(allotted, features):.4f}"
    return _aligned([*lines, ["all", "", "", "", size_text(size), rate]], left=2)


def total_hit_rate(allotted: Mapping[str, Allotment], features: Mapping[str, Feature]) -> float:
    """Return the predicted hit rate over the keys of all tables."""
    keys = {name: features[name].curve.keys for name in allotted}
    hits = sum(each.hit_rate * keys[name] for name, each in allotted.items())
    return hits / max(1, sum(keys.values()))


def as_json(features: Mapping[str, Feature], ranks: int = 1) -> dict[str, Any]:
    """Return the predictions for all features as JSON values."""
    found: dict[str, Any] = {}
    for name, (curve, row_bytes, measured) in features.items():
        points = []
        for i, (policy, rows, hit_rate) in enumerate(curve.points):
            point = {"score": policy.score, "admission": policy.admission, "ttl": policy.ttl}
            size = size_of(rows, row_bytes, ranks)[1]
            points.append({**point, "rows": rows, "bytes": size, "hit_rate": hit_rate})
            if measured is not None:
                points[-1]["measured"] = measured[i]
        about = {key: value for key, value in curve._asdict().items() if key != "points"}
        found[name] = {**about, "row_bytes": row_bytes, "points": points}
    return found


def allotted_as_json(allotted: Mapping[str, Allotment]) -> dict[str, Any]:
    """Return how memory is divided among tables as JSON values."""
    found = {}
    for name, each in allotted.items():
        policy = {"score": each.policy.score, "admission": each.policy.admission}
        rest = {key: value for key, value in each._asdict().items() if key != "policy"}
        found[name] = {**policy, **rest}
    return found


def plot(
    features: Mapping[str, Feature],
    out: str | os.PathLike[str],
    allotted: Mapping[str, Allotment] | None = None,
) -> None:
    """Plot hit rates against table rows, for the features with the most keys.

    Args:
        features: predictions by feature.
        out: path of the PNG file.
        allotted: each table's allotment from a budget, to mark in the plot.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    shown = sorted(features, key=lambda name: -features[name].curve.keys)[:_MOST_PLOTS]
    shown = [name for name in features if name in shown]
    columns = min(3, max(1, len(shown)))
    lines = -(-max(1, len(shown)) // columns)
    figure, axes = pyplot().subplots(
        lines, columns, figsize=(5.5 * columns, 4 * lines), layout="constrained", squeeze=False
    )
    for each in axes.flat[len(shown) :]:
        each.set_visible(False)
    for each, name in zip(axes.flat, shown, strict=False):
        _plot_feature(each, features[name])
        each.set(title=name, xlabel="rows", ylabel="hit rate")
        if allotted is not None and name in allotted:
            text = f"{allotted[name].max_rows:,} rows of the budget"
            each.axvline(allotted[name].max_rows, color="gray", linestyle=":", label=text)
        each.legend(fontsize=8, loc="lower right")
    figure.savefig(out, dpi=110, format="png")
    pyplot().close(figure)


def _plot_feature(axes: Any, feature: Feature) -> None:
    lines: dict[str, list[int]] = {}
    points = feature.curve.points
    for i, point in enumerate(points):
        lines.setdefault(str(point.policy), []).append(i)
    for color, (policy, places) in enumerate(lines.items()):
        places.sort(key=lambda i: points[i].rows)
        rows = [points[i].rows for i in places]
        rates = [points[i].hit_rate for i in places]
        axes.plot(rows, rates, color=f"C{color}", label=policy, marker=".")
        if feature.measured is not None:
            axes.plot(rows, [feature.measured[i] for i in places], color=f"C{color}", **_CIRCLES)
    if feature.measured is not None:
        axes.plot([], [], color="gray", label="measured", **_CIRCLES)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)


def _called(point: Point) -> str:
    """Return the name of a point's policy."""
    return str(point.policy) if point.policy.ttl is None else f"ttl {point.policy.ttl:,}"


def _aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows of cells as aligned text; the first `left` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
