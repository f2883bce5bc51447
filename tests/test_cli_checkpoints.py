"""The options of a resumed run are compared with the options of its start."""

import argparse
import json
import os
import zlib

import pytest

from sparsekit.checkpoint import CheckpointError
from sparsekit.cli import checkpoints
from sparsekit.cli.common import UsageError


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that maps options to the arguments of a command with a new folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("1,2\n")

    def arguments(**options):
        settings = {"checkpoint": "deep/saved", "resume": True, "data": "x.csv", "dim": 4}
        return argparse.Namespace(**{**settings, "optimizer.lr": 0.5, "keep": 3, **options})

    return arguments


@pytest.fixture
def saved(run, monkeypatch):
    """Start a run, and pretend that it has saved a checkpoint."""
    checkpoints.prepare(run())
    monkeypatch.setattr(checkpoints, "latest", lambda folder: folder / "step-1")


def test_without_a_folder_there_is_nothing_to_resume(run, tmp_path):
    checkpoints.prepare(run(checkpoint=None, resume=False))
    with pytest.raises(UsageError, match=r"^--resume needs --checkpoint FOLDER$"):
        checkpoints.prepare(run(checkpoint=None))
    assert os.listdir() == ["x.csv"]
    assert checkpoints.options(run(checkpoint=None)) == {}


def test_a_new_run_writes_its_options(run, monkeypatch):
    monkeypatch.setattr(checkpoints, "rank", lambda: 1)
    checkpoints.prepare(run())
    assert os.listdir() == ["x.csv"]
    monkeypatch.setattr(checkpoints, "rank", lambda: 0)
    for resume in (False, True):  # the folder may exist
        checkpoints.prepare(run(resume=resume))
    with open("deep/saved/run.json") as file:
        found = json.load(file)
    contents = {"x.csv": [4, zlib.crc32(b"1,2\n")]}
    assert found == {"data": "x.csv", "dim": 4, "optimizer.lr": 0.5, "contents": contents}


def test_a_trainer_saves_and_keeps_as_the_options_say(run):
    options = checkpoints.options(run(checkpoint_every=7, keep=5))
    assert options["checkpoint_every"] == 7
    assert options["checkpoints"].keep == 5


def test_a_folder_with_checkpoints_is_only_resumed(run, saved):
    checkpoints.prepare(run())
    with pytest.raises(
        UsageError, match=r"^--checkpoint deep/saved: has checkpoints already; pass"
    ):
        checkpoints.prepare(run(resume=False))
    os.remove("deep/saved/run.json")
    checkpoints.prepare(run(dim=8))  # made by a script, which writes no options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 8}, "^--dim 8: the run in --checkpoint deep/saved was started with 4; pass the s"),
        ({"dim": None}, "^--dim None: .* was started with 4;"),
        ({"wire_dtype": "x"}, "^--wire-dtype x: .* was started with None;"),
        ({"optimizer.lr": 0.25}, r"^--set optimizer\.lr=0\.25: .* was started with 0\.5;"),
    ],
)
def test_other_options_are_refused(run, saved, options, message):
    with pytest.raises(UsageError, match=message):
        checkpoints.prepare(run(**options))


@pytest.mark.parametrize("free", sorted(checkpoints._FREE - {"checkpoint", "resume"}))
def test_options_that_do_not_shape_the_model_may_change(run, saved, free):
    checkpoints.prepare(run(**{free: "other"}))


def test_options_that_may_change():
    assert not checkpoints._FREE & {"data", "seed", "dim", "lr", "epochs", "batch_size", "original"}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("1,3\n", "started; put"), ("1,2,3\n", r"started \(it had 4 bytes, and has 6\); put")],
)
def test_changed_data_are_refused(run, saved, text, sizes):
    with open("x.csv", "w") as file:
        file.write(text)
    with pytest.raises(
        UsageError, match=f"^x.csv: has changed since the run in .*saved was {sizes}"
    ):
        checkpoints.prepare(run())


@pytest.mark.parametrize("error", [CheckpointError("is damaged"), ValueError("is damaged")])
def test_folders_that_cannot_be_read(run, monkeypatch, error):
    def fails(folder):
        raise error

    monkeypatch.setattr(checkpoints, "latest", fails)
    with pytest.raises(UsageError, match=r"^--checkpoint deep/saved: is damaged$"):
        checkpoints.prepare(run())


def test_a_folder_that_cannot_be_made(run):
    with pytest.raises(UsageError, match=r"^--checkpoint x\.csv/saved: .*Not a directory$"):
        checkpoints.prepare(run(checkpoint="x.csv/saved"))


def test_all_files_of_data_are_compared(run):
    names = ["x.csv", "train", "more", "valid", "test"]
    for name in names[1:]:
        with open(name, "w") as file:
            file.write(name)
    os.mkfifo("pipe")
    lists = {"data.train": ["train", "more", "pipe"], "data.validation": ("valid",)}
    args = run(**lists, **{"data.test": ["test", "missing"]})
    assert list(checkpoints._contents(args)) == names
    assert checkpoints._contents(run(data=None)) == {}


def test_the_checksum_of_a_file(tmp_path, monkeypatch):
    path, content = tmp_path / "x", os.urandom(5 << 19)
    path.write_bytes(content)
    whole = [len(content), zlib.crc32(content)]
    assert checkpoints._size_and_crc(str(path)) == whole
    monkeypatch.setattr(checkpoints, "_END_BYTES", 10)
    monkeypatch.setattr(checkpoints, "_WHOLE_BYTES", len(content))
    assert checkpoints._size_and_crc(str(path)) == whole
    monkeypatch.setattr(checkpoints, "_WHOLE_BYTES", len(content) - 1)
    # Files are read in pieces of 1 MiB, so the checksum covers one piece and the last ten bytes.
    ends = zlib.crc32(content[: 1 << 20] + content[-10:])
    assert checkpoints._size_and_crc(str(path)) == [len(content), ends]
