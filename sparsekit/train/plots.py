"""Plots training runs, tables and speed-ups as PNG files; needs matplotlib."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .._extras import needed
from ..checkpoint.histogram import Spread
from ..checkpoint.table_figures import TableFigures
from ..checkpoint.table_lines import shown
from .logs import METRICS

# Maximum number of tables to plot; those with the most rows are chosen.
MOST_TABLES = 8
OF_TABLES = {
    "rows": "rows in the tables",
    "load": "load: rows / capacity",
    "new_rows_per_step": "new rows in a step",
    "skew": "skew: rows of the fullest rank / mean",
}
SHARE = "% of the rows"
# Counts from `Telemetry` to plot, for tables whose rows have scores.
FLOWS = ("inserted", "evicted", "expired", "refused")
OF_ROWS = {
    "age_deciles": "ages of rows, latest epoch",
    "score_deciles": "scores of rows, latest epoch",
}


def read_run(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the records of a run.

    Raises:
        OSError: there is no metrics.jsonl in the folder.
        ValueError: a line of the file was not written by `JsonLines`; the message gives its number.
    """
    path = Path(folder) / METRICS
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if record is None and not line.endswith("\n"):
                break  # the run was killed while it wrote the last line
            known = isinstance(record, dict) and record.get("kind") in ("step", "epoch")
            if not known or not isinstance(record.get("step"), int):
                raise ValueError(f"{path}:{number}: no record of training")
            records.append(record)
    return records


