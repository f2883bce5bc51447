"""Tests of ``sparsekit checkpoint import``, ``export`` and ``diff``."""

import importlib.util
import json
import os
import re
import struct
import sys

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit import checkpoint, cli
from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.sources import PIECE

from .models import contents, saved_chain
from .numpy_reader import read_table


def run(capsys, *arguments, status=0):
    assert cli.main(["checkpoint", *map(str, arguments)]) == status
    return "".join(capsys.readouterr())


def loaded(path, name, dim, rows=200):
    """Load a checkpoint into a module with one layer, as documented; return the layer."""
    module = torch.nn.ModuleDict({name: sparsekit.Embedding(rows, dim, name=name)})
    module["dense"] = torch.nn.Linear(2, 2)
    checkpoint.load(module, path, strict=False)
    return module[name]


def vectors(rows, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, dim), dtype=np.float32)


@pytest.fixture(params=[40, PIECE])
def pieces(request, monkeypatch):
    """Make imports and exports work in blocks of a few rows, or in one block."""
    monkeypatch.setattr("sparsekit.checkpoint.sources.PIECE", request.param)
    monkeypatch.setitem(checkpoint.reshard.__globals__, "PIECE", request.param)


def assert_rows(layer, keys, expected):
    assert sorted(layer.table.keys().tolist()) == sorted(keys)
    assert torch.equal(
        layer.vectors(torch.tensor(keys, dtype=torch.int64)), torch.from_numpy(expected)
    )


