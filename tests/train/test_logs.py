"""Tests of training logs: JSON lines, TensorBoard, statistics of tables, plots."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

import sparsekit
from sparsekit.train import JsonLines, Telemetry, TensorBoard, Trainer, progress
from sparsekit.train.logs import go_on
from sparsekit.train.plots import plot_run, plot_scaling, read_run


def train(logs, epochs=2, log_every=2, **layer):
    """Train one layer on keys 0 to 19; each step of the first epoch has 4 new keys."""
    settings = {"name": "items", "seed": 0, **layer}
    model = sparsekit.DistributedEmbedding("sum", 50, 2, 1, 1, **settings)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)

    def losses(model, batch):
        return model(batch[0].view(-1, 1, 1)).sum((1, 2)), 0.0

    trainer = Trainer(model, losses, [sgd], stream=io.StringIO(), logs=logs, log_every=log_every)
    batches = [(keys,) for keys in torch.arange(20).split(4)]
    return trainer.fit(batches, epochs=epochs, evaluate=lambda model: {"AUC": 0.75})


def test_records_of_steps_and_epochs(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    history = train([JsonLines(path)])
    records = read_run(path.parent)
    assert records == [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in records] == [
        *(("step", 2), ("step", 4), ("epoch", 5)),
        *(("step", 6), ("step", 8), ("step", 10), ("epoch", 10)),
    ]
    assert [r["epoch"] for r in records if r["kind"] == "step"] == [1, 1, 2, 2, 2]
    assert all(r["lr"] == {"0": 0.5} for r in records if r["kind"] == "step")
    assert all(r["samples_per_second"] > 0 for r in records)
    epochs = [r for r in records if r["kind"] == "epoch"]
    assert [r["metrics"] for r in epochs] == [{"AUC": 0.75}] * 2
    assert [r["loss"] for r in epochs] == [epoch.loss for epoch in history]


def test_the_loss_of_a_record_is_that_since_the_one_before(tmp_path):
    losses = iter([1.0, 2.0, 3.0, 5.0])
    model = torch.nn.Linear(1, 1)

    def loss_fn(model, batch):
        return batch[0] * 0 + next(losses) + 0 * model.weight.sum(), 0.0

    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    logs = [JsonLines(tmp_path / "metrics.jsonl")]
    trainer = Trainer(model, loss_fn, [sgd], stream=io.StringIO(), logs=logs, log_every=2)
    trainer.fit([(torch.zeros(1),), (torch.zeros(3),)] * 2, epochs=1)
    found = [record["loss"] for record in read_run(tmp_path)]
    assert found == pytest.approx([7 / 4, 18 / 4, 25 / 8])


def test_rates_are_of_the_time_since_the_record_before(tmp_path, monkeypatch):
    """An epoch's rate covers the time since the epoch began, without its evaluation."""

    class Clock:
        now = 50.0

        def perf_counter(self):
            return self.now

    clock, seconds = Clock(), iter([1.0, 2.0, 3.0, 5.0] * 2)
    monkeypatch.setattr(progress, "time", clock)
    model = torch.nn.Linear(1, 1)

    def loss_fn(model, batch):
        clock.now += next(seconds)
        return model(batch)[:, 0], 0.0

    def evaluate(model):
        clock.now += 100
        return {}

    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    logs, stream = [JsonLines(tmp_path / "metrics.jsonl")], io.StringIO()
    trainer = Trainer(model, loss_fn, [sgd], stream=stream, logs=logs, log_every=2)
    trainer.fit([torch.zeros(1, 1), torch.zeros(3, 1)] * 2, epochs=2, evaluate=evaluate)
    records = read_run(tmp_path)
    assert [r["samples_per_second"] for r in records] == pytest.approx([4 / 3, 4 / 8, 8 / 11] * 2)
    assert [r["seconds"] for r in records if r["kind"] == "epoch"] == [11.0, 11.0]
    assert [epoch.seconds for epoch in trainer.history] == [11.0, 11.0]
    assert stream.getvalue().splitlines()[1].endswith("  1 samples/s")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    log.write({"kind": "epoch", "step": 1, "metrics": {"a": float("nan"), "b": float("-inf")}})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["metrics"] == {"a": None, "b": None}


def test_figures_of_tables():
    history = train([], log_every=100)
    first, second = (epoch.tables["items"] for epoch in history)
    assert {"rows": 20, "capacity": 50, "load": 0.4, "skew": 1.0}.items() <= first.items()
    assert first["new_rows_per_step"] == 4.0
    assert second["new_rows_per_step"] == 0.0
    assert 0 <= first["full_lines"] <= 1


