"""The commands of the click models check settings, compute metrics, and save and report runs."""

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsekit.cli.common import UsageError
from sparsekit.data import Batch
from sparsekit.datasets import Adult
from sparsekit.datasets.adult import CATEGORIES, NUMBERS
from sparsekit.errors import DivergedError, TableFullError
from sparsekit.hashing import xxh64
from sparsekit.models import DLRM, QuantileBuckets
from sparsekit.recipes.clicks import command, predict, trained
from sparsekit.recipes.clicks.config import DLRMConfig, RunConfig
from sparsekit.train import TensorBoard


def arguments(**others):
    return argparse.Namespace(**{
        "model": "dlrm", "config": None, "settings": None, "data": None, "epochs": None,
        "log": None, "run_folder": None, "checkpoint": None, "resume": False, "seed": 0, **others,
    })  # fmt: skip


def test_flags_count_more_than_settings_and_these_more_than_the_file(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("model: {dim: 3, rows: 5}\ntrainer: {epochs: 7}\ndata: {sparse: [a]}\n")
    given = {"config": str(file), "settings": ["model.dim=4", "data.train=x", "trainer.epochs=8"]}
    config = command._config(arguments(**given))
    assert (config.model.dim, config.model.rows, config.trainer.epochs) == (4, 5, 8)
    assert config.data.train == ("x",)
    config = command._config(arguments(**given, data=["y", "z"], epochs=9))
    assert (config.data.train, config.trainer.epochs) == (("y", "z"), 9)
    assert command._config(arguments()) == RunConfig(DLRMConfig())
    file.write_text("model: {dims: 3}")
    with pytest.raises(ValueError, match=rf"{file}: no setting model\.dims"):
        command._config(arguments(config=str(file)))
    with pytest.raises(UsageError, match=r"^--config .*y.yaml: No such file .*mean .*x.yaml"):
        command._config(arguments(config=str(tmp_path / "y.yaml")))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_pipe_cannot_be_read_in_each_epoch(tmp_path, monkeypatch, split):
    monkeypatch.setattr(Path, "is_fifo", lambda path: path.name == "pipe")
    settings = ["data.sparse=a", "data.train=x", f"data.{split}=x,pipe"]
    with pytest.raises(UsageError, match=r"^pipe: is a pipe, but each epoch reads anew"):
        command._load(arguments(settings=settings))
    assert command._load(arguments(settings=settings[:2])) is None
    monkeypatch.setattr(command, "load_people", lambda args: ("people", args))
    args = arguments()
    assert command._load(args) == ("people", args)


def test_a_full_table_names_its_setting(monkeypatch):
    def full(*_):
        raise TableFullError("user", 0, 5, 5, 1)

    monkeypatch.setattr(command, "_fit", full)
    with pytest.raises(UsageError, match=r"^user: .* Here that is model\.rows\.$"):
        command._fit_and_report(None, arguments())


@pytest.mark.parametrize(("ranks", "expected"), [(1, 10), (3, 4), (4, 3)])
def test_the_batch_of_a_rank_is_rounded_up(monkeypatch, tmp_path, ranks, expected):
    (tmp_path / "x").write_text("label,a\n1,x\n")
    settings = ["data.sparse=a", f"data.train={tmp_path / 'x'}", "trainer.global_batch_size=10"]
    settings.append("data.separator=/")
    config = command._config(arguments(settings=settings))
    monkeypatch.setattr(command, "world_size", lambda: ranks)
    reader = command.reader_of(config, config.data.train, 0)
    assert reader.batch_size == expected
    assert reader.columns.sparse["a"].separator == "/"


def test_buckets_are_of_the_people_who_are_trained_on(tmp_path):
    columns = {name: np.array(["a"] * 60, object) for name in CATEGORIES}
    columns |= {name: np.array([str(i) for i in range(60)], object) for name in NUMBERS}
    train = Adult(columns, torch.arange(60) % 2.0)
    config = command._config(arguments(settings=["trainer.patience=1"]))
    written, buckets = command._write_adult((train, train), config, tmp_path)
    fewer, validation = train.split(0.2, 1)
    expected = QuantileBuckets.fit(fewer.columns, NUMBERS, 32)
    assert {name: cuts.tolist() for name, cuts in buckets.edges.items()} == {
        name: cuts.tolist() for name, cuts in expected.edges.items()
    }
    text = Path(written.data.validation[0]).read_text().splitlines()
    ages = [row.split(",")[1 + text[0].split(",")[1:].index("age")] for row in text[1:]]
    assert ages == validation.columns["age"].tolist()


class Trainer:
    """A trainer that records the arguments with which `fit` is called."""

    interrupted = False

    def fit(self, reader, **asked):
        self.asked = {"reader": reader, **asked}


@pytest.fixture
def fitted(monkeypatch):
    """Replace everything that `_fit` calls; return the trainer and the later calls' arguments."""
    trainer, calls = Trainer(), []
    reader = SimpleNamespace(columns="columns")
    monkeypatch.setattr(command, "reader_of", lambda *_: reader)
    monkeypatch.setattr(command, "check_files", lambda config, readers: calls.append(list(readers)))
    monkeypatch.setattr(command, "_model", lambda *_: "model")
    monkeypatch.setattr(command, "_trainer", lambda *_: trainer)
    monkeypatch.setattr(trained, "save", lambda *given: calls.append(given[1:]))
    monkeypatch.setattr(command, "_report", calls.append)
    return trainer, calls


def test_after_training_the_model_is_saved_and_reported(fitted, monkeypatch):
    trainer, calls = fitted
    config = command._config(arguments(settings=["trainer.epochs=4"]))
    assert command._fit(config, arguments(resume=True), None) == 0
    assert calls == [["train"], trainer]
    asked = trainer.asked
    assert (asked["epochs"], asked["resume"], asked["stop"]) == (4, True, None)
    del calls[:]
    monkeypatch.setattr(command, "rank", lambda: 1)
    assert command._fit(config, arguments(run_folder="x"), "buckets") == 0
    assert calls == [["train"], ("model", config, "columns", "buckets")]
    del calls[:]
    trainer.interrupted = True
    assert command._fit(config, arguments(run_folder="x"), None) == 130
    assert calls == [["train"]]


def test_training_stops_by_the_validation_auc(fitted):
    trainer, calls = fitted
    files = ["data.train=x", "data.sparse=a", "data.validation=y", "data.test=z"]
    config = command._config(arguments(settings=[*files, "trainer.patience=3"]))
    assert command._fit(config, arguments(), None) == 0
    assert calls[0] == ["train", "validation", "test"]
    stop = trainer.asked["stop"]
    assert (stop.metric, stop.patience, stop.larger_is_better) == ("validation AUC", 3, True)


@pytest.mark.parametrize("error", [OSError("odd"), TypeError("odd"), ValueError("odd")])
def test_files_that_cannot_be_trained_on(fitted, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(command, "check_files", fail)
    with pytest.raises(UsageError, match=r"^odd$"):
        command._fit(command._config(arguments()), arguments(), None)


def test_a_loaded_model_has_all_rows_and_gets_no_more(monkeypatch):
    tables = {str(size): SimpleNamespace(layer=str(size), size=size) for size in (0, 7)}
    monkeypatch.setattr(trained, "read_manifest", lambda path: SimpleNamespace(tables=tables))
    monkeypatch.setattr(trained.checkpoint, "load", lambda model, path: None)
    run = {"model": "dlrm", "sparse": {"0": {}, "7": {}}, "dense": [], "seed": 0}
    model = trained.load("x", {**run, "settings": {"dim": 2}})
    assert not model.training
    assert [layer.capacity for layer in model.embeddings.layers.values()] == [1, 7]


@pytest.fixture
def predictions(monkeypatch):
    """Replace readers and models; a batch is a pair (scores, labels)."""
    monkeypatch.setattr(command, "Prefetcher", lambda reader: [
        SimpleNamespace(scores=torch.tensor(scores), label=torch.tensor(labels))
        for scores, labels in reader
    ])  # fmt: skip
    monkeypatch.setattr(command, "scores", lambda model, batch: batch.scores)


def test_metrics_of_each_file(predictions):
    far, near = [([3.0, -3.0], [1.0, 0.0]), ([9.0], [1.0])], [([0.0, 0.0], [0.0, 1.0])]
    found = command._evaluate({"validation": far, "test": near}, None)
    assert list(found) == ["validation AUC", "validation log loss", "test AUC", "test log loss"]
    assert (found["validation AUC"], found["test AUC"]) == (1, 0.5)
    assert found["test log loss"] == pytest.approx(math.log(2))
    for label in (0.0, 1.0):
        found = command._evaluate({"test": [([1.0, 2.0], [label, label])]}, None)
        assert math.isnan(found["test AUC"])
        assert found["test log loss"] > 0
    with pytest.raises(DivergedError, match="a probability is not finite: training has diverged"):
        command._evaluate({"test": [([1.0, math.nan], [0.0, 1.0])]}, None)


def test_the_report_is_of_all_epochs(capsys):
    epochs = [
        SimpleNamespace(seconds=1.25, samples_per_second=10.0, tables={}, metrics={"test AUC": 1}),
        SimpleNamespace(
            seconds=2.0, samples_per_second=2000.0, metrics={"test AUC": math.nan, "x": 0.5},
            tables={"user": {"rows": 1234.0}, "item": {"load": 0.5}, "tag": {"rows": 5.0}},
        ),
    ]  # fmt: skip
    command._report(SimpleNamespace(history=epochs))
    empty, first, second, third = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert first.startswith("2 epochs in 3.2 s, the last at 2,000 samples/s; peak memory ")
    assert second == "rows in the tables: user 1,234, tag 5"
    assert third == "test AUC is undefined (nan), as all samples have one label"


@pytest.mark.parametrize("tensorboard", [False, True])
def test_settings_and_curves_are_written_beside_the_log(tmp_path, monkeypatch, tensorboard):
    pytest.importorskip("tensorboard")
    made = []
    monkeypatch.setattr(
        command.training, "make_trainer", lambda *a, logs, **others: made.append((logs, others))
    )
    flag = str(tensorboard).lower()
    config = command._config(arguments(settings=[f"trainer.tensorboard={flag}", "model.rows=9"]))
    model = DLRM(["a"], 1, rows=9)
    command._trainer(model, config, arguments())
    assert list(tmp_path.iterdir()) == []
    command._trainer(model, config, arguments(log=str(tmp_path)))
    assert "rows: 9" in (tmp_path / "config.yaml").read_text()
    (without, _), (logs, others) = made
    assert without == []
    assert [type(log) is TensorBoard for log in logs] == [False, True][: 1 + tensorboard]
    assert others["autocast"] is None
    assert others["log_every"] == 20


# A trained model's folder


def test_models_get_the_logarithms_of_numbers_and_of_no_negative_ones():
    batch = Batch(None, torch.tensor([[-3.0, 0.0, math.e - 1]]), None)
    assert trained.scores(lambda dense, _: dense, batch).tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("read", ["rows.csv", "run.json", "model.json"])
def test_predictions_do_not_replace_what_is_read(tmp_path, read):
    file = tmp_path / read
    file.write_text("text")
    data = [str(tmp_path / "rows.csv")]
    with pytest.raises(UsageError, match=f"^--out {file}: is the file that is read, {file}; "):
        predict._run(arguments(folder=str(tmp_path), data=data, out=str(file)))


def test_a_new_model_needs_a_folder_of_its_own(tmp_path):
    trained.check_new(arguments(checkpoint="x"))
    trained.check_new(arguments(run_folder=str(tmp_path), checkpoint=str(tmp_path / "x")))
    for folder in (tmp_path, tmp_path / "y" / ".."):
        with pytest.raises(UsageError, match=r"is the folder of --checkpoint; pass another one$"):
            trained.check_new(arguments(run_folder=str(folder), checkpoint=str(tmp_path)))
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=rf"^--save {tmp_path}: has a model already; pass another"):
        trained.check_new(arguments(run_folder=str(tmp_path)))


NOTE = dict.fromkeys(("model", "seed", "settings", "format", "dense", "sparse", "buckets"))
NOTE["what"] = "sparsekit clicks 1"


@pytest.mark.parametrize(
    "note",
    [
        "", "[]", "{}", "[1", json.dumps({**NOTE, "what": "other"}),
        json.dumps({**NOTE, "more": 1}), json.dumps({"what": NOTE["what"]}),
    ],
)  # fmt: skip
def test_other_folders_hold_no_model(tmp_path, note):
    message = f"^{tmp_path}: no folder that `sparsekit train dlrm --save` or deepfm's has written$"
    (tmp_path / "model.json").write_text(json.dumps(NOTE))
    with pytest.raises(UsageError, match=message):
        trained.read(str(tmp_path))  # the folder lacks the model itself
    (tmp_path / "model").mkdir()
    assert trained.read(str(tmp_path)) == NOTE
    (tmp_path / "model.json").write_text(note)
    with pytest.raises(UsageError, match=message):
        trained.read(str(tmp_path))


def test_folders_that_cannot_be_read(tmp_path):
    (tmp_path / "model.json").mkdir()
    with pytest.raises(UsageError, match=rf"^{tmp_path}: Is a directory$"):
        trained.read(str(tmp_path))
    for folder in (tmp_path / "no", Path(__file__)):
        with pytest.raises(UsageError, match="no folder that"):
            trained.read(str(folder))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(2, "No such file", "x"), "^--data: x: No such file$"),
        (OSError("odd"), "^--data: odd$"),
        (ValueError("bad"), "^--data: bad$"),
        (TypeError("bad"), "^--data: bad$"),
    ],
)
def test_files_to_predict_that_cannot_be_read(monkeypatch, error, said):
    def fail(*_):
        raise error

    monkeypatch.setattr(trained, "reader", fail)
    monkeypatch.setattr(trained, "with_buckets", fail)
    for buckets in (None, {"a": [1]}):
        with pytest.raises(UsageError, match=said):
            predict._predict({"buckets": buckets}, arguments(data=["x"], out="y"))


