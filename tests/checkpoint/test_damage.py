"""Any damage to a checkpoint's files is detected, and the error names the file."""

import json
import os
import random
import shutil
import struct
import zlib

import pytest
import torch

from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.manifest_file import read_manifest
from sparsekit.checkpoint.tensor_file import TensorFile

from .models import assert_equal, contents, made, save_two, train

CORRUPTIONS = 300


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a complete and an incremental checkpoint; return the folder."""
    folder = tmp_path_factory.mktemp("saved")
    save_two(folder)
    return folder


def corrupt(folder, chance):
    """Damage a random file; return names, at least one of which the error must contain."""
    steps = sorted(path for path in folder.iterdir() if path.name.startswith("step-"))
    files = sorted(chance.choice(steps).iterdir())
    file = chance.choice(files)
    content = bytearray(file.read_bytes())
    kind = chance.choice(["flip", "cut", "add", "swap", "remove", "link", "folder"])
    if kind == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif kind == "cut":
        file.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "add":
        file.write_bytes(content + chance.randbytes(chance.randrange(1, 9)))
    elif kind == "swap":
        other = chance.choice([f for f in files if f.read_bytes() != content])
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return [file.name, other.name]
    elif kind == "remove":
        file.unlink()
    elif kind == "link":
        file.rename(folder / "elsewhere")
        file.symlink_to(folder / "elsewhere")
    else:
        file.unlink()
        file.mkdir()
    return [file.name]


def test_every_corruption_is_found_and_nothing_is_changed(saved, tmp_path):
    model, optimizers = made()
    train(model, optimizers, 5, 6)
    before = contents(model, optimizers)
    for seed in range(CORRUPTIONS):
        folder = tmp_path / str(seed)
        shutil.copytree(saved, folder)
        names = corrupt(folder, random.Random(seed))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(model, folder / "step-000000000001", optimizers)
        # If the manifest and its checksum disagree, either may be the damaged one.
        if any(name.startswith("manifest") for name in names):
            names = ["manifest"]
        assert any(name in str(caught.value) for name in names), (seed, names, caught.value)
        shutil.rmtree(folder)
    assert_equal(contents(model, optimizers), before)


def rewritten(folder, change):
    """Change a manifest and its checksum, as an attacker would."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    text = json.dumps(values).encode()
    path.write_bytes(text)
    (folder / "manifest.crc32").write_text(f"{zlib.crc32(text):08x}\n")


def put(*path_and_value):
    *path, last, value = path_and_value

    def change(values):
        for key in path:
            values = values[key]
        values[last] = value

    return change


def move_file(name):
    def change(values):
        old = values["tables"]["users"]["shards"][0]["file"]
        values["tables"]["users"]["shards"][0]["file"] = name
        values["files"][name] = values["files"].pop(old)

    return change


