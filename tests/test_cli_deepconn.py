"""``sparsekit train deepconn`` and ``sparsekit profile``, on generated reviews."""

import json
import re

import pytest

from sparsekit import cli
from sparsekit.datasets.reviews import generated_reviews


@pytest.fixture
def data(tmp_path):
    """Reviews as Amazon has them."""
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


def test_placements_train_to_the_same_figures_better_than_a_constant(capfd, data):
    found = []
    for options in (["single"], ["split"]):
        arguments = ["--data", str(data), *SMALL, "--epochs", "12", "--lr", "0.003"]
        assert cli.main(["train", "deepconn", *arguments, "--placement", *options]) == 0
        shown = capfd.readouterr().out
        found.append([float(x) for x in re.findall(r"test RMSE (\d\.\d+)", shown)])
        constant = float(re.search(r"constant mean +(\S+) +(\S+)", shown)[2])
        model = float(re.search(r"model +(\S+) +(\S+)", shown)[2])
        assert model == found[-1][-1] < constant
    assert found[0] == pytest.approx(found[1], abs=2e-4)


@pytest.mark.parametrize("placement", ["single", "alternating"])
def test_profile(capfd, data, tmp_path, placement):
    trace = tmp_path / "trace.json"
    arguments = ["--data", str(data), *SMALL, "--placement", placement, "--epochs", "9"]
    profile = ["profile", "deepconn", *arguments, "--steps", "2", "--lines", "3"]
    assert cli.main([*profile, "--trace", str(trace)]) == 0
    shown = capfd.readouterr().out
    assert ("exchange: towers" in shown) == (placement == "alternating")
    moved = int(re.search(r"A step moves (\S+) bytes", shown)[1].replace(",", ""))
    assert (moved > 0) == (placement == "alternating")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "deepconn", "--placement", "split", "--ranks", "3"], "needs --ranks 2, got 3"),
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
