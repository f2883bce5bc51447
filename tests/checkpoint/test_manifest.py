"""Each value of a manifest is checked: wrong types and values out of range raise."""

import dataclasses
import json
import shutil
import zlib

import pytest

from sparsekit.checkpoint import CheckpointError, manifest_file
from sparsekit.checkpoint.manifest_file import read_manifest

from .models import save_two
from .test_damage import rewritten

TABLE = ("tables", "users")
SHARD = (*TABLE, "shards", 0)
FILE = ("files", "dense.safetensors")


def wholes(least, most, *taken):
    return [least - 1, most + 1, True, float(least), str(least), [least]], list(taken)


def texts(most):
    return [5, ["x"], "x" * (most + 1)], ["", "x" * most]


def hexadecimal(digits):
    odd = ["0" * (digits - 1), "0" * (digits + 1), "0" * digits + "\n", "A" * digits, 5, ["0"]]
    return odd, ["0123456789abcdef"[-digits:].zfill(digits)]


FILES = [5, "", ".a", "a/b", "a\n", "a" * 101, ["a"]], []
BOOLS = [0, 1, "true", []], []
OBJECTS, LISTS = ([[], "x", 5], []), ([{}, "x", 5], [])
# Paths of the values that may be missing or None. No other value may be None.
OPTIONAL = {
    ("step",), ("base",), (*TABLE, "owners"), (*TABLE, "optimizer"), (*TABLE, "scores"),
    (*TABLE, "lookups"), (*TABLE, "lookups", "padding_key"), (*SHARD, "removed"),
}  # fmt: skip
# For each path: invalid values and valid values.
PLACES = {
    ("format",): ([5, "sparsekit checkpoints"], []),
    ("format_version",): wholes(1, 2, 1, 2),
    ("version",): texts(100),
    ("id",): hexadecimal(32),
    ("step",): wholes(0, 2**63 - 1, 0, 2**63 - 1),
    ("base",): OBJECTS,
    ("base", "folder"): (FILES[0], ["0", "a" * 100, "A_b.c-d"]),
    ("base", "id"): hexadecimal(32),
    ("world_size",): wholes(1, 2**20),
    ("files",): OBJECTS,
    FILE: OBJECTS,
    (*FILE, "bytes"): wholes(0, 2**60, 0, 2**60),
    (*FILE, "crc32"): hexadecimal(8),
    ("tables",): OBJECTS,
    TABLE: OBJECTS,
    (*TABLE, "layer"): texts(1000),
    (*TABLE, "dim"): wholes(1, 2**24),
    (*TABLE, "dtype"): (["float8", "float", 5, ["float32"]], []),
    (*TABLE, "key_dtype"): (["int16", 5, ["int64"]], ["int32"]),
    (*TABLE, "capacity"): wholes(1, 2**31 - 1, 1, 2**31 - 1),
    (*TABLE, "hash_table"): BOOLS,
    (*TABLE, "placement"): (["x", 5, ["hash"]], ["modulo"]),
    (*TABLE, "owners"): hexadecimal(8),
    (*TABLE, "seed"): wholes(-(2**63), 2**63 - 1, -(2**63), 2**63 - 1),
    (*TABLE, "initializer"): texts(10_000),
    (*TABLE, "optimizer"): wholes(0, 1, 0, 1),
    (*TABLE, "states"): OBJECTS,
    (*TABLE, "states", "exp_avg"): OBJECTS,
    (*TABLE, "states", "exp_avg", "dtype"): (["float8", 5, "bool"], list(manifest_file.ROW_DTYPES)),
    (*TABLE, "states", "exp_avg", "shape"): ([[7], [8, 1], [8.0], 5, {}], [[8], []]),
    (*TABLE, "settings"): OBJECTS,
    (*TABLE, "complete"): BOOLS,
    (*TABLE, "shards"): LISTS,
    SHARD: OBJECTS,
    (*SHARD, "rank"): wholes(0, 0),
    (*SHARD, "file"): FILES,
    (*SHARD, "rows"): wholes(0, 2**40),
    (*SHARD, "size"): wholes(0, 2**40, 0, 2**40),
    (*SHARD, "removed"): wholes(0, 2**40),
    (*TABLE, "scores"): OBJECTS,
    (*TABLE, "scores", "kind"): (["x", 5, ["lru"]], ["lru"]),
    (*TABLE, "scores", "clock"): wholes(0, 2**32 - 1, 0, 2**32 - 1),
    (*TABLE, "scores", "set_by_user"): (BOOLS[0], [True, False]),
    (*TABLE, "lookups"): OBJECTS,
    (*TABLE, "lookups", "miss"): (["x", 5, ["zeros"]], ["zeros", "error"]),
    (*TABLE, "lookups", "fallbacks"): wholes(0, 0),
    (*TABLE, "lookups", "combiner"): (["x", 5, ["sum"]], ["max", "none"]),
    (*TABLE, "lookups", "padding_key"): wholes(-(2**63), 2**63 - 1, -(2**63), 2**63 - 1),
    (*TABLE, "lookups", "limits_norms"): (BOOLS[0], [True, False]),
    ("optimizers",): LISTS,
    ("optimizers", 0): OBJECTS,
    ("ranks",): LISTS,
    ("ranks", 0): OBJECTS,
}


