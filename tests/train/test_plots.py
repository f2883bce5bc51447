"""Plots of a run and of scaling show the right numbers."""

import pytest

from sparsekit.train import JsonLines
from sparsekit.train.plots import MOST_TABLES, plot_run, plot_scaling, read_run

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pyplot = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def axes(monkeypatch):
    """Yield a function that returns the axes of the latest plot, as a dict by title."""
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield lambda: {each.get_title(): each for each in pyplot.gcf().axes}
    monkeypatch.undo()
    pyplot.close("all")


def points(line):
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def lines_of(axes):
    return {line.get_label(): points(line) for line in axes.lines}


def test_each_figure_of_a_run_is_where_its_title_says(tmp_path, axes):
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (2, 4, 5):
        names = ("rows", "load", "new_rows_per_step", "skew")
        tables = {
            f"t{t}": {name: 10.0 * t + step + i for i, name in enumerate(names)}
            for t in range(MOST_TABLES + 1)
        }
        record = {"step": step, "loss": 1 / step, "samples_per_second": 10.0 * step}
        record["tables"] = tables | {"no hash table": {"capacity": 1.0}}
        if step < 5:
            log.write({"kind": "step", "bytes_sent_per_step": 7.0 * step, **record})
        else:
            metrics = {"AUC": 0.75, "log loss": 0.5, "third": 9.0}
            log.write({"kind": "epoch", "metrics": metrics, **record})
    plot_run(tmp_path, tmp_path / "run.png")
    shown = axes()
    assert lines_of(shown["loss"]) == {
        "between two records": [(2, 0.5), (4, 0.25)],
        "of an epoch": [(5, 0.2)],
    }
    assert [points(line) for line in shown["samples/s"].lines] == [[(2, 20), (4, 40)]]
    (sent,) = shown["bytes that rank 0 sends in a step"].lines
    assert points(sent) == [(2, 14), (4, 28)]
    assert [points(line) for line in shown["metrics"].lines] == [[(5, 0.75)]]
    (right,) = [each for each in pyplot.gcf().axes if each.get_ylabel() == "log loss"]
    assert [points(line) for line in right.lines] == [[(5, 0.5)]]
    titles = ["rows in the tables", "load: rows / capacity", "new rows in a step"]
    for i, title in enumerate([*titles, "skew: rows of the fullest rank / mean"]):
        assert lines_of(shown[title]) == {  # the largest tables
            f"t{t}": [(step, 10 * t + step + i) for step in (2, 4, 5)]
            for t in range(1, MOST_TABLES + 1)
        }
    assert pyplot.gcf().get_suptitle() == f"{tmp_path.name}, 5 steps"


def test_what_becomes_of_rows_is_shown_where_a_table_has_scores(tmp_path, axes):
    log = JsonLines(tmp_path / "metrics.jsonl")
    own = {"loss": 1.0, "samples_per_second": 1.0}
    figures = {"rows": 8.0, "load": 0.5, "new_rows_per_step": 1.0, "skew": 1.0}
    names = ("inserted", "evicted", "expired", "refused")
    for step in (2, 6):
        life = {name: 10.0 * step + i for i, name in enumerate(names)}
        tables = {"a": {**figures, **life, "hit_rate": step / 10}, "b": figures}
        tables["c"] = {**tables["a"], "hit_rate": None}
        record = {"step": step, **own, "tables": tables}
        log.write({"kind": "step", "bytes_sent_per_step": 1.0, **record})
    deciles = {"age_deciles": [*range(11)], "score_deciles": [*range(100, 111)]}
    tables = {name: {**each, **deciles} for name, each in tables.items() if name != "b"}
    log.write({"kind": "epoch", "metrics": {}, **record, "tables": tables | {"b": figures}})
    plot_run(tmp_path, tmp_path / "run.png")
    shown = axes()
    flows = lines_of(shown["rows that come and go in a step, all tables"])
    # Two tables with scores; the epoch's record repeats that of its last step.
    assert flows == {
        name: [(2, (20 + i) * 2 / 2), (6, (60 + i) * 2 / 4)] for i, name in enumerate(names)
    }
    (right,) = [each for each in pyplot.gcf().axes if each.get_ylabel() == "rows (dashed)"]
    assert [points(line) for line in right.lines] == [[(2, 16), (6, 16)]]
    hits = lines_of(shown["hit rate: keys that had a row / keys"])
    assert hits == {"a": [(2, 0.2), (6, 0.6), (6, 0.6)]}
    for title, first in (("ages", 0), ("scores", 100)):
        spread = lines_of(shown[f"{title} of rows, latest epoch"])
        assert spread["a"] == spread["c"] == [(10 * i, first + i) for i in range(11)]


