"""Plots the suite `curves` as PNG files; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from .peers import optional
from .report import ReportError, Row, Run


def missing() -> str | None:
    """Return why plots are impossible; None if matplotlib is installed."""
    return optional.missing("matplotlib")


def plot(runs: Sequence[Run], out: Path) -> list[Path]:
    """Write a PNG for each figure in the runs, and return the paths."""
    rows = [(run, row) for run in runs for row in run["results"] if row["curve"]]
    if not rows:
        raise ReportError("no curves in these files: they come from `run --suite curves --json`")
    figures: dict[str, list[Row]] = {}
    for _, row in rows:
        figures.setdefault(row["curve"]["figure"], []).append(row)
    machine = rows[0][0]["machine"]
    stamp = f"{machine['cpu']}, torch {machine['torch']}, commit {machine['commit']}"
    out.mkdir(parents=True, exist_ok=True)
    return [_plot(name, of_figure, stamp, out) for name, of_figure in figures.items()]


def _plot(name: str, rows: Sequence[Row], stamp: str, out: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")  # a backend that does not need a screen
    from matplotlib import pyplot

    series: dict[str, dict[float, float]] = {}
    for row in rows:
        curve = row["curve"]
        # items / ms / 1000 is millions of items per second.
        series.setdefault(f"sparsekit, {curve['series']}", {})[curve["x"]] = (
            curve["items"] / row["ms"] / 1e3
        )
        series.setdefault(f"{row['against']}, {curve['series']}", {})[curve["x"]] = (
            curve["items"] / row["against_ms"] / 1e3
        )
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for label, points in series.items():
        ours = label.startswith("sparsekit")
        style = {"linewidth": 2.2, "marker": "o"} if ours else {"linestyle": "--", "marker": "."}
        axes.plot(list(points), list(points.values()), label=label, **style)
    x_name = rows[0]["curve"]["x_name"]
    if x_name != "load factor":
        axes.set_xscale("log", base=2 if x_name == "dim" else 10)
    axes.set(title=name, xlabel=x_name, ylabel="million a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.supxlabel(stamp, fontsize=6)
    path = out / f"{name.replace(' ', '-')}.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