SHARD = ("tables", "users", "shards", 0)
MALICIOUS = {
    "path": (move_file("../../etc/passwd"), "name of a file in the folder"),
    "absolute path": (move_file("/etc/passwd"), "name of a file in the folder"),
    "hidden file": (move_file(".writer"), "name of a file in the folder"),
    "no string": (put(*SHARD, "file", 5), "name of a file in the folder"),
    "unlisted file": (put(*SHARD, "file", "other.safetensors"), "one of files"),
    "base elsewhere": (put("base", {"folder": "../x", "id": "0" * 32}), "base.folder"),
    "rows": (put(*SHARD, "rows", 2**40), "rows must be"),
    "rows below 0": (put(*SHARD, "rows", -1), "rows must be a whole number"),
    "rows that is true": (put(*SHARD, "rows", True), "rows must be a whole number"),
    "rows that is a float": (put(*SHARD, "rows", 1e18), "rows must be a whole number"),
    "dim": (put("tables", "users", "dim", 2**40), "dim must be a whole number"),
    "dim that fits": (put("tables", "users", "dim", 1), r"shape must be \[\] or \[1\]"),
    "size": (put(*SHARD, "size", 5), "rows must be its size 5"),
    "size beyond rows": (put(*SHARD, "size", 10**6), "rows must be its size 1000000"),
    "file of another": (put(*SHARD, "file", "table-0001-rank-0000.safetensors"), "file of its own"),
    "no dense file": (lambda values: values["files"].pop("dense.safetensors"), "a list with dense"),
    "a column's name": (
        put("tables", "users", "states", "keys", {"dtype": "int64", "shape": []}),
        "names of other columns",
    ),
    "dtype": (put("tables", "users", "dtype", "object"), "dtype must be one of"),
    "capacity": (put("tables", "users", "capacity", 2**60), "capacity must be"),
    "state": (put("tables", "users", "states", "exp_avg", "shape", [2**60]), "shape must be"),
    "state's dtype": (put("tables", "users", "states", "exp_avg", "dtype", "float64"), "exp_avg"),
    "no states": (put("tables", "users", "states", []), "states must be an object"),
    "tables": (put("tables", [1]), "tables must be an object"),
    "world size": (put("world_size", 2**40), "world_size must be"),
    "another world size": (put("world_size", 2), "ranks must be 2 entries"),
    "ranks": (put("ranks", ["os.system"]), "must be an object"),
    "state of ranks": (put("ranks", [{"state": 5}]), "lacks state or random"),
    "no random numbers": (put("ranks", 0, "random", 5), "lacks state or random"),
    "no states of ranks": (put("ranks", 0, "state", [1]), "lacks state or random"),
    "ranks of a tuple": (put("ranks", [{"$tuple": [1]}]), "lacks state or random"),
    "tensor": (put("ranks", [{"state": {}, "random": {"$tensor": "x"}}]), "stands for nothing"),
    "names of states": (
        put("ranks", 0, "state", {"$items": [[5, 1]]}),
        "state has what is no name",
    ),
    "random numbers": (
        put("ranks", 0, "random", {"cpu": {"$scalar": ["int32", 5]}}),
        r"ranks\[0\].random is damaged",
    ),
    "random state": (put("ranks", 0, "random", {"cuda": [1]}), "random is damaged: cuda is no ten"),
    "optimizers": (put("optimizers", {}), "optimizers must be a list"),
    "groups": (put("optimizers", 0, "groups", 3), "is damaged"),
    "settings": (put("optimizers", 0, "groups", 0, "params", None), "is damaged"),
    "params": (put("optimizers", 0, "groups", 0, "params", [5]), "params must be a list of names"),
    "a group": (put("optimizers", 0, "groups", [5]), "groups must be a list of objects"),
    "states": (put("optimizers", 0, "state", [1]), "state must be an object of objects"),
    "a state": (put("optimizers", 0, "state", {"out.bias": 5}), "state must be an object of obj"),
    "optimizer": (put("tables", "users", "optimizer", 7), "optimizer must be a whole number"),
    "id": (put("id", "x"), "id must be 32 hexadecimal digits"),
    "version": (put("format_version", 3), "format_version 3 is newer than 2"),
    "format": (put("format", "pickle"), "format must be"),
    "bytes": (put("files", "dense.safetensors", "bytes", 10**17), "dense.safetensors"),
    "crc": (put("files", "dense.safetensors", "crc32", 5), "crc32 must be 8 hexadecimal"),
}


@pytest.mark.parametrize("kind", MALICIOUS)
def test_a_malicious_manifest_is_refused(saved, tmp_path, kind):
    change, expected = MALICIOUS[kind]
    folder = tmp_path / "a"
    shutil.copytree(saved / "step-000000000000", folder)
    rewritten(folder, change)
    model, optimizers = made()
    with pytest.raises(CheckpointError, match=expected) as caught:
        checkpoint.load(model, folder, optimizers)
    assert str(caught.value).startswith(str(folder))
    assert len(model.users.table) == 0


def test_deep_nesting(saved, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(saved / "step-000000000000", folder)
    deep = [1]
    for _ in range(200):
        deep = [deep]
    rewritten(folder, put("ranks", [{"state": {"x": deep}, "random": {}}]))
    said = r"manifest\.json: ranks\[0\]: a state is nested deeper than 100$"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(*made()[:1], folder)
    (folder / "manifest.json").write_text("[" * 100_000)
    (folder / "manifest.crc32").write_text(f"{zlib.crc32(b'[' * 100_000):08x}")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is no JSON"):
        checkpoint.load(*made()[:1], folder)


def of_x(dtype, shape, *offsets):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}}