@pytest.mark.parametrize("forecast", [{}, {8: (4.0, 6.0), 64: (5.0, 30.0)}])
def test_speed_up_is_over_one_rank(tmp_path, axes, forecast):
    plot_scaling({1: 10.0, 2: 18.0, 4: 30.0}, forecast, tmp_path / "scaling.png")
    (shown,) = axes().values()
    lines = lines_of(shown)
    assert lines["measured"] == [(1, 1.0), (2, 1.8), (4, 3.0)]
    assert lines["ideal"] == [(n, n) for n in (1, 2, 4, *forecast)]
    assert len(shown.collections) == bool(forecast)
    for area in shown.collections:
        corners = {tuple(corner) for corner in area.get_paths()[0].vertices.tolist()}
        assert corners == {(n, y) for n, pair in forecast.items() for y in pair}


def test_no_screen_is_asked_for(tmp_path):
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        plot_scaling({1: 10.0, 2: 18.0}, {}, tmp_path / "scaling.png")
        assert matplotlib.get_backend().lower() == "agg"
    finally:
        matplotlib.use(before)


def test_a_line_that_was_cut_off_with_the_run_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "step", "st')
    assert [record["step"] for record in read_run(tmp_path)] == [1]


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "null", "5", "[]", '{"step": 2}', '{"kind": "x", "step": 2}', '{"kind": "step"}',
        '{"kind": "epoch", "step": 2.0}', '{"kind": "epoch", "step": null}',
    ],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"kind": "step", "step": 1}}\n{line}\n{{"kind": "epoch", "step": 1}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: no record of training$"):
        read_run(tmp_path)
    path.write_text(f'{{"kind": "step", "step": 1}}\n{line}')
    if line in ("", "{", "null"):
        assert len(read_run(tmp_path)) == 1
    else:
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: no record of training$"):
            read_run(tmp_path)


def test_a_run_without_records_has_no_plot(tmp_path):
    with pytest.raises(FileNotFoundError):
        plot_run(tmp_path, tmp_path / "run.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=f"^{tmp_path}: no record of training yet$"):
        plot_run(tmp_path, tmp_path / "run.png")
    assert not (tmp_path / "run.png").exists()


@pytest.mark.parametrize("kind", ["step", "epoch"])
def test_what_a_run_lacks_is_said_in_place_of_it(tmp_path, axes, kind):
    record = {"kind": kind, "step": 0, "loss": 1.0, "samples_per_second": 8.0, "tables": {}}
    record |= {"bytes_sent_per_step": 0.0} if kind == "step" else {"metrics": {}}
    JsonLines(tmp_path / "metrics.jsonl").write(record)
    plot_run(tmp_path, tmp_path / "run.png")
    texts = {title: [text.get_text() for text in each.texts] for title, each in axes().items()}
    sent = "bytes that rank 0 sends in a step"
    assert texts.pop("metrics") == ["nothing was evaluated"]
    assert texts.pop("loss") == texts.pop("samples/s") == []
    assert texts.pop(sent) == ["no record between epochs: log every fewer steps"] * (
        kind == "epoch"
    )
    assert texts.popitem()[1] == ["no hash table"]
    assert list(texts.values()) == [["no hash table"]] * 3
    for title, each in axes().items():
        assert each.get_xlim() == (0, 1.05)
        if title in ("samples/s", sent):
            assert each.get_ylim() == (0, 8.8 if title == "samples/s" else 1)


def test_plots_are_closed_and_axes_are_named(tmp_path, monkeypatch):
    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", lambda figure: figures.append(figure) or close(figure))
    tables = {"t": dict.fromkeys(("rows", "load", "new_rows_per_step", "skew"), 1.0)}
    record = {"kind": "epoch", "step": 3, "loss": 1.0, "samples_per_second": 8.0, "tables": tables}
    JsonLines(tmp_path / "metrics.jsonl").write({**record, "metrics": {"AUC": 0.5}})
    plot_run(tmp_path, tmp_path / "run.png")
    plot_scaling({1: 10.0, 2: 18.0}, {}, tmp_path / "scaling.png")
    assert not pyplot.get_fignums()
    assert [each.get_xlabel() for each in figures[0].axes] == [""] * 4 + ["step"] * 4
    assert all(each.get_legend() for each in figures[0].axes[4:])
    assert not any("no hash" in text.get_text() for each in figures[0].axes for text in each.texts)
    (scaling,) = figures[1].axes
    assert [scaling.get_xscale(), scaling.get_yscale()] == ["log", "log"]
    assert [text.get_text() for text in scaling.get_xticklabels()] == ["1", "2"]
    assert (scaling.get_xlabel(), scaling.get_ylabel()) == ("ranks", "times")
