"""Tests of ``sparsekit train wide`` on generated people and on the Adult data."""

import csv
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

from sparsekit import cli
from sparsekit._extras import MissingPackageError
from sparsekit.datasets import DatasetUnavailableError, adult, read_adult
from sparsekit.models import WideModel
from sparsekit.recipes.wide import command as train_wide
from sparsekit.train.metrics import auc, log_loss
from sparsekit.train.plots import read_run


@pytest.fixture(autouse=True)
def own_filters():
    """Restore the warning filters: the command ignores one of torch's warnings."""
    with warnings.catch_warnings():
        yield


@pytest.fixture
def data(tmp_path):
    """Write data of 800 people; income depends on age, hours and, for half of them, country."""
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "people.csv"
    with path.open("w", newline="") as file:
        for _ in range(800):
            age, hours, country, rest = torch.randint(20, 70, (4,), generator=generator).tolist()
            label = ">50K" if age + hours + (country % 5) * 4 > 103 else "<=50K"
            same = ["HS-grad", 9, "Divorced", "Sales", "Wife", "White", "Female", 0, 0]
            row = [age, "Private", rest * 1000, *same, hours, f"country {country}", label]
            csv.writer(file).writerow(row)
    return path


def run(capsys, data, *arguments):
    """Run the command; return its output."""
    assert cli.main(["train", "wide", "--data", str(data), *arguments]) == 0
    return capsys.readouterr().out


def results(output):
    """Return the printed table as a dict of name to (AUC, log loss)."""
    rows = re.findall(r"^(constant rate|model) +([\d.]+) +([\d.]+)$", output, re.MULTILINE)
    return {name: (float(area), float(loss)) for name, area, loss in rows}


ONE = ["--ranks", "1", "--epochs", "3", "--batch-size", "16"]


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_it_beats_the_constant_and_saves_the_model(data, tmp_path, capsys, optimizer):
    saved = tmp_path / "model.pt"
    log = ["--log-to", str(tmp_path / "run")]
    output = run(capsys, data, *ONE, "--optimizer", optimizer, "--save", str(saved), *log)
    assert read_run(tmp_path / "run")[-1]["step"] == 3 * 40
    lines = output.splitlines()
    assert lines[0] == (
        f"{data}: 800 people; 640 are trained on, a random fifth, 160, are tested on"
    )
    assert "14 columns of text are a sparse matrix of 1,792 columns, 56 ones in a row" in lines[1]
    found = results(output)
    assert found["constant rate"][0] == 0.5
    assert found["model"][0] > 0.9
    assert found["model"][1] < 0.8 * found["constant rate"][1]
    zeros = int(re.search(r"16,128 weights of 1,792 columns, (\d+)% of them", lines[-1])[1])
    assert (zeros > 0) == (optimizer == "ftrl")
    train, test = read_adult(data).split(train_wide.TEST_FRACTION, train_wide.SPLIT_SEED)
    model = WideModel.load(saved)
    with torch.no_grad():
        probabilities = model.probabilities(model.encode(test.columns))
    area = auc(probabilities, test.labels), log_loss(probabilities, test.labels)
    assert found["model"] == pytest.approx(area, abs=1e-4)
    # The model must not have seen the test part.
    for name, cuts in model.buckets.edges.items():
        assert set(cuts.tolist()) <= set(train.columns[name].astype(float))


def test_the_loss_and_the_seed_are_obeyed(data, tmp_path, capsys):
    run(capsys, data, *ONE, "--loss", "mse", "--save", str(tmp_path / "model.pt"))
    assert WideModel.load(tmp_path / "model.pt").loss == "mse"
    found = [results(run(capsys, data, *ONE, "--seed", seed)) for seed in "112"]
    assert found[0] == found[1]
    assert found[0]["model"] != found[2]["model"]
    assert found[0]["constant rate"] == found[2]["constant rate"]  # the split is the same


def test_ranks_train_as_one_does(data, capfd, forked_ranks):
    expected = results(run(capfd, data, *ONE))
    assert cli.main(["train", "wide", "--data", str(data), *ONE, "--ranks", "2"]) == 0
    output, errors = capfd.readouterr()
    assert errors == ""
    found = results(output)
    assert found["model"] == pytest.approx(expected["model"], abs=2e-4)
    assert found["constant rate"] == expected["constant rate"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "missing: No such file"),
        ("a,b\n", "people:1: the header must have one column 'age'"),
        ("1,a,1,a,1,a,a,a,a,a,1,1,1,a,>50K\n" * 10, "2 of 10 people, must have some of either"),
    ],
)
def test_files_that_are_no_use(tmp_path, capsys, text, message):
    path = tmp_path / ("missing" if text is None else "people")
    if text is not None:
        path.write_text(text)
    assert cli.main(["train", "wide", "--data", str(path)]) == 2
    errors = capsys.readouterr().err
    assert re.search(message, errors)
    assert errors.startswith("sparsekit: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize("error", [DatasetUnavailableError, MissingPackageError])
def test_data_that_cannot_be_had(monkeypatch, capsys, error):
    def unavailable(data):
        raise error("cannot be had; do this")

    monkeypatch.setattr(train_wide, "adult", unavailable)
    assert cli.main(["train", "wide"]) == 2
    assert capsys.readouterr().err == "sparsekit: cannot be had; do this\n"


def test_divergence_in_the_last_step(data, monkeypatch, capsys):
    def broken(model, matrix):
        return torch.full((matrix.shape[0],), torch.nan)

    monkeypatch.setattr(WideModel, "probabilities", broken)
    assert cli.main(["train", "wide", "--data", str(data), *ONE]) == 1
    assert "training has diverged in its last step" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--optimizer", "sgd"], ["--loss", "l1"], ["--ranks", "0"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", "wide", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("sparsekit train wide: argument --")


def test_the_adult_data_from_text_to_an_auc_of_0_90():
    """The test limits processor time, since other processes on a busy machine hardly change it."""
    pytest.importorskip("pyarrow")
    try:
        adult()
    except DatasetUnavailableError as error:
        pytest.skip(f"the Adult data cannot be had here: {error}")
    begin = sum(time_of_children())
    done = subprocess.run(
        [sys.executable, "-m", "sparsekit", "train", "wide"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = results(done.stdout)
    assert found["model"][0] >= 0.90
    assert found["model"][1] < 0.33
    assert found["constant rate"][1] == pytest.approx(0.548, abs=1e-3)
    assert sum(time_of_children()) - begin < 2 * 60


def time_of_children():
    """Return the user and system time in seconds of child processes that have ended."""
    times = os.times()
    return times.children_user, times.children_system