NO_SIZE = r"ValueError\('a size or place is no number >= 0: "
# Faults by name, with the error of each. Bytes are a whole file; other values are a file's header.
HEADERS = {
    "nothing": (b"", "it ends in the middle of it$"),
    "no header": (b"abcdefg", "it ends in the middle of it$"),
    "a length beyond the file": (struct.pack("<Q", 1) + b"{}", "it has no header of tensors$"),
    "a header of one byte": (struct.pack("<Q", 2**62) + b"{", "it has no header of tensors$"),
    "no JSON": (struct.pack("<Q", 4) + b"{{{{", "JSONDecodeError"),
    "nested too deeply": (struct.pack("<Q", 10**5) + b"[" * 10**5, "RecursionError"),
    "a list": ([], "TypeError"),
    "a number": (55, "AttributeError"),
    "an entry that is a number": ({"x": 5}, "TypeError"),
    "an entry without shape": ({"x": {"dtype": "U8", "data_offsets": [0, 6]}}, "KeyError"),
    "one offset": (of_x("U8", [6], 6), "ValueError"),
    "a huge shape": (of_x("F32", [2**40, 2**40], 0, 4), r"ValueError\('4 bytes for shape \[1"),
    "a negative shape": (of_x("F32", [-1, -1], 0, 4), NO_SIZE),
    "a negative place": (of_x("U8", [8], -2, 6), NO_SIZE),
    "true for 1": (of_x("U8", [True, 6], 0, 6), NO_SIZE),
    "a size that is a float": (of_x("U8", [6.0], 0, 6), NO_SIZE),
    "places that overlap": (
        {**of_x("U8", [4], 0, 4), "y": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}},
        r"y begins at \d+$",
    ),
    "a gap": (of_x("U8", [4], 2, 6), r"x begins at \d+$"),
    "more than there is": (
        of_x("U8", [400], 0, 400),
        r"it has \d+ bytes, and its header tells of ",
    ),
    "less than there is": (
        of_x("U8", [5], 0, 5),
        r"it has \d+ bytes, and its header tells of \d+$",
    ),
    "an unknown dtype": (of_x("Q7", [4], 0, 4), "KeyError"),
    "a dtype that is a list": (of_x(["U8"], [6], 0, 6), "TypeError"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_tensors(tmp_path, kind):
    content, said = HEADERS[kind]
    if not isinstance(content, bytes):
        text = json.dumps(content).encode()
        content = struct.pack("<Q", len(text)) + text + b"\0" * 6
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'a'}: is damaged: {said}"):
        TensorFile(tmp_path / "a")


def test_special_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it must not block
    with pytest.raises(CheckpointError, match="is no plain file"):
        TensorFile(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is no plain file"):
        TensorFile(tmp_path)
    with pytest.raises(CheckpointError, match="the file is missing"):
        TensorFile(tmp_path / "none")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "plain").write_text("")
    with pytest.raises(CheckpointError, match="link: cannot be read: it is a link"):
        TensorFile(tmp_path / "link")


def test_a_header_may_name_tensors_in_any_order(tmp_path):
    header = {
        name: {"dtype": "U8", "shape": [2], "data_offsets": place}
        for name, place in (("x", [2, 4]), ("y", [0, 2]))
    }
    text = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(text)) + text + b"\1\2\3\4")
    with TensorFile(tmp_path / "a") as file:
        assert [file.read(name).tolist() for name in "xy"] == [[3, 4], [1, 2]]


@pytest.mark.time_limit(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("plain")])
def test_files_that_are_no_plain_ones_any_more(tmp_path, monkeypatch, make):
    """If a file becomes a link or a pipe after its check, opening it raises and does not block."""
    (tmp_path / "plain").write_bytes(struct.pack("<Q", 2) + b"{}")
    TensorFile(tmp_path / "plain").close()
    make(tmp_path / "a")
    earlier = os.stat(tmp_path / "plain")
    with monkeypatch.context() as context:
        context.setattr(os, "lstat", lambda _: earlier)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/a: "):
            TensorFile(tmp_path / "a")


