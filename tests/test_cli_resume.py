"""--checkpoint and --resume of every model: an interrupted and resumed run equals a whole one."""

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from checkpoint.numpy_reader import read_file, read_manifest, read_table

from sparsekit import checkpoint, cli
from sparsekit.cli import checkpoints
from sparsekit.train.step import Step

COLUMNS = ["data.label=click", "data.dense=price", "data.sparse=user,item"]
SMALL = ["model.rows=2000", "model.dim=4", "trainer.batch_size=20"]
SETTINGS = [option for each in COLUMNS + SMALL for option in ("--set", each)]
COMMANDS = {
    "ratings": ["--dim", "4", "--capacity", "500", "--batch-size", "16"],
    "autoencoder": ["--dim", "4", "--batch-size", "4"],
    "dlrm": SETTINGS,
    "wide": ["--batch-size", "20", "--optimizer", "ftrl"],
    "deepconn": ["--length", "8", "--batch-size", "8", "--ranks", "1"],
}


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def write_data(folder, model):
    path = folder / f"{model}.csv"
    if model == "dlrm":
        rows = torch.randint(0, 20, (200, 3), generator=chance()).tolist()
        lines = ["click,user,item,price"]
        lines += [f"{int(u + p > 20)},user {u},{i},{p}" for u, i, p in rows]
    elif model == "wide":
        rows = torch.randint(20, 70, (200, 3), generator=chance()).tolist()
        same = "HS-grad,9,Divorced,Sales,Wife,White,Female,0,0"
        lines = [
            f"{age},Private,1000,{same},{hours},country {c},{'>' if age > 45 else '<='}50K"
            for age, hours, c in rows
        ]
    elif model == "deepconn":
        lines = [
            json.dumps(
                {
                    "reviewerID": f"U{i % 8}", "asin": f"I{i // 8}", "overall": 1 + i % 5,
                    "reviewText": f"word{i % 7} word{i % 3} good", "unixReviewTime": i,
                }
            )
            for i in range(80)
        ]  # fmt: skip
    else:
        lines = ["user,item,rating,timestamp"]
        for user in range(30):
            items = torch.randperm(15, generator=chance(user))[:8].tolist()
            lines += [f"{user},{item},{1 + item % 5},{time}" for time, item in enumerate(items)]
    path.write_text("\n".join(lines) + "\n")
    return path


def command(model, data, folder, *more):
    saved = ["--checkpoint", str(folder), "--checkpoint-every", "4"]
    return ["train", model, "--data", str(data), *COMMANDS[model], "--epochs", "3", *saved, *more]


def contents(folder):
    """Return all tensors of the latest checkpoint; tables are dicts by key."""
    path = checkpoint.latest(folder)
    manifest = read_manifest(path)
    dense = read_file(path / "dense.safetensors", manifest["files"]["dense.safetensors"]["crc32"])
    found = {name: value.tolist() for name, value in dense.items()}
    for table in manifest["tables"]:
        rows = read_table(path, table)
        found[table] = {
            key: {name: value.tolist() for name, value in rows[key].items()} for key in sorted(rows)
        }
    return manifest["step"], found


@pytest.fixture(autouse=True)
def own_filters():
    with warnings.catch_warnings():
        yield


@pytest.mark.parametrize("model", COMMANDS)
def test_interrupted_and_resumed(model, tmp_path, monkeypatch, capsys):
    data = write_data(tmp_path, model)
    one = ["--ranks", "1"]
    assert cli.main(command(model, data, tmp_path / "a", *one)) == 0
    whole = capsys.readouterr().out
    update, done = Step.update, 0

    def interrupted(self, *arguments):
        nonlocal done
        done += 1
        if done == 14:
            raise KeyboardInterrupt
        return update(self, *arguments)

    with monkeypatch.context() as context:
        context.setattr(Step, "update", interrupted)
        assert cli.main(command(model, data, tmp_path / "b", *one)) == 130
    assert "the latest checkpoint is step-000000000012" in capsys.readouterr().out
    assert cli.main(command(model, data, tmp_path / "b", "--resume", *one)) == 0
    resumed = capsys.readouterr().out
    assert "resumed from" in resumed
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    lines = [line for line in whole.splitlines() if " s" not in line][-3:]
    assert lines
    assert all(line in resumed for line in lines)


def test_what_is_refused(tmp_path, capsys):
    data = write_data(tmp_path, "ratings")
    folder = tmp_path / "a"

    def refused(arguments):
        assert cli.main(arguments) == 2
        return capsys.readouterr().err

    assert "--resume needs --checkpoint" in refused(["train", "--resume", "--data", str(data)])
    run = command("ratings", data, folder, "--ranks", "1")
    assert cli.main([*run, "--resume"]) == 0  # there is no checkpoint, so the run starts
    assert "has checkpoints already; pass --resume" in refused(run)
    other = refused([*run, "--resume", "--dim", "8"])
    assert "--dim 8: the run in --checkpoint" in other
    assert "was started with 4" in other
    no_folder = refused(command("ratings", data, data, "--ranks", "1"))
    assert "cannot be read: Not a directory" in no_folder
    split = ["train", "deepconn", "--placement", "alternating", "--checkpoint", str(folder)]
    assert "only --placement single is saved" in refused(split)


