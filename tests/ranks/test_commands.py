"""If a command trains on several ranks, each line is printed by the right rank."""

import contextlib
import io
import json
import re

import pytest

from sparsekit import cli

SMALL = ["--ranks", "1", "--epochs", "1"]  # the pool's ranks are used; the command starts none
CLICKS = ["data.label=click", "data.sparse=user", "data.dense=price", "model.rows=99"]
COMMANDS = {
    "ratings": ["ratings", "--dim", "4", "--capacity", "100"],
    "autoencoder": ["autoencoder", "--dim", "4"],
    "original": ["autoencoder", "--original"],
    "wide": ["wide"],
    "deepconn": ["deepconn", "--length", "8"],
    "dlrm": ["dlrm", *(option for each in CLICKS for option in ("--set", each))],
}


def write_data(path, name):
    if name == "wide":
        same = "1,HS-grad,9,Divorced,Sales,Wife,White,Female,0,0"
        rows = [f"{20 + i},Private,{same},{i % 9},US,{'<>'[i % 2]}=50K" for i in range(60)]
        text = "\n".join(rows).replace(">=", ">")
    elif name == "deepconn":
        keys = ("reviewerID", "asin", "overall", "reviewText", "unixReviewTime")
        rows = [(f"U{i % 8}", f"I{i // 8}", 1 + i % 5, f"word{i % 7} good", i) for i in range(80)]
        text = "\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows)
    elif name == "dlrm":
        text = "click,user,price\n" + "\n".join(f"{i % 2},u{i % 7},{i}" for i in range(40))
    else:
        rows = [f"{i % 8},{i // 8},{1 + i % 5},{i}" for i in range(160)]
        text = "user,item,rating,timestamp\n" + "\n".join(rows)
    path.write_text(text)


def printed(rank, command):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert cli.main(command) == 0
    return shown.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_one_rank_prints_the_figures_of_all(two_ranks, tmp_path, name):
    path = tmp_path / "data"
    write_data(path, name)
    command = ["train", *COMMANDS[name], "--data", str(path), *SMALL]
    if name == "dlrm":
        command += ["--set", f"data.test={path}"]
    whole = printed(0, command).splitlines()
    first, second = (output.splitlines() for output in two_ranks(printed, command))
    loaded = 0 if name == "dlrm" else 1  # here each rank loads data and prints a line
    assert len(second) == loaded
    assert len(first) == len(whole)
    for line, expected in zip(first[loaded:], whole[loaded:], strict=True):
        assert re.sub(r"[\d.,]+", "#", line) == re.sub(r"[\d.,]+", "#", expected)
        # The batches of dlrm differ by rank, and so do the printed seconds.
        if name != "dlrm" and not re.search(r"\d s\b", expected):
            numbers = [float(x) for x in re.findall(r"\d\.\d+", line)]
            assert numbers == pytest.approx(
                [float(x) for x in re.findall(r"\d\.\d+", expected)], abs=2e-3
            )
