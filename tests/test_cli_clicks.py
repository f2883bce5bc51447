"""Tests of ``sparsekit train dlrm`` and ``deepfm``, ``plot`` and ``scaling``."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import sparsekit
from sparsekit import cli, split_embedding_variable_from_others
from sparsekit.cli import scaling
from sparsekit.data import Batch, write_criteo_sample
from sparsekit.datasets import Adult
from sparsekit.datasets.adult import CATEGORIES, NUMBERS
from sparsekit.recipes.clicks import command as train_clicks
from sparsekit.recipes.clicks import trained
from sparsekit.recipes.clicks.config import TableConfig
from sparsekit.train import scaling as train_scaling
from sparsekit.train.plots import read_run
from sparsekit.train.scaling import Case, _batch, predicted

SMALL = ["--set", "model.rows=2000", "--set", "model.dim=4", "--set", "trainer.batch_size=50"]
COLUMNS = ["data.label=click", "data.dense=price", "data.sparse=user,item"]


@pytest.fixture
def clicks(tmp_path):
    """Write 600 rows, in which the click depends on user and price."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "clicks.csv"
    rows = []
    for _ in range(600):
        user, item, price = torch.randint(0, 20, (3,), generator=generator).tolist()
        rows.append(f"{int(user + price > 20)},user {user},{item},{price}")
    path.write_text("click,user,item,price\n" + "\n".join(rows) + "\n")
    return path


def arguments(model, path, *more):
    settings = [option for each in COLUMNS for option in ("--set", each)]
    return ["train", model, "--data", str(path), *settings, *SMALL, *more]