@pytest.mark.parametrize(("code", "bytes_of_key"), [("<q", 8), ("<I", 4)])
def test_sok1(tmp_path, capsys, pieces, code, bytes_of_key):
    keys = [7, 2**32 - 1, 0, 12, 5] if bytes_of_key == 4 else [7, -3, 2**62, 12, 5]
    expected = vectors(5, 6)
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "users_keys.file").write_bytes(b"".join(struct.pack(code, key) for key in keys))
    numbers = [struct.pack("<f", value) for value in expected.reshape(-1).tolist()]
    (dump / "users_values.file").write_bytes(b"".join(numbers))
    arguments = ["import", dump, tmp_path / "out", "--from", "sok1"]
    assert "--dim users=N" in run(capsys, *arguments, status=2)
    assert "no float32 vectors of dim 7" in run(capsys, *arguments, "--dim", 7, status=2)
    assert not (tmp_path / "out").exists()
    assert "users: 5 rows, dim 6" in run(capsys, *arguments, "--dim", 3, "--dim", "users=6")
    assert_rows(loaded(tmp_path / "out", "users", 6), keys, expected)
    with open(dump / "users_keys.file", "ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=r"users_values\.file"):
        checkpoint.sources_of("sok1", dump, {"": 6})


def write_sok2(folder, tables):
    """Write a SOK 2 dump of these tables, byte by byte."""
    folder.mkdir()
    meta = struct.pack(">I", len(tables))
    for field in ("key_type", "value_type", "dim"):
        meta += b"".join(struct.pack(">I", table[field]) for table in tables)
    meta += b"".join(struct.pack(">Q", len(table["keys"])) for table in tables)
    meta += b"".join(table["name"].encode().rjust(256) for table in tables)
    meta += b"".join(b"Adam".rjust(32) for _ in tables)
    (folder / "meta_info").write_bytes(meta)
    for table in tables:
        stem = table["name"].replace(":", "_").replace("/", "_")
        contents = {
            "key": (0, "", table["key_type"], table["code"], table["keys"]),
            "weight": (1, "", table["value_type"], table["value_code"], table["values"]),
            "Adam-m": (2, "m", table["value_type"], table["value_code"], table["values"]),
        }
        for end, (kind, slot, dtype, code, numbers) in contents.items():
            head = table["name"].encode().rjust(256) + struct.pack(">I", kind)
            head += slot.encode().rjust(32) + struct.pack(">I", dtype)
            raw = b"".join(struct.pack(f"<{code}", number) for number in numbers)
            (folder / f"{stem}-{end}").write_bytes(head + raw)


def sok2_table(name, key_type, code, keys, dim, value_type=5, value_code="f"):
    values = vectors(len(keys), dim, seed=dim).astype(f"<{'e' if value_code == 'e' else 'f'}")
    return {
        "name": name, "key_type": key_type, "code": code, "keys": keys, "dim": dim,
        "value_type": value_type, "value_code": value_code, "values": values.reshape(-1).tolist(),
        "expected": values.astype(np.float32),
    }  # fmt: skip


def test_sok2(tmp_path, capsys, pieces):
    tables = [
        sok2_table("net/users:0", 2, "I", [1, 2**32 - 1, 77], 4),  # an odd number of uint32 keys
        sok2_table("goods:0", 1, "q", [5, -1, 2**40], 8),
        sok2_table("wide", 3, "Q", [5, 2**64 - 2], 3, value_type=4, value_code="e"),
        sok2_table("odd", 2, "Q", [2**32 - 1, 9, 8], 2),  # uint32 keys stored as uint64
        sok2_table("empty", 0, "i", [], 2),
    ]
    dump = tmp_path / "dump"
    write_sok2(dump, tables)
    arguments = ["import", dump, tmp_path / "out", "--from", "sok2"]
    assert "no table none" in run(capsys, *arguments, "--rename", "none=x", status=2)
    assert "one name" in run(capsys, *arguments, "--rename", "goods=wide", status=2)
    text = run(capsys, *arguments, "--rename", "net/users=users")
    assert "net/users: 3 rows, dim 4; left behind: states of Adam: net_users_0-Adam-m" in text
    for table, name in zip(tables, ["users", "goods", "wide", "odd", "empty"], strict=True):
        layer = loaded(tmp_path / "out", name, table["dim"])
        keys = [key - 2**64 if key >= 2**63 else key for key in table["keys"]]
        assert_rows(layer, keys, table["expected"])
    twin = sparsekit.Embedding(9, 8, name="goods")  # unseen keys start as in a layer with this name
    assert torch.equal(
        loaded(tmp_path / "out", "goods", 8).vectors(torch.tensor([3])),
        twin.vectors(torch.tensor([3])),
    )


@pytest.mark.parametrize(
    ("file", "place", "content", "names"),
    [
        ("meta_info", 0, b"\xff\xff\xff\xff", "meta_info"),
        ("meta_info", 4, b"\0\0\0\x09", "key type 9"),
        ("meta_info", 12, b"\xff\xff\xff\xff", "dim 4294967295"),
        ("meta_info", 16, b"\x7f" * 8, "t-key"),
        ("t-key", 0, b"x", "t-key: is damaged"),
        ("t-key", 256, b"\0\0\0\1", "t-key: is damaged"),
        ("t-weight", 292, b"\0\0\0\6", "t-weight: is of type 6"),
        ("t-weight", None, b"\0", "t-weight: is damaged"),
        ("t-key", 304, struct.pack("<q", 5), "key 5 is there twice, the second time in row 1"),
    ],
)
def test_damaged_sok2_is_refused(tmp_path, pieces, file, place, content, names):
    write_sok2(tmp_path / "dump", [sok2_table("t", 1, "q", [5, 6, 7], 4)])
    with open(tmp_path / "dump" / file, "r+b") as opened:
        opened.seek(*((0, 2) if place is None else (place,)))
        opened.write(content)
    with pytest.raises(CheckpointError, match=names):
        checkpoint.import_tables(checkpoint.sources_of("sok2", tmp_path / "dump"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_npz(tmp_path, capsys, pieces):
    folder = tmp_path / "tables"
    folder.mkdir()
    keys, expected = [9, -4, 3], vectors(3, 5)
    np.savez(folder / "a.npz", keys=np.array(keys), vectors=expected, note=np.zeros(2))
    np.savez_compressed(folder / "b.npz", vectors=expected.astype(np.float64))
    text = run(capsys, "import", folder, tmp_path / "out", "--from", "npz")
    assert "a: 3 rows, dim 5; left behind: note" in text
    assert_rows(loaded(tmp_path / "out", "a", 5), keys, expected)
    with pytest.raises(CheckpointError, match="float64"):
        loaded(tmp_path / "out", "b", 5)
    layer = sparsekit.Embedding(10, 5, name="b", dtype=torch.float64)
    checkpoint.load(torch.nn.ModuleDict({"b": layer}), tmp_path / "out", strict=False)
    assert torch.equal(layer.vectors(torch.arange(3)).float(), torch.from_numpy(expected))


def test_torchrec(tmp_path, capsys, pieces):
    """Import a state with TorchRec's names; outputs equal the original EmbeddingBags' outputs."""
    torch.manual_seed(0)
    state = {
        "model.sparse.embedding_bags.users.weight": torch.randn(50, 4),
        "model.sparse.embedding_bags.goods.weight": torch.randn(20, 8, dtype=torch.bfloat16),
        "model.over.weight": torch.randn(3, 4),
    }
    torch.save(state, tmp_path / "state.pt")
    text = run(capsys, "import", tmp_path / "state.pt", tmp_path / "out", "--from", "torchrec")
    assert "users: 50 rows, dim 4" in text
    assert "over" not in text
    bags = torch.nn.ModuleDict(
        {
            "users": sparsekit.EmbeddingBag(60, 4, mode="sum", name="users"),
            "goods": sparsekit.EmbeddingBag(60, 8, mode="sum", name="goods", dtype=torch.bfloat16),
        }
    )
    checkpoint.load(bags, tmp_path / "out")
    keys, offsets = torch.randint(0, 20, (30,)), torch.tensor([0, 4, 4, 19])
    for name, bag in bags.items():
        weight = state[f"model.sparse.embedding_bags.{name}.weight"]
        expected = torch.nn.functional.embedding_bag(keys, weight.float(), offsets, mode="sum")
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "users" else {"rtol": 0.02, "atol": 0.1}
        torch.testing.assert_close(bag(keys, offsets).float(), expected, **tolerance)
    torch.save({"embedding_bags.users.weight": print}, tmp_path / "bad.pt")
    for content in ("bad.pt", "none.pt"):
        with pytest.raises(CheckpointError, match=content):
            checkpoint.sources_of("torchrec", tmp_path / content)
    twice = {f"{part}.embedding_bags.t.weight": torch.ones(2, 2) for part in "ab"}
    torch.save(twice, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="two tables t"):
        checkpoint.sources_of("torchrec", tmp_path / "bad.pt")
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="embedding_bags"):
        checkpoint.sources_of("torchrec", tmp_path / "bad.pt")


def test_torchrec_itself(tmp_path):
    torchrec = pytest.importorskip("torchrec", reason="needs torchrec")
    config = torchrec.EmbeddingBagConfig(
        name="users", embedding_dim=4, num_embeddings=50, feature_names=["user"]
    )
    theirs = torchrec.EmbeddingBagCollection(tables=[config])
    torch.save(theirs.state_dict(), tmp_path / "state.pt")
    checkpoint.import_tables(
        checkpoint.sources_of("torchrec", tmp_path / "state.pt"), tmp_path / "out"
    )
    ours = torch.nn.ModuleDict({"users": sparsekit.EmbeddingBag(50, 4, mode="sum", name="users")})
    checkpoint.load(ours, tmp_path / "out")
    keys, lengths = torch.randint(0, 50, (9,)), torch.tensor([2, 0, 7])
    features = torchrec.KeyedJaggedTensor.from_lengths_sync(["user"], keys, lengths)
    expected = theirs(features).values()
    torch.testing.assert_close(ours["users"](keys, torch.tensor([0, 2, 2])), expected)


@pytest.fixture
def saved(tmp_path):
    """Save a chain of three checkpoints; return its folder, the model and its optimizers."""
    return tmp_path / "saved", *saved_chain(tmp_path / "saved")


def read_exported(path):
    if path.suffix == ".npz":
        return dict(np.load(path))
    if path.suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(path)
        return {name: np.array(table[name].to_pylist(), dtype={"keys": "i8"}.get(name, "f4"))
                for name in table.column_names}  # fmt: skip
    tensors = pytest.importorskip("safetensors.numpy").load_file(path)
    return dict(tensors)


@pytest.mark.parametrize("format", ["npz", "parquet", "safetensors"])
def test_export(saved, tmp_path, capsys, pieces, format):
    if format == "parquet":
        pytest.importorskip("pyarrow", reason="needs pyarrow")
    folder, model, optimizers = saved
    expected = contents(model, optimizers)
    out = tmp_path / "out"
    assert f"users.{format}" in run(capsys, "export", folder, out, "--format", format)
    assert sorted(p.name for p in out.iterdir()) == [f"rows.{format}", f"users.{format}"]
    for name in ("users", "rows"):
        found = read_exported(out / f"{name}.{format}")
        assert sorted(found) == ["accumulator", "keys", "linear", "vectors"]
        order = found["keys"].argsort()
        for column, values in found.items():
            assert np.array_equal(values[order], expected[f"{name} {column}"].numpy()), column
    assert "something already" in run(capsys, "export", folder, out, "--format", format, status=2)
    if format == "npz":
        run(capsys, "import", out, tmp_path / "again", "--from", "npz")
        assert read_table(tmp_path / "again", "users").keys() == read_table(
            folder / "step-000000000000", "users"
        ).keys() | {int(k) for k in expected["users keys"]}


def test_export_of_bfloat16_and_nothing(tmp_path, capsys):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    model = torch.nn.ModuleDict({
        "a": sparsekit.Embedding(9, 4, name="a", dtype=torch.bfloat16),
        "empty": sparsekit.Embedding(9, 4, name="empty"),
    })  # fmt: skip
    model["a"].assign(torch.tensor([3, 4]), torch.full((2, 4), 1.5, dtype=torch.bfloat16))
    checkpoint.save(model, tmp_path / "saved")
    for format in ("npz", "parquet"):
        checkpoint.export(tmp_path / "saved", tmp_path / format, format)
        found = read_exported(tmp_path / format / f"a.{format}")
        assert found["vectors"].dtype == np.float32
        assert found["vectors"].tolist() == [[1.5] * 4] * 2
        assert len(read_exported(tmp_path / format / f"empty.{format}")["keys"]) == 0


def test_diff(saved, tmp_path, capsys, pieces):
    folder, model, optimizers = saved
    run(capsys, "reshard", folder, tmp_path / "two", "--world", 2)
    text = run(capsys, "diff", folder, tmp_path / "two")
    size = len(model.users.table)
    assert f"users: {size:,} rows are the same\n" in text
    rows = model.users.table.find(model.users.table.keys())[:3]
    with torch.no_grad():
        model.users.weight[rows[:2]] += 0.25
        optimizers[0].state[model.users.weight]["linear"][rows[1:3]] += 2
        model.out.bias += 1
    model.users.assign(torch.tensor([-9, -8]), torch.zeros(2, 8))
    checkpoint.save(model, tmp_path / "new", optimizers)
    found = checkpoint.diff(tmp_path / "two", tmp_path / "new")
    users = found.tables["users"]
    assert (users.same, users.only_a, users.only_b) == (size - 3, 0, 2)
    assert users.changed["vectors"][0] == users.changed["linear"][0] == 2
    assert users.changed["vectors"][1] == pytest.approx(0.25, abs=1e-6)
    assert users.changed["linear"][1] == pytest.approx(2, abs=1e-5)
    assert (found.only_a, found.only_b, found.dense) == ([], [], ["module.out.bias"])
    assert not found.tables["rows"]
    back = checkpoint.diff(tmp_path / "new", tmp_path / "two").tables["users"]
    assert (back.only_a, back.only_b, back.changed) == (2, 0, users.changed)
    text = run(capsys, "diff", tmp_path / "two", tmp_path / "new", status=1)
    assert f"users: {size - 3:,} rows are the same, 0 only in" in text
    assert "  vectors: 2 rows differ, by at most 0.25\n" in text
    assert "module.out.bias: differs" in text
    one = torch.nn.ModuleDict({"users": sparsekit.Embedding(9, 4, name="users")})
    checkpoint.save(one, tmp_path / "other")
    text = run(capsys, "diff", tmp_path / "two", tmp_path / "other", status=1)
    assert "users: dim 8 and 4" in text
    assert "only in" in text


NAMES = [
    "b/c",
    "b_c",
    "b:c",
    "t" * 300,
    "t" * 301,
    ".hidden",
    "..",
    "Größe",
    "a\nb",
    "x" * 99 + "/",
]


def test_export_of_tables_whose_names_are_no_names_of_files(tmp_path):
    inner = torch.nn.Module()
    for number, name in enumerate(NAMES):
        layer = sparsekit.Embedding(9, 4, name=name)
        layer.assign(torch.tensor([number]), torch.full((1, 4), number + 0.5))
        inner._modules[name] = layer  # unlike register_module, this accepts any name
    checkpoint.save(inner, tmp_path / "saved")
    out = checkpoint.export(tmp_path / "saved", tmp_path / "out", "npz")
    names = {path.stem: int(np.load(path)["keys"][0]) for path in out.iterdir()}
    assert sorted(names.values()) == list(range(len(NAMES)))
    assert (names["b_c"], names["b_c-1"], names["t" * 100]) == (0, 1, 3)
    assert all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,110}", name) for name in names)
    checkpoint.import_tables(checkpoint.sources_of("npz", out), tmp_path / "again")
    tables = checkpoint.manifest_file.read_manifest(tmp_path / "again").tables
    assert sorted(tables) == sorted(NAMES)
    assert not checkpoint.diff(tmp_path / "saved", tmp_path / "again").only_a
    for format in ("parquet", "safetensors"):
        out = checkpoint.export(tmp_path / "saved", tmp_path / format, format)
        assert {path.stem for path in out.iterdir()} == set(names)
        if format == "safetensors":
            metadata = {table_of_safetensors(path) for path in out.iterdir()}
        else:
            read = pytest.importorskip("pyarrow.parquet").read_schema
            metadata = {read(path).metadata[b"table"].decode() for path in out.iterdir()}
        assert metadata == set(NAMES)


def table_of_safetensors(path):
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return header["__metadata__"]["table"]


def test_damaged_checkpoints_are_neither_exported_nor_compared(saved, tmp_path):
    folder, model, optimizers = saved
    checkpoint.save(model, tmp_path / "other", optimizers)
    file = folder / "step-000000000001" / "table-0000-rank-0000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for work in (
        lambda: checkpoint.export(folder, tmp_path / "out", "npz"),
        lambda: checkpoint.diff(folder, tmp_path / "other"),
        lambda: checkpoint.diff(tmp_path / "other", folder),
    ):
        with pytest.raises(CheckpointError, match="table-0000-rank-0000"):
            work()
    assert not (tmp_path / "out").exists()


