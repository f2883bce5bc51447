"""``sparsekit predict`` predicts files with a model saved by ``train dlrm --save``."""

import contextlib
import csv
import gzip
import io
import json
import re

import numpy as np
import pytest
import torch

from sparsekit import cli
from sparsekit.cli.dispatch import make_parser
from sparsekit.data import write_criteo_sample
from sparsekit.datasets import Adult
from sparsekit.datasets.adult import CATEGORIES, NUMBERS
from sparsekit.recipes.clicks import command as train_clicks
from sparsekit.recipes.clicks import predict, trained
from sparsekit.recipes.wide import command as train_wide
from sparsekit.train.metrics import log_loss

ROWS = 301


def draw(*columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 20, (ROWS, len(columns)), generator=generator).tolist()


@pytest.fixture
def clicks(tmp_path):
    path = tmp_path / "clicks.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["click", "user", "item", "price"])
        for user, item, price in draw("user", "item", "price"):
            writer.writerow([int(user + price > 20), f"user {user}", item, price])
    return path


def train(data, *more, model="dlrm", columns=("click", "user,item", "price"), ranks="1"):
    """Return command-line arguments that train and test on the same file."""
    settings = [f"data.{n}={c}" for n, c in zip(("label", "sparse", "dense"), columns, strict=True)]
    settings += [f"data.test={data}", "model.dim=4", "model.rows=300", "optimizer.lr=0.02"]
    settings += ["trainer.batch_size=50"]
    flags = [option for each in settings for option in ("--set", each)]
    return ["train", model, "--data", str(data), *flags, "--epochs", "1", "--ranks", ranks, *more]


def on_rank(rank, command):
    """Run on each rank what the command would start there; return the output."""
    args = make_parser().parse_args(command)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if command[0] == "train":
            assert train_clicks._fit_and_report(None, args) == 0
        else:
            assert predict._predict(trained.read(args.folder), args) == 0
    return output.getvalue()


def here(capsys, command):
    assert cli.main(command) == 0
    return capsys.readouterr().out


def read(path):
    return torch.tensor([float(line) for line in path.read_text().splitlines()])


def assert_as_tested(probabilities, labels, printed):
    """Check that the predictions' log loss is the test log loss at the end of training."""
    shown = float(re.findall(r"test log loss ([\d.]+)", printed)[-1])
    assert abs(log_loss(probabilities, torch.tensor(labels).float()) - shown) < 1e-4


def test_any_number_of_ranks_predicts_what_any_other_has_trained(
    clicks, tmp_path, capsys, two_ranks
):
    rows = list(csv.DictReader(clicks.read_text().splitlines()))
    labels = [int(row["click"]) for row in rows]
    other = tmp_path / "other.csv"  # no label, an extra column, another order
    with other.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["price", "note", "item", "user"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**row, "note": "x"} for row in rows)
    for is_trained, run in ((True, "two"), (False, "one")):
        command = train(clicks, "--save", str(tmp_path / run))
        printed = two_ranks(on_rank, command)[0] if is_trained else here(capsys, command)
        found = []
        for out in ("two.txt", "one.txt"):
            path = str(tmp_path / out)
            command = ["predict", str(tmp_path / run), "--data", str(other), "--out", path]
            said = two_ranks(on_rank, command)[0] if out == "two.txt" else here(capsys, command)
            assert said == f"{path}: {ROWS} probabilities, by dlrm\n"
            found.append(read(tmp_path / out))
        assert_as_tested(found[0], labels, printed)
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
        assert len(found[0].unique()) > ROWS / 2


@pytest.mark.parametrize("form", ["tsv", "criteo", "parquet"])
def test_files_are_read_as_in_training(clicks, tmp_path, capsys, form):
    data, columns = tmp_path / form, ("click", "user,item", "price")
    if form == "criteo":
        write_criteo_sample(data, ROWS)
        labels = [int(line.split("\t")[0]) for line in data.read_text().splitlines()]
        columns = ("label", "", "")
    else:
        labels = [int(row["click"]) for row in csv.DictReader(clicks.read_text().splitlines())]
        data.write_text(clicks.read_text().replace(",", "\t"))
    if form == "parquet":
        table = pytest.importorskip("pyarrow.csv").read_csv(clicks)
        pytest.importorskip("pyarrow.parquet").write_table(table, data)
    run, out = str(tmp_path / "run"), tmp_path / "out"
    options = ["--set", f"data.format={form}", "--save", run]
    printed = here(capsys, train(data, *options, model="deepfm", columns=columns))
    here(capsys, ["predict", run, "--data", str(data), "--out", str(out)])
    assert_as_tested(read(out), labels, printed)