def plot_run(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Plot the loss, metrics, speed and table statistics of a run in one picture.

    If a table has scores, a third row of plots shows the hit rate, how many table rows are added
    and dropped, and their ages.

    Raises:
        ImportError: matplotlib is missing.
        OSError, ValueError: as for `read_run`; or the run has no records.
    """
    records = read_run(folder)
    steps = [record for record in records if record["kind"] == "step"]
    epochs = [record for record in records if record["kind"] == "epoch"]
    if not records:
        raise ValueError(f"{os.fspath(folder)}: no record of training yet")
    plt = pyplot()
    living = _largest_tables(records, "inserted")
    lines = 3 if living else 2
    figure, axes = plt.subplots(lines, 4, figsize=(18, 4 * lines), layout="constrained")
    figure.suptitle(f"{Path(folder).resolve().name}, {records[-1]['step']:,} steps")
    (loss, metrics, speed, sent), of_tables, *of_life = axes

    _line(loss, steps, "loss", "between two records")
    _line(loss, epochs, "loss", "of an epoch", marker="o")
    loss.set(title="loss")
    _metrics(metrics, epochs)
    _line(speed, steps or epochs, "samples_per_second", None, marker=".")
    speed.set(title="samples/s")
    _line(sent, steps, "bytes_sent_per_step", None, marker=".")
    sent.set(title="bytes that rank 0 sends in a step")
    for each in (speed, sent):
        # Begin at 0, and leave a margin of 10% above the highest point.
        each.set_ylim(0, 1.1 * max((max(line.get_ydata()) for line in each.lines), default=0) or 1)
    if not steps:
        _say(sent, "no record between epochs: log every fewer steps")
    names = _largest_tables(records, "rows")
    if not names:
        for each in of_tables:
            _say(each, "no hash table")
    for each, (key, title) in zip(of_tables, OF_TABLES.items(), strict=True):
        for name in names:
            points = [{"step": r["step"], key: r["tables"][name][key]} for r in records]
            _line(each, points, key, name, marker=".")
        each.set(title=title, xlabel="step")
    if living:
        _coming_and_going(of_life[0][0], records)
        _hit_rates(of_life[0][1], records, living)
        _deciles(of_life[0][2:], epochs, living)
    for each in axes.flat:
        each.grid(alpha=0.3)
        if each.get_legend_handles_labels()[0]:
            each.legend(fontsize=8)
        if each.get_xlabel() == SHARE:
            continue
        # Begin at 0; by default, matplotlib centers the axis on a single record.
        each.set_xlim(0, 1.05 * max(records[-1]["step"], 1))
        each.locator_params(axis="x", integer=True)
    figure.savefig(out, dpi=110, format="png")
    plt.close(figure)


def _metrics(axes: Any, epochs: Sequence[Mapping[str, Any]]) -> None:
    """Plot the metrics. The second metric has its own axis on the right, since scales differ."""
    names = sorted({name for record in epochs for name in record["metrics"]})
    for i, name in enumerate(names[:2]):
        each = axes if i == 0 else axes.twinx()
        points = [{"step": record["step"], name: record["metrics"].get(name)} for record in epochs]
        _line(each, points, name, None, marker="o", color=f"C{i}")
        each.set_ylabel(name, color=f"C{i}")
    if not names:
        _say(axes, "nothing was evaluated")
    axes.set(title="metrics")


def _coming_and_going(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Plot how many rows are added and dropped per step and, on the right axis, how many exist."""
    points = []
    for before, record in pairwise([{"step": 0}, *records]):
        steps = record["step"] - before["step"]
        if steps > 0:  # a record from the same step has the same counts
            living = [figures for figures in record["tables"].values() if "inserted" in figures]
            point = {name: sum(figures[name] for figures in living) / steps for name in FLOWS}
            rows = sum(figures["rows"] for figures in living)
            points.append({"step": record["step"], "rows": rows, **point})
    for name in FLOWS:
        _line(axes, points, name, name, marker=".")
    right = axes.twinx()
    _line(right, points, "rows", None, color="gray", linestyle="--")
    right.set_ylabel("rows (dashed)", color="gray")
    right.set_ylim(bottom=0)
    axes.set(title="rows that come and go in a step, all tables", xlabel="step")


def _hit_rates(axes: Any, records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for name in names:
        points = [
            {"step": r["step"], "hit_rate": r["tables"][name].get("hit_rate")} for r in records
        ]
        _line(axes, points, "hit_rate", name, marker=".")
    if not axes.lines:
        _say(axes, "not known on CUDA")
    axes.set(title="hit rate: keys that had a row / keys", xlabel="step")


def _deciles(
    axes: Sequence[Any], epochs: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Plot the distributions of ages and scores at the end of the latest epoch."""
    for each, (key, title) in zip(axes, OF_ROWS.items(), strict=True):
        for name in names:
            deciles = epochs[-1]["tables"][name].get(key) if epochs else None
            if deciles:
                each.plot(range(0, 101, 10), deciles, label=name, marker=".", markersize=4)
        if not each.lines:
            _say(each, "no epoch has ended")
        each.set(title=title, xlabel=SHARE)
        each.set_yscale("symlog")
        each.set_ylim(bottom=0)


def plot_scaling(
    measured: Mapping[int, float],
    forecast: Mapping[int, tuple[float, float]],
    out: str | os.PathLike[str],
) -> None:
    """Plot the speed-up over one rank, as measured and as predicted.

    Args:
        measured: samples per second, by number of ranks.
        forecast: lowest and highest predicted speed-up, by number of ranks.
        out: path of the picture.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    speed_up = {ranks: rate / measured[1] for ranks, rate in measured.items()}
    ranks = sorted({*measured, *forecast})
    axes.plot(ranks, ranks, linestyle=":", color="gray", label="ideal")
    axes.plot(list(speed_up), list(speed_up.values()), marker="o", linewidth=2, label="measured")
    if forecast:
        worst, best = zip(*forecast.values(), strict=True)
        axes.fill_between(list(forecast), worst, best, alpha=0.25, label="predicted")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(title="speed-up over one rank, same batch", xlabel="ranks", ylabel="times")
    axes.set_xticks(ranks, [str(each) for each in ranks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=110, format="png")
    plt.close(figure)


def plot_tables(tables: Sequence[TableFigures], out: str | os.PathLike[str]) -> None:
    """Plot how norms, ages and scores are distributed over tables' rows, one line per table.

    If there are more than 8 tables, the largest are plotted. Columns without data for any plotted
    table are left out.

    Args:
        tables: the statistics of at least one table.
        out: path of the picture.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    plt = pyplot()
    chosen = sorted(tables, key=lambda table: -table.rows)[:MOST_TABLES]
    titles = {"norms": "norm of the vector", "ages": "age: since the last lookup in training"}
    titles["scores"] = "score"
    columns = [
        name
        for name in titles
        if name == "norms" or any(getattr(table, name) is not None for table in chosen)
    ]
    size = 5.5 * len(columns) + 0.5, 2.6 * len(chosen) + 0.6
    figure, axes = plt.subplots(
        len(chosen), len(columns), figsize=size, layout="constrained", squeeze=False
    )
    for line, table in zip(axes, chosen, strict=True):
        for each, name in zip(line, columns, strict=True):
            _spread(each, getattr(table, name))
            each.set_xlabel(titles[name])
        dead = "" if table.dead is None else f", {table.dead.rows:,} dead"
        title = f"{shown(table.name)}: {table.rows:,} rows{dead}"
        line[0].set_title(title, loc="left", parse_math=False)
        line[0].set_ylabel("rows")
    figure.savefig(out, dpi=110, format="png")
    plt.close(figure)


def _spread(axes: Any, spread: Spread | None) -> None:
    """Plot a distribution as a histogram, with its median."""
    if spread is None:
        axes.axis("off")
        return
    axes.stairs(spread.counts, spread.edges, fill=True, alpha=0.8)
    median = spread.quantiles[0.5]
    axes.axvline(median, color="black", linewidth=1, label=f"median {median:.4g}")
    if spread.logarithmic:
        low = next(edge for edge in spread.edges if edge > 0)
        axes.set_xscale("symlog", linthresh=low)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(spread.edges[-1])))
        steps = (1, 2, 5) if len(decades) < 4 else (1,)  # as many labels as there is room for
        ticks = [0.0, *(step * 10.0**decade for decade in decades for step in steps)]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlim(spread.edges[0], spread.edges[-1])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _largest_tables(records: Sequence[Mapping[str, Any]], having: str) -> list[str]:
    """Return the names of the largest tables that have the statistic named by `having`."""
    tables = records[-1]["tables"]
    known = [name for name, figures in tables.items() if having in figures]
    return sorted(known, key=lambda name: -tables[name]["rows"])[:MOST_TABLES]


def _say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)


def _line(
    axes: Any, records: Sequence[Mapping[str, Any]], key: str, label: str | None, **style: Any
) -> None:
    points = [(record["step"], record[key]) for record in records if record[key] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)


def pyplot() -> Any:
    """Return matplotlib.pyplot with a backend that needs no screen.

    Raises:
        ImportError: matplotlib is missing.
    """
    needed("matplotlib", "a plot").use("Agg")
    return needed("matplotlib.pyplot", "a plot")