def test_predictions_are_made_on_ranks(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(predict.ranks, "start", lambda *args: calls.append(args) or 7)
    args = arguments(folder=str(tmp_path), data=["x"], out=str(tmp_path / "out"))
    assert predict._run(args) == 7
    assert calls == [(args, predict._load, predict._predict)]


def test_rank_0_alone_writes_the_predictions(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(trained, "reader", lambda run, files, batch: files)
    monkeypatch.setattr(trained, "load", lambda folder, run: None)
    monkeypatch.setattr(trained, "scores", lambda model, batch: batch)
    monkeypatch.setattr(predict, "Prefetcher", lambda reader: map(torch.tensor, reader))
    args = arguments(data=[[0.0], [-1.0, 1.0]], out=str(out), folder="run")
    monkeypatch.setattr(predict, "rank", lambda: 1)
    run = {"buckets": None, "model": "dlrm"}
    assert predict._predict(run, args) == 0
    assert not out.exists()
    monkeypatch.setattr(predict, "rank", lambda: 0)
    assert predict._predict(run, args) == 0
    assert out.read_text() == "0.5\n0.268941\n0.731059\n"
    assert capsys.readouterr().out == f"{out}: 3 probabilities, by dlrm\n"
    args.data = ["x", "y"]
    monkeypatch.setattr(predict, "Prefetcher", lambda reader: [])
    with pytest.raises(UsageError, match=r"^--data x y: no rows$"):
        predict._predict(run, args)


CENSUS = {"buckets": {"age": [10.0]}, "dense": ["age"], "sparse": {"city": {}, "age bucket": {}}}


def test_buckets_are_added_to_a_copy_of_a_file(tmp_path):
    file, out = tmp_path / "x.csv", tmp_path / "out.csv"
    file.write_text('note,city, age\n"a,b", Bern, 5\n\n\u00e9,Oslo,20\n')
    trained.with_buckets(CENSUS, str(file), out)
    assert out.read_text(encoding="utf-8").splitlines() == [
        *("note,city,age,age bucket", '"a,b",Bern,5,0', "\u00e9,Oslo,20,1")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"x\.csv is empty"),
        ("age,ctiy\n", r"has no column 'city'; did you mean ctiy\?"),
        ("age,city\n1,a\n\n1\n", "x.csv, line 4: 1 fields, where the first line has 2$"),
        ("age,city\n1,a,2\n", "x.csv, line 2: 3 fields, where the first line has 2$"),
        ("age,city\n1,a\nold,a\n", r"x.csv, line 3: .*age\[0\] is no number: 'old'$"),
    ],
)
def test_files_without_numbers_for_buckets(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        trained.with_buckets(CENSUS, str(tmp_path / "x.csv"), tmp_path / "out")


def test_files_are_read_as_the_note_says(tmp_path):
    file = tmp_path / "x"
    file.write_text("age\tcity\n5\tBern/Oslo\n")
    note = {
        "format": "tsv",
        "dense": ["age"],
        "sparse": {"city": {"kind": "hash", "separator": "/"}},
    }
    (batch,) = trained.reader(note, [str(file)], 9)
    assert (batch.label, batch.dense.tolist()) == (None, [[5]])
    assert len(batch.sparse["city"][0]) == 2
    file.write_text("\t".join(["", *["3"] * 13, *["ff"] * 26]) + "\n")
    dense, sparse = (
        [f"I{i}" for i in range(1, 14)],
        {f"C{i}": {"kind": "hex"} for i in range(1, 27)},
    )
    note = {"format": "criteo", "dense": dense, "sparse": sparse}
    (batch,) = trained.reader(note, [str(file)], 9)
    assert (batch.label, batch.dense.tolist()) == (None, [[3] * 13])
    assert batch.sparse["C26"][0].tolist() == [255]
    file.write_text(file.read_text().replace("ff", '"f'))  # here, a quote is text
    note["sparse"] = {name: {"kind": "hash"} for name in sparse}
    (batch,) = trained.reader(note, [str(file)], 9)
    assert batch.sparse["C1"][0].tolist() == xxh64(['"f']).tolist()