def test_what_is_made_of_a_checkpoint_reaches_the_disk(saved, tmp_path, monkeypatch):
    folder, synced, fsync = saved[0], [], os.fsync

    def record(file):
        number = file if isinstance(file, int) else file.fileno()
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def imported(out):
        return checkpoint.import_tables(checkpoint.sources_of("npz", tmp_path / "npz"), out)

    monkeypatch.setattr(os, "fsync", record)
    for name, make in {
        "npz": lambda out: checkpoint.export(folder, out, "npz"),
        "parquet": lambda out: checkpoint.export(folder, out, "parquet"),
        "safetensors": lambda out: checkpoint.export(folder, out, "safetensors"),
        "two ranks": lambda out: checkpoint.reshard(folder, out, 2),
        "imported": imported,
    }.items():
        if name == "parquet" and not importlib.util.find_spec("pyarrow"):
            continue
        synced.clear()
        out = make(tmp_path / name)
        made = {file.name for file in out.iterdir()}
        assert made <= {os.path.basename(file) for file in synced}, name
        assert synced[-1] == str(tmp_path), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_diff_of_a_chain_in_which_all_of_a_part_is_replaced(tmp_path, dtype):
    layer = sparsekit.Embedding(20, 2, name="t", dtype=dtype)
    keep = checkpoint.Checkpoints(tmp_path / "chain", complete_every=3)
    for step, count in enumerate((9, 2, 2)):
        layer.assign(torch.arange(count), torch.rand(count, 2).to(dtype))
        keep.save(step, layer)
    keep.close()
    whole = checkpoint.save(layer, tmp_path / "whole")
    for pair in ((tmp_path / "chain", whole), (whole, tmp_path / "chain")):
        found = checkpoint.diff(*pair)
        assert not found
        assert found.tables["table"].same == 9


def test_diff_of_shapes_and_nan(tmp_path):
    for number in (0, 1):
        model = torch.nn.ModuleDict({"t": sparsekit.Embedding(9, 2, name="t")})
        model["top"] = torch.nn.Linear(2, 2 + number, bias=False)
        values = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
        if number:
            values[1:] += torch.tensor([[float("nan"), 0], [9.0, 0]])
        model["t"].assign(torch.arange(3), values)
        checkpoint.save(model, tmp_path / str(number))
    found = checkpoint.diff(tmp_path / "0", tmp_path / "1")
    assert found.dense == ["module.top.weight"]
    assert found.tables["t"].same == 1
    count, most = found.tables["t"].changed["vectors"]
    assert (count, most != most) == (2, True)


def test_parquet_without_pyarrow(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    text = run(capsys, "export", saved[0], tmp_path / "out", "--format", "parquet", status=2)
    assert "needs pyarrow: pip install 'sparsekit-torch[data]'" in text
    assert not (tmp_path / "out").exists()