def test_buckets_of_the_census_come_with_the_model(tmp_path, capsys, monkeypatch):
    columns = {
        **{name: [f"{name} {row[0] % 3}" for row in draw(name)] for name in CATEGORIES},
        **{name: [str(row[0]) for row in draw(name, seed=1)] for name in NUMBERS},
    }
    labels = torch.tensor([int(number) > 9 for number in columns["age"]]).float()
    people = Adult({name: np.array(column) for name, column in columns.items()}, labels)
    monkeypatch.setattr(train_wide, "adult", lambda _: people)
    run, out, file = str(tmp_path / "run"), tmp_path / "out", tmp_path / "people.csv"
    printed = here(capsys, ["train", "deepfm", "--ranks", "1", "--epochs", "1", "--save", run])
    _, test = people.split(train_clicks.TEST_FRACTION, train_clicks.SPLIT_SEED)
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([test.columns, *zip(*test.columns.values(), strict=True)])
    packed = tmp_path / "people"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    here(capsys, ["predict", run, "--data", str(packed), "--out", str(out)])
    assert_as_tested(read(out), test.labels.tolist(), printed)
    lines = file.read_text().splitlines()
    for wrong, message in (
        (lines[4] + ",1", "people.csv, line 5: 15 fields, where the first line has 14"),
        (",".join(["x"] * 14), r"people.csv, line 5: .*age.* is no number: 'x'"),
    ):
        file.write_text("\n".join([*lines[:4], wrong]) + "\n")
        assert cli.main(["predict", run, "--data", str(file), "--out", str(out)]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_what_is_refused(clicks, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"

    def refused(command, message):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("sparsekit: ")
        assert error.count("\n") == 1
        assert message in error
        assert not out.exists()

    predicted = ["predict", str(run), "--out", str(out), "--data"]
    refused([*predicted, str(clicks)], "run: no folder that `sparsekit train dlrm --save`")
    both = ["--save", str(run), "--checkpoint", str(run)]
    refused(train(clicks, *both), "run: is the folder of --checkpoint; pass another one")
    refused(train(clicks, "--save", str(clicks)), "clicks.csv: is a file")
    run.mkdir()
    (run / "run.json").write_text("of a run's checkpoints")
    here(capsys, train(clicks, "--save", str(run)))
    assert (run / "run.json").read_text() == "of a run's checkpoints"
    refused(train(clicks, "--save", str(run)), "run: has a model already; pass another folder")
    for read in (clicks, run / "run.json"):
        content = read.read_text()
        command = [
            "predict",
            str(run),
            "--out",
            str(read),
            "--data",
            str(tmp_path / "x"),
            str(clicks),
        ]
        refused(command, f"--out {read}: is the file that is read")
        assert read.read_text() == content
    other = tmp_path / "other.csv"
    other.write_text("click,user,items,price\n1,user 1,2,3\n")
    refused([*predicted, str(other)], f"{other} has no column 'item'; did you mean items?")
    other.write_text("user, item,price\n")
    refused([*predicted, str(other)], "no column 'item'; did you mean ' item'?")
    other.write_text("user,item,price\n")
    refused([*predicted, str(other)], f"--data {other}: no rows")
    other.write_text("user,item,price\nuser 1,2,3\nuser 1,2,cheap\n")
    refused([*predicted, str(other)], "line 3, column 3 ('price'): not a finite number")
    refused([*predicted, f"{clicks}x"], "clicks.csvx does not exist; did you mean")
    record = run / "model.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "what": "other"}))
    refused([*predicted, str(clicks)], "run: no folder that `sparsekit train dlrm --save`")