def test_links_of_a_chain(saved, tmp_path):
    model, optimizers = made()
    folder = tmp_path / "gap"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "step-000000000000")
    with pytest.raises(CheckpointError, match=r"since step-000000000000, .* a gap in the chain"):
        checkpoint.load(model, folder / "step-000000000001", optimizers)
    folder = tmp_path / "order"
    shutil.copytree(saved, folder)
    rewritten(folder / "step-000000000000", put("id", "0" * 32))
    with pytest.raises(CheckpointError, match=r"step-000000000000 is 0{32}: a wrong order"):
        checkpoint.load(model, folder / "step-000000000001", optimizers)
    folder = tmp_path / "circle"
    shutil.copytree(saved, folder)
    own = json.loads((folder / "step-000000000001" / "manifest.json").read_text())["id"]
    base = {"folder": "step-000000000001", "id": own}
    rewritten(folder / "step-000000000000", put("base", base))
    with pytest.raises(CheckpointError, match="goes round in a circle"):
        checkpoint.load(model, folder / "step-000000000001", optimizers)
    folder = tmp_path / "link"
    shutil.copytree(saved, folder)
    (folder / "step-000000000000").rename(folder / "elsewhere")
    (folder / "step-000000000000").symlink_to(folder / "elsewhere")
    with pytest.raises(CheckpointError, match=r"since step-000000000000, .* a gap in the chain"):
        checkpoint.load(model, folder / "step-000000000001", optimizers)
    size = read_manifest(saved / "step-000000000001").tables["users"].size
    for wrong in (size - 1, size + 1):
        folder = tmp_path / str(wrong)
        shutil.copytree(saved, folder)
        newest = folder / "step-000000000001"
        rewritten(newest, put(*SHARD, "size", wrong))
        with pytest.raises(CheckpointError, match=f"should have {wrong} rows, and has {size} keys"):
            checkpoint.load(model, newest, optimizers)
    assert len(model.users.table) == 0


def test_changes_of_a_table_that_the_base_lacks(saved, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(saved, folder)
    rewritten(folder / "step-000000000000", lambda values: values["tables"].pop("users"))
    said = "step-000000000001: has changes of users, which step-000000000000 lacks"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(made()[0], folder / "step-000000000001")


READS = {
    "load": lambda path, out: checkpoint.load(made()[0], path, cast=True),
    "verify": lambda path, out: checkpoint.verify(path),
    "reshard": lambda path, out: checkpoint.reshard(path, out, 1),
    "export": lambda path, out: checkpoint.export(path, out, "npz"),
    "diff": lambda path, out: checkpoint.diff(path, path),
}


@pytest.mark.parametrize("read", READS)
def test_headers_that_are_not_as_the_manifest_says(saved, tmp_path, read):
    folder = tmp_path / "a"
    shutil.copytree(saved / "step-000000000000", folder)
    rewritten(folder, put("tables", "rows", "dtype", "int32"))
    files = sorted(os.listdir("/proc/self/fd"))
    said = r"table-0001-rank-0000\.safetensors: is damaged: vectors should be int32"
    with pytest.raises(CheckpointError, match=said) as caught:
        READS[read](folder, tmp_path / "out")
    assert caught.value  # the error's traceback keeps all objects alive, but no file may stay open
    assert sorted(os.listdir("/proc/self/fd")) == files


def test_the_latest_passes_over_what_is_damaged(saved, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(saved, folder)
    assert checkpoint.latest(folder) == folder / "step-000000000001"
    (folder / "step-000000000001" / "dense.safetensors").unlink()
    with pytest.warns(UserWarning, match=r"step-000000000001 is passed over: .*dense\.safetensors"):
        assert checkpoint.latest(folder) == folder / "step-000000000000"
    (folder / "step-000000000000" / "manifest.crc32").unlink()
    with pytest.warns(UserWarning, match=r"manifest\.crc32: the file is missing"):
        assert checkpoint.latest(folder) is None
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(CheckpointError, match="none of the checkpoints in it is whole"),
    ):
        checkpoint.load(torch.nn.Linear(1, 1), folder)
    assert checkpoint.latest(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="there is no such folder"):
        checkpoint.load(torch.nn.Linear(1, 1), tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no manifest\.json"):
        checkpoint.load(torch.nn.Linear(1, 1), tmp_path)


def test_no_pickle_is_read(saved, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle was asked")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    monkeypatch.setattr("torch.load", refuse)
    model, optimizers = made()
    checkpoint.load(model, saved, optimizers)
    assert len(model.users.table) > 0