def written(place):
    """Return a path in a manifest in the form that errors use."""
    text, parent = "", None
    for key in place:
        if isinstance(key, int):
            text += f"[{key}]"
        elif parent in ("tables", "files", "states"):
            text += f"[{key!r}]"
        else:
            text += f".{key}" if text else key
        parent = key
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save an incremental checkpoint; return its folder."""
    folder = tmp_path_factory.mktemp("manifests")
    save_two(folder)
    return folder / "step-000000000001"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_values_of_a_manifest(folder, tmp_path, place):
    *path, last = place
    refused, taken = PLACES[place]

    def read_with(value):
        for name in ("manifest.json", "manifest.crc32"):
            shutil.copy(folder / name, tmp_path)

        def change(values):
            scores = {"kind": "lfu", "clock": 5, "set_by_user": False}
            values["tables"]["users"]["scores"] = scores
            # A checkpoint without a base needs complete tables.
            if place == ("base",) and value is None:
                for table in values["tables"].values():
                    table["complete"] = True
                    table["shards"][0]["size"] = table["shards"][0]["rows"]
            parent = values
            for key in path:
                parent = parent[key]
            parent[last] = value

        rewritten(tmp_path, change)
        read_manifest(tmp_path)

    named = next(key for key in reversed(place) if isinstance(key, str))
    for value in refused if place in OPTIONAL else [*refused, None]:
        with pytest.raises(CheckpointError) as caught:
            read_with(value)
        said = str(caught.value).removeprefix(f"{tmp_path}/manifest.json: ")
        assert named in said.split(" must be ")[0].split(" is newer ")[0], (value, said)
        if " must be " in said and "must be one of files" not in said:
            assert said.split(" must be ")[0] == written(place), (value, said)
    for value in [*taken, None] if place in OPTIONAL else taken:
        read_with(value)


@pytest.mark.parametrize("name", ["keys", "vectors", "scores", "removed", "rows"])
def test_names_of_columns_that_no_state_can_have(folder, tmp_path, name):
    for file in ("manifest.json", "manifest.crc32"):
        shutil.copy(folder / file, tmp_path)
    state = {"dtype": "float32", "shape": []}
    rewritten(tmp_path, lambda values: values["tables"]["users"]["states"].update({name: state}))
    said = rf"tables\['users'\]\.states must be without names of other columns, got \['{name}'\]$"
    with pytest.raises(CheckpointError, match=said):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"x"'])
def test_a_manifest_that_is_no_object(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    (tmp_path / "manifest.crc32").write_text(f"{zlib.crc32(content):08x}")
    with pytest.raises(CheckpointError, match=r"manifest\.json: it must be an object, got "):
        read_manifest(tmp_path)


def test_a_manifest_that_is_too_long(folder, tmp_path, monkeypatch):
    """A manifest at the size limit can be written and read; a longer one raises in both cases."""
    manifest = read_manifest(folder)
    size = (folder / "manifest.json").stat().st_size
    monkeypatch.setattr(manifest_file, "_MOST_BYTES", size)
    manifest_file.write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    monkeypatch.setattr(manifest_file, "_MOST_BYTES", size - 1)
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match=f"{size} bytes are too many; it has {size - 1} at"):
        manifest_file.write_manifest(tmp_path / "new", manifest)
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(CheckpointError, match=f"{size} bytes are too many; it has {size - 1} at"):
        read_manifest(folder)


def test_a_number_that_json_has_not(folder, tmp_path):
    text = (folder / "manifest.json").read_text()
    values = json.loads(text)
    values["tables"]["users"]["settings"]["step"] = float("nan")
    content = json.dumps(values).encode()
    (tmp_path / "manifest.json").write_bytes(content)
    (tmp_path / "manifest.crc32").write_text(f"{zlib.crc32(content):08x}")
    manifest = read_manifest(tmp_path)
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be written: .*not JSON"):
        manifest_file.write_manifest(tmp_path / "new", manifest)
    assert not list((tmp_path / "new").iterdir())


def test_what_is_written_is_read(folder, tmp_path):
    manifest = read_manifest(folder)
    table = manifest.tables["users"]
    assert table.size == table.shards[0].size > table.shards[0].rows
    other = dataclasses.replace(table, owners=0xAB)
    manifest = dataclasses.replace(manifest, tables={"users": other, "rows": table})
    shards = (dataclasses.replace(table.shards[0], file="rank-0000.safetensors", rows=0),)
    manifest.tables["rows"] = dataclasses.replace(table, shards=shards)
    manifest_file.write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    values = json.loads((tmp_path / "manifest.json").read_text())
    assert [values["tables"][name]["owners"] for name in ("users", "rows")] == ["000000ab", None]


def test_folders_that_are_no_checkpoints(folder, tmp_path):
    for path, said in ((tmp_path / "none", "there is no such folder"), (tmp_path, "is no checkp")):
        with pytest.raises(CheckpointError, match=f"^{path}: {said}"):
            read_manifest(path)
    (tmp_path / "manifest.json").symlink_to(folder / "none")
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: it is a link"):
        read_manifest(tmp_path)


def test_changes_need_a_base_and_a_file_with_room_for_them(folder, tmp_path):
    def refused(said, change):
        for name in ("manifest.json", "manifest.crc32"):
            shutil.copy(folder / name, tmp_path)
        rewritten(tmp_path, change)
        with pytest.raises(CheckpointError, match=said):
            read_manifest(tmp_path)

    with_users = r"tables\['users'\]"
    refused(f"{with_users} has changes only, but there is no base", lambda v: v.update(base=None))
    manifest = read_manifest(folder)
    table = manifest.tables["users"]
    row = 8 + table.dim * 4
    bytes_of = manifest.files[table.shards[0].file].bytes

    def of_bytes(size):
        def change(values):
            shard = values["tables"]["users"]["shards"][0]
            values["files"][shard["file"]]["bytes"] = size
            shard["rows"] = bytes_of // row

        return change

    size = bytes_of // row * row
    refused(rf"{with_users}\.shards\[0\]\.rows must be as many as ", of_bytes(size - 1))
    rewritten(tmp_path, of_bytes(size))
    read_manifest(tmp_path)


def test_a_manifest_and_its_checksum_belong_together(folder, tmp_path):
    text = (folder / "manifest.json").read_bytes()
    (tmp_path / "manifest.json").write_bytes(text)
    crc = f"{zlib.crc32(text):08x}"
    for found in (crc, f"{crc}\n", crc.rjust(63) + "\n"):
        (tmp_path / "manifest.crc32").write_text(found)
        read_manifest(tmp_path)
    for found in ("", crc[1:], f"{crc}0", crc.upper() + "x", "0" * 8):
        (tmp_path / "manifest.crc32").write_text(found)
        said = f"is damaged: its CRC-32 is {crc}, and manifest.crc32 says {found[:8]}$"
        with pytest.raises(CheckpointError, match=f"^{tmp_path}/manifest.json: {said}"):
            read_manifest(tmp_path)
    (tmp_path / "manifest.crc32").write_text(crc.ljust(65))
    with pytest.raises(CheckpointError, match=r"crc32: 65 bytes are too many; it has 64 at most$"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.crc32").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.crc32: the file is missing$"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{} {}"])
def test_a_manifest_that_is_no_json(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    (tmp_path / "manifest.crc32").write_text(f"{zlib.crc32(content):08x}")
    with pytest.raises(CheckpointError, match=r"manifest\.json: is no JSON: "):
        read_manifest(tmp_path)


def test_a_manifest_that_cannot_be_read(folder, monkeypatch):
    def fail(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(manifest_file, "plain_file", fail)
    with pytest.raises(CheckpointError, match=r"json: cannot be read: Input/output error$"):
        read_manifest(folder)