# The first model loads all its data before training; the second reads a stream.
@pytest.mark.parametrize("model", ["ratings", "dlrm"])
def test_data_that_have_changed_are_refused(model, tmp_path, capsys):
    """Changed data raise an error even if the run has ended: its figures are for the old data."""
    data = write_data(tmp_path, model)
    run = command(model, data, tmp_path / "a", "--resume", "--ranks", "1", "--epochs", "1")
    assert cli.main(run) == 0
    text = data.read_text()
    digit = max(i for i, character in enumerate(text) if character == "1")
    data.write_text(f"{text[:digit]}0{text[digit + 1 :]}")
    capsys.readouterr()
    assert cli.main(run) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{data}: has changed since the run in --checkpoint {tmp_path / 'a'} was" in said.err
    assert "started; put it back" in said.err  # although the file's size is unchanged
    assert said.err.count("\n") == 1
    data.write_text(text)
    assert cli.main(run) == 0


def test_what_the_trainer_refuses_is_one_line(tmp_path, capsys):
    """If a checkpoint has no note about the data, as when a script saved it, the trainer raises."""
    data, folder = write_data(tmp_path, "ratings"), tmp_path / "a"
    run = command("ratings", data, folder, "--resume", "--ranks", "1", "--epochs", "1")
    assert cli.main(run) == 0
    (folder / checkpoints.RUN).unlink()
    data.write_text(data.read_text().replace(",5,", ",4,"))
    gc.collect()  # frees the run and thereby unlocks the folder
    capsys.readouterr()
    assert cli.main(run) == 2
    error = capsys.readouterr().err
    assert error.startswith("sparsekit: Trainer: the checkpoint is of a run on data with checksum=")
    assert error.count("\n") == 1


def test_the_ends_of_a_large_file_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(checkpoints, "_END_BYTES", 10)
    path = tmp_path / "large"

    def found(text):
        path.write_bytes(text)
        return checkpoints._size_and_crc(path)

    zeros = bytes(200)
    assert found(zeros) != found(b"1" + zeros[1:])
    assert found(zeros) != found(zeros[:-1] + b"1")
    assert found(zeros) != found(zeros + b"\0")
    assert found(zeros)[0] == 200


def test_a_configuration_that_has_changed_is_refused(tmp_path, capsys):
    data, file = write_data(tmp_path, "dlrm"), tmp_path / "dlrm.yaml"
    run = command("dlrm", data, tmp_path / "a", "--ranks", "1", "--resume", "--config", str(file))
    file.write_text("optimizer: {lr: 0.01}\n")
    assert cli.main(run) == 0
    file.write_text("optimizer: {lr: 0.01}\ntrainer: {log_every: 5}\n")
    assert cli.main(run) == 0
    file.write_text("optimizer: {lr: 0.02}\n")
    assert cli.main(run) == 2
    error = capsys.readouterr().err
    assert "--set optimizer.lr=0.02: the run in --checkpoint" in error
    assert "was started with 0.01" in error


@pytest.mark.time_limit(120)
def test_files_on_another_number_of_ranks(tmp_path, monkeypatch, capfd, forked_ranks):
    """On a different number of ranks, the epoch starts over, since batches have other rows."""
    data, folder = write_data(tmp_path, "dlrm"), tmp_path / "a"
    update, done = Step.update, 0

    def interrupted(self, *arguments):
        nonlocal done
        done += 1
        if done == 14:
            raise KeyboardInterrupt
        return update(self, *arguments)

    with monkeypatch.context() as context:
        context.setattr(Step, "update", interrupted)
        assert cli.main(command("dlrm", data, folder, "--ranks", "1")) == 130
    assert checkpoint.latest(folder).name == "step-000000000012"
    gc.collect()  # frees what the run held, as the end of its process would, and unlocks the folder
    assert cli.main(command("dlrm", data, folder, "--ranks", "2", "--resume")) == 0
    printed = capfd.readouterr().out
    assert "1 epochs and 2 batches are done" in printed
    assert "the epoch begins again, as batches were those of 1 ranks, not 2" in printed
    # An epoch has 10 steps. There are 12 steps before the interruption, then two whole epochs.
    assert checkpoint.latest(folder).name == "step-000000000032"
    # At the end of an epoch there is nothing to start over.
    assert cli.main([*command("dlrm", data, folder, "--resume", "--ranks", "1")]) == 0
    assert "again" not in capfd.readouterr().out


@pytest.mark.time_limit(240)
def test_torchrun_starts_a_killed_rank_again(tmp_path, forked_ranks):
    """One torchrun trains both models, since starting ranks takes longer than training."""
    data = {model: write_data(tmp_path, model) for model in ("dlrm", "autoencoder")}
    runs = []
    for model, path in data.items():
        assert cli.main([*command(model, path, tmp_path / f"{model} whole"), "--ranks", "2"]) == 0
        runs += [str(tmp_path / f"{model}.marker")]
        runs += command(model, path, tmp_path / f"{model} killed", "--resume")
    script = Path(__file__).with_name("killed_rank.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.run(
        [sys.executable, *launch, "--max-restarts", "2", str(script), "1", "10", *runs],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    # The first model is resumed once more, at its end, when the second one's rank is killed.
    assert process.stdout.count("resumed from") == 3
    for model in data:
        assert (tmp_path / f"{model}.marker").exists()
        assert contents(tmp_path / f"{model} killed") == contents(tmp_path / f"{model} whole")