def run(capsys, *command):
    assert cli.main(list(command)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_it_learns_on_one_rank_and_on_two(clicks, capfd, forked_ranks, model):
    settings = ["--set", f"data.test={clicks}", "--set", "optimizer.lr=0.02", "--epochs", "8"]
    settings += ["--set", "optimizer.dense_lr=0.005"]
    areas = []
    for ranks in ("1", "2") if model == "dlrm" else ("1",):
        output = run(capfd, *arguments(model, clicks, *settings, "--ranks", ranks))
        areas.append(float(re.findall(r"test AUC ([\d.]+)", output)[-1]))
        assert re.search(r"8 epochs in [\d.]+ s, the last at [\d,]+ samples/s; peak", output)
        assert "rows in the tables: user 20, item 20" in output
    assert min(areas) > 0.95


def test_what_is_logged_and_drawn(clicks, tmp_path, capsys):
    folder = tmp_path / "run"
    one = ["--ranks", "1", "--epochs", "2", "--log-to", str(folder), "--set", "trainer.log_every=5"]
    command = arguments("dlrm", clicks, *one, "--set", f"data.validation={clicks}")
    run(capsys, *command)
    run(capsys, *command)  # the run starts over
    records = read_run(folder)
    assert [r["step"] for r in records if r["kind"] == "epoch"] == [12, 24]
    assert [r["step"] for r in records if r["kind"] == "step"] == [5, 10, 15, 20]
    assert set(records[-1]["metrics"]) == {"validation AUC", "validation log loss"}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["sparse"] == ["user", "item"]
    assert config["trainer"]["epochs"] == 2
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert run(capsys, "plot", str(folder)) == f"{folder / 'plot.png'}\n"
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_settings_come_from_file_and_flags(clicks, tmp_path, capsys):
    shown = run(capsys, *arguments("deepfm", clicks, "--epochs", "9", "--show-config"))
    file = tmp_path / "x.yaml"
    file.write_text(shown)
    again = run(capsys, "train", "deepfm", "--config", str(file), "--show-config")
    assert again == shown
    flags = ["--set", "model.deep=8", "--set", "optimizer.name=adagrad"]
    config = yaml.safe_load(
        run(capsys, "train", "deepfm", "--config", str(file), *flags, "--show-config")
    )
    assert config["model"]["deep"] == [8]
    assert config["optimizer"]["name"] == "adagrad"
    assert config["trainer"]["epochs"] == 9


def test_all_other_settings_do_something(clicks, capsys):
    """Use each format and setting once; tests of the trainer and readers check the effects."""
    sample = clicks.with_name("sample.tsv")
    write_criteo_sample(sample, 300)
    tsv = clicks.with_name("clicks.tsv")
    tsv.write_text(clicks.read_text().replace(",", "\t"))
    one = ["--ranks", "1", "--epochs", "1"]
    for command in (
        arguments("dlrm", tsv, *one, "--set", "data.format=tsv", "--set", "trainer.bfloat16=true"),
        arguments("dlrm", clicks, *one, "--set", "trainer.accumulate=3"),
        arguments("dlrm", clicks, *one, "--set", "trainer.clip_norm=0.1"),
        arguments("dlrm", clicks, *one, "--set", "optimizer.warmup_steps=5"),
        arguments("dlrm", clicks, *one, "--set", "optimizer.name=row_wise_adagrad"),
    ):
        loss = float(re.search(r"loss ([\d.]+)", run(capsys, *command))[1])
        assert 0 < loss < 2
    command = ["train", "dlrm", "--data", str(sample), *SMALL, *one, "--set", "data.format=criteo"]
    assert "C26 " in run(capsys, *command)


@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
def test_tables_of_fixed_size_train_on_a_longer_stream(tmp_path, capsys, model):
    sample, folder = tmp_path / "day.tsv", tmp_path / "run"
    write_criteo_sample(sample, 1000)
    options = ["on_full=evict", "max_rows=150", "score=lfu", "ttl=12", "admission=2"]
    settings = ["data.format=criteo", "model.rows=160", "model.dim=4", "trainer.batch_size=50"]
    settings += [f"table.{option}" for option in options]
    command = ["train", model, "--data", str(sample), "--ranks", "1", "--epochs", "2"]
    command += ["--log-to", str(folder), "--save", str(tmp_path / "model")]
    run(capsys, *command, *(word for each in settings for word in ("--set", each)))
    *_, last = records = read_run(folder)
    assert all(
        0 < table["rows"] <= 150 for record in records for table in record["tables"].values()
    )
    for flow in ("admitted", "refused", "evicted", "expired"):
        assert sum(record["tables"]["C1"][flow] for record in records) > 0
    assert 0 < last["tables"]["C1"]["hit_rate"] < 1
    assert last["tables"]["C1"]["age_deciles"][-1] <= 12 + 1
    assert (folder / "config.yaml").read_text().count("on_full: evict") == 1
    out = tmp_path / "predictions.txt"
    predict = ["predict", str(tmp_path / "model"), "--data", str(sample), "--ranks", "1"]
    run(capsys, *predict, "--out", str(out))
    assert len(out.read_text().splitlines()) == 1000


def test_numbers_for_admission_are_counts_or_probabilities():
    assert TableConfig().options() == {}
    assert TableConfig(admission=3.0).options() == {"admission": sparsekit.MinCount(3)}
    given = TableConfig(on_full="evict", admission=0.5).options()
    assert given == {"on_full": "evict", "admission": sparsekit.Probability(0.5)}


def test_early_stopping_by_the_validation_file(clicks, capsys):
    never = ["--set", "optimizer.lr=1e-12", "--set", "optimizer.dense_lr=1e-12"]
    patience = ["--set", "trainer.patience=2", "--set", f"data.validation={clicks}"]
    command = arguments("dlrm", clicks, *never, *patience, "--ranks", "1", "--epochs", "9")
    assert "\n3 epochs in " in run(capsys, *command)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.rl=1"], r"no setting optimizer\.rl; did you mean optimizer\.lr\?"),
        (["optimizer.lr=fast"], r"optimizer\.lr must be a number, got 'fast'"),
        (["optimizer.lr=-1"], r"optimizer\.lr must be > 0, got -1"),
        (
            ["optimizer.name=adagard"],
            r"must be one of lazy_adam, .*, got adagard; did you mean adagrad\?",
        ),
        (["data.format=xml"], r"data\.format must be one of csv, .*, got xml"),
        (["trainer.batch_size=0"], r"trainer\.global_batch_size must be >= 1, got 0"),
        (["trainer.patience=1"], r"trainer\.patience needs data\.validation"),
        (["data.sparse="], r"data\.sparse must name the categorical columns of"),
        (["data.sparse=user,itm"], r"no column 'itm'; did you mean item\? Its columns are"),
        (["data.test=/no/such"], "/no/such"),
        (["model.rows=3"], "full"),
        (["model.rows=2147483647", "model.dim=100000"], "no memory for tables of 2,147,483,647 ro"),
        (["model.dim=0"], r"model\.dim must be >= 1, got 0"),
        (["model.top=8,0"], r"must be >= 1, got \[12, 8, 0, 1\]"),
        (["model.cross_rank=0"], r"model\.cross_rank must be >= 1, got 0"),
        (["data.sparse=user,item,user"], "name the column 'user' twice"),
        (["trainer.clip_norm=-1"], "clip_norm must be > 0, got -1"),
        (["trainer.patience=0", "data.validation=README.md"], r"trainer\.patience must be >= 1"),
        (["table.on_full=shrink"], "user: on_full must be "),
        (["table.max_rows=5"], "max_rows=5 needs on_full='evict'"),
        (
            ["table.on_full=evict", "table.low_watermark=1.5"],
            r"user: low_watermark must be in \(0, 1\], got 1\.5",
        ),
        (["table.score=mru"], "score must be 'lru', 'lfu'"),
        (["table.admission=0"], r"table\.admission must be a whole .* in \(0, 1\), got 0$"),
        (["table.admission=1.5"], r"table\.admission must be a whole .*, got 1\.5$"),
        (["optimizer.warmup_steps=-1"], "warmup_steps must be in"),
    ],
)
def test_wrong_settings(clicks, capsys, settings, message):
    flags = [option for each in settings for option in ("--set", each)]
    assert cli.main(arguments("dlrm", clicks, *flags, "--ranks", "1", "--epochs", "1")) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_wrong_files(clicks, tmp_path, capsys):
    for command, message in (
        (["train", "dlrm", "--config", str(tmp_path / "no.yaml")], "no.yaml: No such file"),
        (["train", "dlrm", "--data", str(tmp_path / "no.csv"), "--ranks", "1"], "data.sparse must"),
        (arguments("dlrm", tmp_path / "no.csv", "--ranks", "1"), "no.csv does not exist"),
        (arguments("dlrm", clicks, "--log-to", str(clicks)), "--log-to .*: is a file"),
        (["plot", str(tmp_path)], "metrics.jsonl: No such file"),
    ):
        assert cli.main(command) == 2
        assert re.search(message, capsys.readouterr().err)


