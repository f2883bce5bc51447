"""Tests of ``sparsekit train deepconn`` and ``sparsekit profile`` on generated reviews."""

import argparse
import contextlib
import io
import json
import re

import pytest
from ranks.pool import Ranks

from sparsekit import cli
from sparsekit.cli import ranks
from sparsekit.cli.common import UsageError
from sparsekit.datasets.reviews import generated_reviews
from sparsekit.recipes.deepconn import command as train_deepconn
from sparsekit.train.plots import read_run


@pytest.fixture(scope="module")
def two_ranks():
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture
def data(tmp_path):
    """Write reviews in Amazon's format."""
    path = tmp_path / "reviews.json"
    reviews = generated_reviews(users=12, items=10, each=8)
    ratings = reviews.ratings
    with path.open("w") as file:
        for i, words in enumerate(reviews.texts):
            review = {
                "reviewerID": f"U{ratings.users[i]}",
                "asin": f"I{ratings.items[i]}",
                "overall": ratings.ratings[i].item(),
                "reviewText": " ".join(words),
                "unixReviewTime": i,
            }
            file.write(json.dumps(review) + "\n")
    return path


SMALL = ["--length", "30", "--batch-size", "16"]


def train_as_rank(rank, data, placement, trace=None, log=None):
    """Run the command as one rank without the launcher, which would take seconds to start ranks."""
    args = argparse.Namespace(
        data=str(data),
        placement=placement,
        epochs=12,
        length=30,
        batch_size=16,
        lr=0.003,
        checkpoint=None,
        resume=False,
        seed=0,
        threads=1,
        log=log,
    )
    if trace is not None:
        args = argparse.Namespace(**vars(args), trace=trace, steps=2, lines=3)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert ranks._fit(train_deepconn._fit_and_report, train_deepconn._load(args), args) == 0
    return shown.getvalue()


def test_placements_train_to_the_same_figures_better_than_a_constant(two_ranks, data, tmp_path):
    found = []
    for shown in (
        train_as_rank(0, data, "single", log=str(tmp_path / "run")),
        two_ranks(train_as_rank, data, "split")[0],
    ):
        found.append([float(x) for x in re.findall(r"test RMSE (\d\.\d+)", shown)])
        constant = float(re.search(r"constant mean +(\S+) +(\S+)", shown)[2])
        model = float(re.search(r"model +(\S+) +(\S+)", shown)[2])
        assert model == found[-1][-1] < constant
    assert len(found[0]) == 12
    assert found[0] == pytest.approx(found[1], abs=2e-4)
    epochs = [record for record in read_run(tmp_path / "run") if record["kind"] == "epoch"]
    logged = [record["metrics"]["test RMSE"] for record in epochs]
    assert logged == pytest.approx(found[0], abs=1e-4)


def test_a_placement_on_another_number_of_ranks(data):
    with pytest.raises(UsageError, match=r"--placement split needs 2 ranks, there are 1$"):
        train_as_rank(0, data, "split")


def test_profile(capfd, data, tmp_path):
    trace = tmp_path / "trace.json"
    arguments = ["--data", str(data), *SMALL, "--epochs", "9", "--steps", "2", "--lines", "3"]
    assert cli.main(["profile", "deepconn", *arguments, "--trace", str(trace)]) == 0
    shown = capfd.readouterr().out
    assert "2 steps on 1 rank(s)" in shown
    assert "exchange" not in shown
    assert "A step moves 0 bytes" in shown
    assert json.loads(trace.read_text())["traceEvents"]


def test_profile_of_a_placement(two_ranks, data, tmp_path):
    trace = tmp_path / "trace.json"
    shown = two_ranks(train_as_rank, data, "alternating", trace)[0]
    assert "2 steps on 2 rank(s)" in shown
    assert "exchange: towers" in shown
    assert int(re.search(r"A step moves (\S+) bytes", shown)[1].replace(",", "")) > 0
    for name in ("trace.json", "trace.rank1.json"):
        assert json.loads((tmp_path / name).read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "deepconn", "--placement", "split", "--ranks", "3"], "needs --ranks 2, got 3"),
        (
            ["train", "deepconn", "--placement", "split", "--log-to", "."],
            "only --placement single is",
        ),
        (["train", "deepconn", "--data", "missing.json"], "--data missing.json: No such file"),
        (["profile", "deepconn", "--trace", "/nowhere/t.json"], "--trace /nowhere/t.json: cannot"),
    ],
)
def test_what_the_user_can_put_right(capfd, arguments, message):
    assert cli.main(arguments) == 2
    error = capfd.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_profile_of_more_steps_than_there_are(capfd, data):
    arguments = ["--data", str(data), *SMALL, "--epochs", "1"]
    assert cli.main(["profile", "deepconn", *arguments, "--steps", "100"]) == 2
    assert "training ended after 6 steps" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "2: "),
        ("[]", "2: must be an object"),
        ('{"reviewerID": "a", "asin": "b", "overall": "5", "reviewText": ""}', "overall is '5'"),
        ('{"reviewerID": "a", "asin": "b", "overall": NaN, "reviewText": ""}', "overall is nan"),
        ('{"reviewerID": 1, "asin": "b", "overall": 5, "reviewText": ""}', "reviewerID is 1"),
    ],
)
def test_malformed_reviews_are_named(capfd, data, line, message):
    lines = data.read_text().splitlines()
    data.write_text("\n".join([lines[0], line, *lines[1:]]))
    assert cli.main(["train", "deepconn", "--data", str(data)]) == 2
    assert message in capfd.readouterr().err