def test_full_lines_are_those_without_a_free_place():
    layer = sparsekit.DistributedEmbedding("sum", 1000, 1, 1, 1, seed=0, name="t")
    layer(torch.arange(990).view(-1, 1, 1))
    buckets = layer.table.tensors()[0]
    rows = buckets[:, 5:].contiguous().view(torch.int32).tolist()
    full = [all(row >= 0 for row in line[:5]) for line in rows]
    found = Telemetry(layer).read(1, None)["t"]["full_lines"]
    assert found == pytest.approx(sum(full) / len(full), abs=1e-6)
    assert 0 < found < 1


def test_a_table_without_hash_table_has_its_capacity_only():
    layer = sparsekit.DistributedEmbedding("sum", 7, 1, 1, use_hashtable=False, name="t")
    assert Telemetry(torch.nn.Sequential(layer)).read(3, None) == {"t": {"capacity": 7.0}}
    assert Telemetry(torch.nn.Linear(1, 1)).read(3, None) == {}


def test_tensorboard_gets_each_number(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train([TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path)).Reload()
    scalars = [(e.step, e.value) for e in events.Scalars("epoch/metrics/AUC")]
    assert scalars == [(5, 0.75), (10, 0.75)]
    assert "step/tables/items/rows" in events.Tags()["scalars"]

    train([TensorBoard(tmp_path)], epochs=1)  # hides an older run's events
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("epoch/metrics/AUC")] == [(5, 0.75)]
    again = TensorBoard(tmp_path)
    again.forget_after(4)
    again.write({"kind": "step", "step": 6, "loss": 1.0})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.step for e in events.Scalars("step/loss")] == [2, 4, 6]
    again.write({"kind": "step", "step": 8, "loss": 1.0})  # visible while the run continues
    assert [e.step for e in events.Reload().Scalars("step/loss")] == [2, 4, 6, 8]


def test_a_new_run_begins_the_file_anew(tmp_path):
    """A new run overwrites the file: a plot of two runs would jump back and forth."""
    path = tmp_path / "metrics.jsonl"
    train([JsonLines(path)], epochs=3)
    path.write_text(path.read_text() + '{"kind": "ste')
    log = JsonLines(path)
    assert len(path.read_text().splitlines()) == 11  # the old lines stay until the first record
    train([log], epochs=1)
    assert [record["step"] for record in read_run(tmp_path)] == [2, 4, 5]


def test_a_second_fit_and_a_loaded_state_go_on(tmp_path):
    log = JsonLines(tmp_path / "metrics.jsonl")
    model = torch.nn.Linear(1, 1)

    def make(logs):
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        losses = lambda model, batch: (model(batch)[:, 0], 0.0)  # noqa: E731
        return Trainer(model, losses, [sgd], stream=io.StringIO(), logs=logs)

    trainer = make([log])
    trainer.fit([torch.ones(2, 1)] * 3, epochs=1)
    trainer.fit([torch.ones(2, 1)] * 3, epochs=1)
    state = trainer.state_dict()
    trainer.fit([torch.ones(2, 1)] * 3, epochs=1)
    assert [record["step"] for record in read_run(tmp_path)] == [3, 6, 9]
    again = make([JsonLines(tmp_path / "metrics.jsonl")])
    again.load_state_dict(state)
    again.fit([torch.ones(2, 1)], epochs=1)
    assert [record["step"] for record in read_run(tmp_path)] == [3, 6, 7]