def rows_of(*labels):
    """Return the text of a file of clicks with these labels."""
    rows = [f"{label},user {i % 7},{i % 5},{i % 3}" for i, label in enumerate(labels)]
    return "\n".join(["click,user,item,price", *rows, ""])


@pytest.mark.parametrize("model", ["dlrm", "deepfm"])
@pytest.mark.parametrize(
    ("split", "text", "message"),
    [
        ("train", rows_of(0, 1, 2), r"x\.csv, line 4, column 1 \('click'\): .* in \[0, 1\]: '2,us"),
        ("train", rows_of(0, -0.5), r"x\.csv, line 3, .*: the label must be in \[0, 1\]"),
        ("train", rows_of(), r"data\.train: no rows in .*x\.csv$"),
        ("test", rows_of(1, 0, 5), r"x\.csv, line 4, .*: the label must be 0 or 1"),
        ("test", rows_of(1, 0, 0.5), r"x\.csv, line 4, .*: the label must be 0 or 1"),
        ("test", rows_of(), r"data\.test: no rows in .*x\.csv$"),
        ("validation", rows_of(1, 1), r"trainer\.patience: all labels in .*x\.csv are 1, so"),
        ("validation", rows_of(0, 0), r"trainer\.patience: all labels in .*x\.csv are 0, so"),
    ],
)
def test_labels_that_cannot_be_trained_on(clicks, capsys, model, split, text, message):
    """The error is raised before the first step, and names the file."""
    path = clicks.with_name("x.csv")
    path.write_text(text)
    files = [path if split == "train" else clicks, "--ranks", "1"]
    if split != "train":
        files += ["--set", f"data.{split}={path}"]
    if split == "validation":
        files += ["--set", "trainer.patience=1"]
    assert cli.main(arguments(model, *files)) == 2
    printed, error = capsys.readouterr()
    assert "epoch" not in printed
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_a_wrong_label_far_behind_the_first_batch(clicks, capsys):
    clicks.write_text(rows_of(*[i % 2 for i in range(300)], 3))
    assert cli.main(arguments("dlrm", clicks, "--ranks", "1")) == 2
    assert "line 302, column 1 ('click'): the label must be in [0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize("label", ["0", "1"])
def test_a_test_set_of_one_class_has_no_auc(clicks, tmp_path, capsys, label):
    path = clicks.with_name("x.csv")
    path.write_text(rows_of(label, label))
    run_to = ["--ranks", "1", "--epochs", "2", "--log-to", str(tmp_path / "run")]
    output = run(capsys, *arguments("dlrm", clicks, "--set", f"data.test={path}", *run_to))
    assert (
        output.count("test AUC nan  test log loss 0") + output.count("AUC nan  test log loss 1")
        == 2
    )
    assert output.count("test AUC is undefined (nan), as all samples have one label") == 1
    assert read_run(tmp_path / "run")[-1]["metrics"]["test AUC"] is None
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    run(capsys, "plot", str(tmp_path / "run"))


