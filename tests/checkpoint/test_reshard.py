"""Tests of ``sparsekit checkpoint inspect``, ``verify``, ``reshard`` and ``compact``."""

import contextlib
import io
import os
import resource
from dataclasses import replace

import pytest
import torch

from sparsekit import checkpoint, cli, ops
from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.checksum import Summed
from sparsekit.checkpoint.encoding import decoded
from sparsekit.checkpoint.manifest import CHECKSUM, MANIFEST, rank_file
from sparsekit.checkpoint.tensor_file import TensorFile
from sparsekit.tables.owners import even_map

from .models import assert_equal, contents, made, saved_chain
from .numpy_reader import read_file, read_manifest, read_table


@pytest.fixture
def saved(tmp_path):
    """Save a chain of three checkpoints; return its folder and contents."""
    return tmp_path / "saved", contents(*saved_chain(tmp_path / "saved"))


def run(capsys, *arguments, status=0):
    assert cli.main(["checkpoint", *map(str, arguments)]) == status
    return "".join(capsys.readouterr())


def test_inspect_and_verify(saved, capsys):
    folder, expected = saved
    text = run(capsys, "inspect", folder)
    assert "step 2, 1 rank(s)" in text
    assert text.index("follows step-000000000001") < text.index("follows step-000000000000")
    assert f"changed rows of {len(expected['users keys'])}, dim 8, float32, hash table" in text
    assert "Ftrl: accumulator, linear" in text
    assert "step-000000000002: whole, with 2 before it" in run(capsys, "verify", folder)
    assert checkpoint.verify(folder) == sorted(folder.glob("step-*"))
    file = folder / "step-000000000000" / "table-0001-rank-0000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert str(file) in run(capsys, "verify", folder, status=2)
    assert str(file) in run(capsys, "reshard", folder, folder / "x", "--world", 2, status=2)
    assert not (folder / "x").exists()
    assert "no such folder" in run(capsys, "inspect", folder / "none", status=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_reshard(saved, tmp_path, capsys, world):
    folder, expected = saved
    out = tmp_path / "out"
    run(capsys, "reshard", folder, out, "--world", world)
    assert "whole" in run(capsys, "verify", out)
    assert "something already" in run(capsys, "reshard", folder, out, "--world", 1, status=2)
    manifest = read_manifest(out)
    assert manifest["base"] is None
    assert manifest["id"] != read_manifest(folder / "step-000000000002")["id"]
    for name, owners in (("users", even_map(world, torch.device("cpu"))), ("rows", None)):
        rows = read_table(out, name)
        assert sorted(rows) == expected[f"{name} keys"].tolist()
        for shard in manifest["tables"][name]["shards"]:
            crc = manifest["files"][shard["file"]]["crc32"]
            keys = torch.tensor(read_file(out / shard["file"], crc)["keys"])
            counts = ops.bucketize(keys, world, owners if world > 1 else None)[1].tolist()
            assert counts == [len(keys) * (rank == shard["rank"]) for rank in range(world)]
    model, optimizers = made("Ftrl", seed=1, hash_table=False)
    assert checkpoint.load(model, out, optimizers).step == 2
    assert_equal(contents(model, optimizers), expected)


def test_compact(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(checkpoint.reshard.__globals__, "PIECE", 500)  # forces many pieces
    folder, expected = saved
    run(capsys, "compact", folder, tmp_path / "out")
    assert "follows" not in run(capsys, "inspect", tmp_path / "out")
    model, optimizers = made("Ftrl", seed=1, hash_table=False)
    checkpoint.load(model, tmp_path / "out", optimizers)
    assert_equal(contents(model, optimizers), expected)


@contextlib.contextmanager
def files_at_most(more):
    """Limit the process to `more` further open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = len(os.listdir("/proc/self/fd")) + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_ranks_than_files_can_be_open(saved, tmp_path):
    folder, _ = saved
    with files_at_most(50):
        checkpoint.reshard(folder, tmp_path / "out", 60)
        found = checkpoint.diff(tmp_path / "out", folder)
        checkpoint.reshard(tmp_path / "out", tmp_path / "back", 1)
    assert not found
    assert found.tables["users"].same > 300


WORKS = {
    "reshard": lambda path, out: checkpoint.reshard(path, out, 3),
    "export npz": lambda path, out: checkpoint.export(path, out, "npz"),
    "export safetensors": lambda path, out: checkpoint.export(path, out, "safetensors"),
    "diff": lambda path, out: checkpoint.diff(path, path),
}


@pytest.mark.parametrize("work", WORKS)
def test_nothing_is_left_of_what_fails(saved, tmp_path, monkeypatch, work):
    """If any read fails, no file is left."""
    folder, _ = saved
    read, reads_before = TensorFile.read, iter(())

    def may_fail(self, *arguments):
        # Count down to the read that fails.
        if next(reads_before, None) == 0:
            raise CheckpointError(f"{self.path}: is damaged")
        return read(self, *arguments)

    monkeypatch.setattr(TensorFile, "read", may_fail)
    monkeypatch.setattr("sparsekit.checkpoint.tensor_file.os.fsync", lambda _: None)
    files = sorted(os.listdir("/proc/self/fd"))
    reads_before = iter(range(1, 10**6))
    WORKS[work](folder, tmp_path / "whole")
    reads, there, errors = next(reads_before) - 1, sorted(tmp_path.iterdir()), []
    for number in range(0, reads, max(1, reads // 10)):
        reads_before = iter(range(number, -1, -1))
        with pytest.raises(CheckpointError, match="is damaged") as caught:
            WORKS[work](folder, tmp_path / "out")
        errors.append(caught.value)  # its traceback keeps the objects alive
        assert sorted(os.listdir("/proc/self/fd")) == files
        assert sorted(tmp_path.iterdir()) == there


class ShortFile(io.FileIO):
    """File that reads or writes few bytes per call, as systems may do with large requests."""

    def readinto(self, room):
        return super().readinto(memoryview(room)[:999])

    def write(self, content):
        return super().write(memoryview(content)[:99])


def test_short_reads_and_writes_go_on(saved, tmp_path, monkeypatch):
    folder, expected = saved
    monkeypatch.setattr(io, "FileIO", ShortFile)
    checkpoint.reshard(folder, tmp_path / "out", 2)
    model, optimizers = made("Ftrl", seed=1, hash_table=False)
    checkpoint.load(model, tmp_path / "out", optimizers)
    assert_equal(contents(model, optimizers), expected)
    with ShortFile(tmp_path / "piece", "x") as file:
        Summed().write(file, bytes(range(256)))
    assert (tmp_path / "piece").read_bytes() == bytes(range(256))


class Note:
    """Object whose state differs by rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        return {"rank": self.rank, "tensor": torch.full((3,), self.rank)}

    def load_state_dict(self, state):
        self.rank = (state["rank"], state["tensor"].tolist())


def two_ranks(folder):
    """Return a checkpoint of two ranks with different states, made of two one-rank checkpoints."""
    for rank in (0, 1):
        checkpoint.save(torch.nn.Linear(1, 1), folder / str(rank), state={"note": Note(rank)})
    path = folder / "0"
    (folder / "1" / rank_file(0)).rename(path / rank_file(1))
    first, other = (checkpoint.manifest_file.read_manifest(folder / n) for n in "01")
    for name in (MANIFEST, CHECKSUM):
        (path / name).unlink()
    files = {**first.files, rank_file(1): other.files[rank_file(0)]}
    both = replace(first, world_size=2, ranks=[*first.ranks, *other.ranks], files=files)
    checkpoint.manifest_file.write_manifest(path, both)
    return path


def test_each_rank_keeps_its_state_or_gets_that_of_the_first(tmp_path):
    saved = two_ranks(tmp_path)
    for world, expected in ((1, [0]), (2, [0, 1]), (3, [0, 0, 0])):
        out = checkpoint.reshard(saved, tmp_path / f"out{world}", world)
        manifest = checkpoint.manifest_file.read_manifest(out)
        for rank, wanted in enumerate(expected):
            with TensorFile(out / rank_file(rank)) as file:
                tensors = {name: file.read(name) for name in file.places}
            note = Note(None)
            note.load_state_dict(decoded(manifest.ranks[rank], tensors)["state"]["note"])
            assert note.rank == (wanted, [wanted] * 3), (world, rank)