@pytest.mark.parametrize(
    "damaged",
    [b"{bad", b'{"kind": "step"}', b"[1]", b"null", b'{"step": "1"}', b"\0\0\0", b"\xff", b""],
)
def test_damaged_lines_do_not_stop_what_goes_on(tmp_path, damaged):
    path = tmp_path / "metrics.jsonl"
    records = [json.dumps({"kind": "epoch", "step": step}).encode() for step in (1, 2, 3)]
    path.write_bytes(b"\n".join([records[0], damaged, *records[1:], damaged, damaged, b'{"kind']))
    log, stream = JsonLines(path), io.StringIO()
    go_on([log], 2, stream)
    said = f"{path}: lines 2, 5, 6 were no records of training and are gone\n"
    assert stream.getvalue() == said
    log.write({"kind": "epoch", "step": 3})
    assert [record["step"] for record in read_run(tmp_path)] == [1, 2, 3]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    train([JsonLines(tmp_path / "metrics.jsonl")])
    plot_run(tmp_path, tmp_path / "run.png")
    plot_scaling({1: 10.0, 2: 18.0}, {8: (4.0, 6.0)}, tmp_path / "scaling.png")
    for name in ("run.png", "scaling.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_short_run_can_be_read(tmp_path, monkeypatch):
    """The plot of a run without step records shows the epoch, and marks where data are missing."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    train([JsonLines(tmp_path / "metrics.jsonl")], epochs=1, log_every=1000)
    plot_run(tmp_path, tmp_path / "run.png")
    axes = {each.get_title(): each for each in pyplot.gcf().axes}
    monkeypatch.undo()
    pyplot.close("all")
    loss, sent = axes["loss"], axes["bytes that rank 0 sends in a step"]
    (steps,) = loss.lines[0].get_xdata()
    assert loss.get_xlim()[0] == 0
    assert steps < loss.get_xlim()[1] < 2 * steps
    assert all(tick == int(tick) for tick in loss.get_xticks())
    assert [each.get_text() for each in sent.texts] == [
        "no record between epochs: log every fewer steps"
    ]
    assert not axes["rows in the tables"].texts


def test_level_lines_and_missing_tables_can_be_read(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    log = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        numbers = {"loss": 1.0, "samples_per_second": 5.0, "bytes_sent_per_step": 1000.0}
        log.write({"kind": "step", "step": step, **numbers, "tables": {}})
    plot_run(tmp_path, tmp_path / "run.png")
    axes = {each.get_title(): each for each in pyplot.gcf().axes}
    monkeypatch.undo()
    pyplot.close("all")
    assert axes["bytes that rank 0 sends in a step"].get_ylim() == pytest.approx((0, 1100))
    assert [each.get_text() for each in axes["rows in the tables"].texts] == ["no hash table"]


def test_no_run(tmp_path):
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        read_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    for line in ('{"kind": "other", "step": 2}', '{"kind": "step"}', '["step", 2]', "{"):
        path.write_text('{"kind": "step", "step": 1}\n' + line + "\n")
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2: no record of training"):
            read_run(tmp_path)
    path.write_text("")
    with pytest.raises(ValueError, match="no record of training yet"):
        plot_run(tmp_path, tmp_path / "run.png")


@pytest.mark.parametrize("damaged", [0, 1, 5, 6])
def test_lines_that_are_gone_are_named(tmp_path, damaged):
    path, stream = tmp_path / "metrics.jsonl", io.StringIO()
    path.write_text("{\n" * damaged)
    go_on([object(), JsonLines(path)], 2, stream)
    numbers = ", ".join(map(str, range(1, min(damaged, 5) + 1))) + ", ..." * (damaged > 5)
    said = f"{path}: lines {numbers} were no records of training and are gone\n"
    if damaged == 1:
        said = f"{path}: line 1 was no record of training and is gone\n"
    assert stream.getvalue() == said * bool(damaged)


def test_a_run_goes_on_where_nothing_was_logged(tmp_path):
    log = JsonLines(tmp_path / "new" / "metrics.jsonl")
    assert log.forget_after(3) == []
    log.write({"kind": "step", "step": 4})
    assert [record["step"] for record in read_run(tmp_path / "new")] == [4]


def test_bytes_and_rows_are_those_since_the_last_time():
    layer = sparsekit.DistributedEmbedding("sum", 50, 2, 1, 1, name="t")
    figures = Telemetry(layer)
    exchange = SimpleNamespace(bytes_sent=100)
    assert figures.bytes_sent(exchange) == 100
    exchange.bytes_sent = 250
    assert figures.bytes_sent(exchange) == 150
    assert Telemetry(layer).bytes_sent(None) == 0
    for keys, step, new in ((6, 2, 3.0), (6, 4, 0.0), (16, 9, 2.0)):
        layer(torch.arange(keys).view(-1, 1, 1))
        found = figures.read(step, None)["t"]
        assert found["new_rows_per_step"] == new
        assert figures.read(step, None)["t"] == found


def test_the_folder_of_a_file_is_made(tmp_path):
    JsonLines(tmp_path / "a" / "b" / "m.jsonl").write({"kind": "step", "step": 1})
    assert (tmp_path / "a/b/m.jsonl").read_text() == '{"kind": "step", "step": 1}\n'


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (1, "line 2 was no record of training and is gone"),
        (2, "lines 2, 3 were no records of training and are gone"),
        (5, "lines 2, 3, 4, 5, 6 were no records of training and are gone"),
        (6, "lines 2, 3, 4, 5, 6, ... were no records of training and are gone"),
    ],
)
def test_lines_that_were_no_records_are_told(tmp_path, damaged, said):
    path, stream = tmp_path / "m.jsonl", io.StringIO()
    path.write_text('{"step": 1}\n' + "{\n" * damaged + '{"step": 2}\n{"step": 3}\n')
    go_on([JsonLines(path)], 2, stream)
    assert stream.getvalue() == f"{path}: {said}\n"
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    go_on([JsonLines(path), JsonLines(tmp_path / "none")], 2, stream)
    assert stream.getvalue().count("\n") == 1


def test_numbers_reach_tensorboard_at_once_and_step_is_none_of_them(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    calls = []

    class Recorded:
        def add_scalar(self, *arguments):
            calls.append(arguments)

        def flush(self):
            calls.append("flush")

    log = TensorBoard(tmp_path)
    log._make = Recorded
    log.write({"kind": "step", "step": 7, "loss": 0.5, "tables": {"a": {"rows": 3}}, "x": "text"})
    assert calls == [("step/loss", 0.5, 7), ("step/tables/a/rows", 3, 7), "flush"]