def test_divergence_ends_with_1(clicks, capsys):
    command = arguments("dlrm", clicks, "--set", "optimizer.lr=1e30", "--ranks", "1")
    assert cli.main([*command, "--set", "optimizer.dense_lr=1e30"]) == 1
    assert "training has diverged" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_adult_data_as_files(tmp_path, split):
    """The files written for training can be read; validation rows come from the training part."""
    columns = {name: np.array(["a", "b", "?"] * 20) for name in CATEGORIES}
    columns |= {name: np.array(list(map(str, range(60)))) for name in NUMBERS}
    people = Adult(columns, torch.arange(60) % 2.0)

    config = train_clicks.RunConfig(trained.DLRMConfig())
    if split == "validation":
        config = train_clicks.replace(config, trainer=train_clicks.TrainerConfig(patience=1))
    written = train_clicks._write_adult((people, people), config, tmp_path)[0]
    counts = {
        name: sum(batch.rows for batch in train_clicks.reader_of(written, files, None))
        for name in ("train", "validation", "test")
        if (files := getattr(written.data, name))
    }
    expected = {"train": 48, "validation": 12} if split == "validation" else {"train": 60}
    assert counts == expected | {"test": 60}


def test_numbers_enter_as_logarithms():
    seen = []
    batch = Batch(None, torch.tensor([[0.0, -3.0, math.e - 1]]), None)
    trained.scores(lambda dense, sparse: seen.append(dense), batch)
    torch.testing.assert_close(seen[0], torch.tensor([[0.0, 0.0, 1.0]]))


def test_training_is_shuffled_and_tests_are_not(clicks):
    config = train_clicks.RunConfig(trained.DLRMConfig())
    columns = train_clicks.DataConfig((str(clicks),), label="price", sparse=("user",))
    config = train_clicks.replace(config, data=columns)

    def order(seed):
        reader = train_clicks.reader_of(config, columns.train, seed)
        return torch.cat([batch.label for batch in reader])

    in_file = torch.tensor(
        [float(line.split(",")[3]) for line in clicks.read_text().splitlines()[1:]]
    )
    torch.testing.assert_close(order(None), in_file)
    assert not torch.equal(order(0), in_file)
    assert not torch.equal(order(0), order(1))
    assert torch.equal(order(0).sort().values, in_file.sort().values)


def test_the_seed_is_that_of_the_training_data_alone(clicks, capsys, monkeypatch):
    asked, read = {}, train_clicks.reader_of

    def asking(config, files, seed):
        asked[files] = seed
        return read(config, files, seed)

    monkeypatch.setattr(train_clicks, "reader_of", asking)
    test = clicks.with_name("test.csv")
    test.write_text(clicks.read_text())
    more = ["--ranks", "1", "--seed", "5", "--epochs", "1", "--set", f"data.test={test}"]
    run(capsys, *arguments("deepfm", clicks, *more))
    assert asked[(str(clicks),)] == 5
    assert asked[(str(test),)] is None


SCALING = ["scaling", "--tables", "2", "--rows", "100", "--dim", "4", "--batch", "64"]


def test_scaling_of_one_rank(tmp_path, capfd, forked_ranks):
    file = tmp_path / "scaling.json"
    output = run(capfd, *SCALING, "--epochs", "1", "--ranks", "1", "--json", str(file))
    (rate,) = re.findall(r"^ +1 +([\d,]+) +1.00x +100%", output, re.MULTILINE)
    measured = json.loads(file.read_text())["samples_per_second"]
    assert int(rate.replace(",", "")) == pytest.approx(measured["1"], abs=0.6)
    assert "no prediction: no two of these worlds had a core for each thread" in output


@pytest.mark.parametrize(("of_two", "predicts"), [(150.0, True), (200.0, False)])
def test_scaling_of_several_ranks(tmp_path, monkeypatch, capsys, of_two, predicts):
    """Check what is printed and written for given measurements, on a machine of two cores."""
    rates = {1: 100.0, 2: of_two, 4: 120.0}
    monkeypatch.setattr(scaling, "_measure", lambda ranks, case, threads: rates[ranks])
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda pid: {0, 1})
    file = tmp_path / "scaling.json"
    output = run(capsys, *SCALING, "--ranks", "1,2,4", "--json", str(file))
    rows = re.findall(r"^ +(\d) +([\d,]+) +([\d.]+)x +(\d+)%(.*)$", output, re.MULTILINE)
    two = ("2", f"{of_two:.0f}", f"{of_two / 100:.2f}", f"{of_two / 2:.0f}", "")
    assert rows == [
        *(("1", "100", "1.00", "100", ""), two),
        ("4", "120", "1.20", "30", "  (more than cores)"),
    ]
    assert ("Predicted from 1 and 2 ranks" in output) == ("Assumed: " in output) == predicts
    forecast = json.loads(file.read_text())["predicted_speed_up"]
    expected = predicted({1: 100.0, 2: of_two}, 8)
    assert (forecast == {}) != predicts
    assert not predicts or forecast["8"] == pytest.approx(expected)


def test_what_scaling_measures_is_what_was_asked(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(scaling, "_measure", lambda *asking: asked.append(asking) or 10.0)
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda pid: set(range(4)))
    file = tmp_path / "scaling.json"
    output = run(capsys, *SCALING, "--threads", "3", "--ranks", "2,1", "--json", str(file))
    case = Case(tables=2, rows=100, dim=4, batch=64)
    assert asked == [(1, case, 3), (2, case, 3)]
    assert output.startswith("2 tables of 100 keys, dim 4, batch 64 over all ranks, 3 thread(s)")
    assert "on 4 cores" in output
    figures = json.loads(file.read_text())
    assert figures["case"] == dataclasses.asdict(case)
    assert (figures["threads"], figures["cores"]) == (3, 4)
    assert figures["samples_per_second"] == {"1": 10, "2": 10}
    # With two ranks there were fewer cores than threads.
    assert figures["predicted_speed_up"] == {}
    assert "no prediction: no two of these worlds had a core for each thread" in output


def test_worlds_are_sorted_and_may_have_1024_ranks():
    assert scaling._numbers("1024,1,2,1") == (1, 2, 1024)


@pytest.mark.parametrize("ranks", ["2", "0,1", "x", "1,1025"])
def test_wrong_worlds(capsys, ranks):
    with pytest.raises(SystemExit) as end:
        cli.main([*SCALING, "--ranks", ranks])
    assert end.value.code == 2
    assert "--ranks" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_parts_of_one_batch(ranks):
    case, names = Case(tables=2, rows=50, dim=4, batch=8), ["C1", "C2"]

    def batch(rank, ranks):
        return _batch(case, names, torch.Generator().manual_seed(3), rank, ranks)

    whole, parts = batch(0, 1), [batch(rank, ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.label for part in parts]), whole.label)
    assert torch.equal(torch.cat([part.dense for part in parts]), whole.dense)
    for name in names:
        keys = torch.cat([part.sparse[name][0] for part in parts])
        assert torch.equal(keys, whole.sparse[name][0])
        for part in parts:  # one key in each bag
            assert torch.equal(part.sparse[name][1], torch.arange(part.rows + 1))


def test_the_model_and_the_epochs_are_those_of_the_case(monkeypatch):
    """Warm-up epochs run, but are not measured."""
    case, found = Case(tables=2, rows=50, dim=4, batch=8, epochs=3), []

    class Recorded(train_scaling.Trainer):
        def __init__(self, model, *arguments, **settings):
            super().__init__(model, *arguments, **settings)
            found.append(model)

        def fit(self, batches, epochs):
            assert [batch.rows for batch in batches] == [8] * train_scaling.STEPS
            assert epochs == train_scaling.WARM_UP + 3
            speeds = [99.0] * train_scaling.WARM_UP + [3.0, 1.0, 2.0]
            return [SimpleNamespace(samples_per_second=speed) for speed in speeds]

    monkeypatch.setattr(train_scaling, "Trainer", Recorded)
    assert train_scaling.samples_per_second(case) == 2
    sparse, _ = split_embedding_variable_from_others(found[0])
    assert {parameter.shape[1] for parameter in sparse} == {4}


def test_a_prediction_is_what_it_assumes():
    """A step takes 1 s on one rank and 0.6 s on two: half of 1 s, and 0.1 s extra."""
    worst, best = predicted({1: 100.0, 2: 100 / 0.6}, 4)
    assert worst == pytest.approx(1 / (0.25 + 0.1))
    assert best == pytest.approx(1 / (0.25 + 0.1 * (3 / 16) / (1 / 4)))
    assert predicted({1: 100.0, 2: 100 / 0.6}, 2) == pytest.approx((1 / 0.6, 1 / 0.6))
    with pytest.raises(ValueError, match="needs 1 rank and more"):
        predicted({1: 100.0}, 4)
