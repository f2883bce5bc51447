"""Snapshots of modules and of checkpoints have the rows that lookups in evaluation read."""

import json
import zlib

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit import checkpoint, optim
from sparsekit.checkpoint import Checkpoints
from sparsekit.checkpoint.convert import import_tables, sources_of
from sparsekit.checkpoint.reshard import reshard
from sparsekit.serving import Snapshot, encoding, export_checkpoint, export_module

from . import numpy_reader


class Model(torch.nn.Module):
    """A model with one table of each kind, one of them shared, and a dense part."""

    def __init__(self, **options):
        super().__init__()
        made = sparsekit.DistributedEmbedding
        self.users = made("mean", None, 6, 1, name="users", padding_key=-1, **options)
        self.items = made("sum", 5000, 4, 1, name="items", dtype=torch.bfloat16, **options)
        self.words = made(
            "max", 5000, 3, 1, name="words", admission=sparsekit.MinCount(2),
            before_admission=sparsekit.Fallback(9), **options,
        )  # fmt: skip
        self.places = made(
            "sqrtn", 5000, 3, 1, name="places", admission=sparsekit.MinCount(2),
            before_admission="zero", **options,
        )  # fmt: skip
        self.days = sparsekit.Embedding(40, 2, use_hashtable=False, name="days", **options)
        self.again = self.users
        self.top = torch.nn.Linear(18, 1)

    def forward(self, keys):
        layers = (self.users, self.items, self.words, self.places)
        vectors = [layer(keys).float().flatten(1) for layer in layers]
        return self.top(torch.cat([*vectors, self.days(keys[:, 0, 0] % 40)], dim=1))


def trained(steps=6, optimizer=None, **options):
    """Return a model, its optimizer, and a function that trains a step."""
    torch.manual_seed(0)
    model = Model(**options)
    sparse, _ = sparsekit.split_embedding_variable_from_others(model)
    made = (optimizer or (lambda p: optim.LazyAdam(p, lr=0.1)))(sparse)

    def step(number):
        generator = torch.Generator().manual_seed(number)
        model(torch.randint(0, 500, (64, 1, 5), generator=generator)).square().sum().backward()
        made.step()
        made.zero_grad()

    for number in range(steps):
        step(number)
    return model, made, step


def rows_of(path):
    """Return what a snapshot has of each table: facts, and the bytes of rows by key."""
    found = {}
    for table in numpy_reader.Snapshot(path).list:
        used = table.buckets["rows"] >= 0
        numbers = table.buckets["rows"][used]
        rows = {
            key: table.rows[row].tobytes()
            for key, row in zip(table.buckets["keys"][used].tolist(), numbers.tolist(), strict=True)
        }
        facts = {
            name: getattr(table, name)
            for name in numpy_reader.NAMES
            if name not in ("index_seed", "index_crc", "rows_crc") and "offset" not in name
        }
        found[table.name] = facts, rows
    return found


def assert_evaluates(path, model):
    """Compare a snapshot's vectors with the model's, of keys with rows and of others."""
    model.eval()
    keys = torch.arange(600)
    with Snapshot(path, verify=True) as snapshot:
        assert list(snapshot.tables) == ["users", "items", "words", "places", "days"]
        for name in ("users", "items", "words", "places"):
            layer = getattr(model, name)
            expected = layer((keys, torch.arange(601))).squeeze(1)
            found = snapshot.lookup(name, keys).to(expected.dtype)
            assert torch.equal(found, expected.detach()), name
            assert snapshot.tables[name].padding_key == layer.padding_key
        assert torch.equal(snapshot.lookup("days", keys[:40]), model.days(keys[:40]))
    model.train()


def test_a_module_and_its_checkpoint_give_the_same_snapshot(tmp_path):
    model, made, _ = trained()
    export_module(model, tmp_path / "module.sks", step=5, note="by hand")
    assert_evaluates(tmp_path / "module.sks", model)
    checkpoint.save(model, tmp_path / "saved", made, step=5)
    export_checkpoint(tmp_path / "saved", tmp_path / "saved.sks")
    assert rows_of(tmp_path / "saved.sks") == rows_of(tmp_path / "module.sks")
    found = numpy_reader.Snapshot(tmp_path / "saved.sks")
    assert found.step == numpy_reader.Snapshot(tmp_path / "module.sks").step == 5
    assert found.note.startswith("checkpoint saved, id ")
    reshard(tmp_path / "saved", tmp_path / "three", 3)
    export_checkpoint(tmp_path / "three", tmp_path / "three.sks")
    assert rows_of(tmp_path / "three.sks") == rows_of(tmp_path / "module.sks")


def test_a_chain_of_checkpoints(tmp_path):
    model, made, step = trained()
    keep = Checkpoints(tmp_path / "run", complete_every=10, keep=9)
    for number in range(3):
        keep.save(number, model, made)
        step(10 + number)
        model.users.erase(torch.arange(number, 500, 7))
    keep.save(3, model, made)
    keep.close()
    newest = json.loads((tmp_path / "run" / "step-000000000003" / "manifest.json").read_text())
    assert newest["base"] is not None
    assert any(shard["removed"] for shard in newest["tables"]["users"]["shards"])
    export_checkpoint(tmp_path / "run", tmp_path / "chain.sks")
    export_module(model, tmp_path / "module.sks", step=3)
    assert rows_of(tmp_path / "chain.sks") == rows_of(tmp_path / "module.sks")
    assert_evaluates(tmp_path / "chain.sks", model)


def test_late_rows_are_brought_up_to_date(tmp_path):
    model, _, _ = trained(optimizer=lambda p: optim.Adam(p, lr=0.1, mode="catch_up"))
    before = model.users.weight[: len(model.users.table)].clone()
    export_module(model, tmp_path / "a.sks")
    assert not torch.equal(before, model.users.weight[: len(before)])  # some rows were late
    assert_evaluates(tmp_path / "a.sks", model)


def test_rows_in_files(tmp_path):
    model, *_ = trained(storage=f"mmap:{tmp_path}")
    export_module(model, tmp_path / "a.sks")
    assert_evaluates(tmp_path / "a.sks", model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_on_a_gpu(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": sparsekit.Embedding(1000, 8, name="a", device="cuda")})
    keys = torch.arange(300, device="cuda") * 7
    expected = model["a"](keys)
    export_module(model, tmp_path / "a.sks")
    with Snapshot(tmp_path / "a.sks", verify=True) as snapshot:
        assert torch.equal(snapshot.lookup("a", keys.cpu()), expected.cpu())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_norms_are_limited_as_in_lookups(tmp_path, norm_type):
    torch.manual_seed(0)
    layer = sparsekit.Embedding(500, 5, max_norm=1.0, norm_type=norm_type, name="limited")
    keys = torch.arange(300)
    layer.assign(keys, torch.randn(300, 5))
    export_module(layer, tmp_path / "a.sks")
    checkpoint.save(layer, tmp_path / "saved")
    with pytest.raises(ValueError, match="table table: has max_norm, and its rows in a checkpoint"):
        export_checkpoint(tmp_path / "saved", tmp_path / "b.sks")
    layer.eval()
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert torch.equal(snapshot.lookup("table", keys), layer(keys))


def test_float64_is_rounded_to_float32(tmp_path):
    layer = sparsekit.Embedding(500, 5, dtype=torch.float64, name="wide")
    vectors = torch.randn(300, 5, dtype=torch.float64)
    layer.assign(torch.arange(300), vectors)
    export_module(layer, tmp_path / "a.sks")
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert snapshot.tables["table"].row_format == "float32"
        assert torch.equal(snapshot.lookup("table", torch.arange(300)), vectors.float())
    layer.assign(torch.tensor([7]), torch.full((1, 5), 1e39, dtype=torch.float64))
    with pytest.raises(
        ValueError, match=r"b.sks: table table: key 7 cannot be stored as float32: "
    ):
        export_module(layer, tmp_path / "b.sks")


def test_formats_and_tables_by_name(tmp_path):
    model, made, _ = trained()
    checkpoint.save(model, tmp_path / "saved", made)
    rows = {"users": "int8", "days": "int4"}
    names = ["days", "users", "items"]
    export_checkpoint(tmp_path / "saved", tmp_path / "a.sks", rows=rows, tables=names)
    export_module(model, tmp_path / "b.sks", rows="int8", tables=names)
    with Snapshot(tmp_path / "a.sks") as one, Snapshot(tmp_path / "b.sks") as other:
        formats = {name: table.row_format for name, table in one.tables.items()}
        assert formats == {"days": "int4", "users": "int8", "items": "bfloat16"}
        assert {table.row_format for table in other.tables.values()} == {"int8"}
        keys = torch.arange(500)
        keys = keys[model.users.table.find(keys) >= 0]
        encoded = encoding.encode_rows(model.users.vectors(keys).numpy(), "int8")
        assert (encoding.decode_rows(encoded, "int8", 6) == one.lookup("users", keys).numpy()).all()
        assert torch.equal(one.lookup("users", keys), other.lookup("users", keys))
    for argument in ("rows", "miss"):
        word = {"rows": "int8", "miss": "zeros"}[argument]
        with pytest.raises(ValueError, match=f"{argument}: no table named user.*users"):
            export_module(model, tmp_path / "c.sks", **{argument: {"user": word}})
    with pytest.raises(ValueError, match=r"no table named day.*tables: users, items, words, .*"):
        export_checkpoint(tmp_path / "saved", tmp_path / "c.sks", tables=["day"])
    with pytest.raises(ValueError, match=r"table users: rows must be one of .*; got 'int9'"):
        export_module(model, tmp_path / "c.sks", rows="int9")
    assert not (tmp_path / "c.sks").exists()


def test_another_miss_than_that_of_the_layer(tmp_path):
    model, *_ = trained()
    miss = {"users": "zeros", "words": "initial", "places": "error"}
    export_module(model, tmp_path / "a.sks", miss=miss)
    with Snapshot(tmp_path / "a.sks") as snapshot:
        found = {name: table.miss for name, table in snapshot.tables.items()}
        assert found == {"items": "initial", "days": "error", **miss}
        key = torch.tensor([10**6])
        assert not snapshot.lookup("users", key).any()
        assert torch.equal(snapshot.lookup("items", key), model.items.vectors(key).float())
        # Without a place for keys that have no row, the rows that they share are left out.
        assert snapshot.tables["words"].rows == len(model.words.table) - 9
        initial = torch.empty(1, 3)
        model.words.initializer.write_(initial, key, seed=int(model.words.seed))
        assert torch.equal(snapshot.lookup("words", key), initial)
    with pytest.raises(ValueError, match="table users: miss='fallback': the table has no rows"):
        export_module(model, tmp_path / "b.sks", miss={"users": "fallback"})
    with pytest.raises(ValueError, match=r"table users: miss must be one of initial, .*; got 'no'"):
        export_module(model, tmp_path / "b.sks", miss="no")


def test_shared_rows_that_no_lookup_has_read(tmp_path):
    layer = sparsekit.DistributedEmbedding(
        "sum", 100, 3, 1, name="new", admission=sparsekit.MinCount(2),
        before_admission=sparsekit.Fallback(4), dtype=torch.bfloat16,
    )  # fmt: skip
    export_module(layer, tmp_path / "a.sks")
    keys = torch.arange(50)
    layer.eval()
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert snapshot.tables["table"].rows == 4
        found = snapshot.lookup("table", keys).bfloat16()
        assert torch.equal(found, layer((keys, torch.arange(51))).squeeze(1))
        assert len(found.unique(dim=0)) == 4


def without_lookups(folder):
    """Make a checkpoint as an older version would have written it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for table in manifest["tables"].values():
        del table["lookups"]
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "manifest.crc32").write_text(f"{zlib.crc32(text):08x}\n")


def test_checkpoints_of_older_versions(tmp_path):
    model, made, _ = trained()
    checkpoint.save(model, tmp_path / "saved", made)
    without_lookups(tmp_path / "saved")
    checkpoint.load(model, tmp_path / "saved", made)
    with pytest.raises(ValueError, match="table words: has admission, and the checkpoint does not"):
        export_checkpoint(tmp_path / "saved", tmp_path / "a.sks")
    miss = {"words": "zeros", "places": "zeros"}
    export_checkpoint(tmp_path / "saved", tmp_path / "a.sks", miss=miss)
    with Snapshot(tmp_path / "a.sks") as snapshot:
        found = {name: table.miss for name, table in snapshot.tables.items()}
        assert found == {"users": "initial", "items": "initial", "days": "error", **miss}
        keys = torch.tensor([3, 10**6])
        assert torch.equal(snapshot.lookup("users", keys), model.users.vectors(keys))


def test_initial_vectors_that_a_file_cannot_have(tmp_path):
    np.savez(tmp_path / "old.npz", keys=np.arange(5), vectors=np.ones((5, 3), np.float32))
    import_tables(sources_of("npz", tmp_path / "old.npz"), tmp_path / "saved")
    with pytest.raises(
        ValueError, match=r"the checkpoint does not tell of them; pass miss='zeros'"
    ):
        export_checkpoint(tmp_path / "saved", tmp_path / "a.sks")
    export_checkpoint(tmp_path / "saved", tmp_path / "a.sks", miss="zeros")
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert snapshot.lookup("old", np.array([4, 5])).tolist() == [[1, 1, 1], [0, 0, 0]]
    layer = sparsekit.Embedding(
        9, 3, use_hashtable=False, name="filled", embedding_initializer=torch.nn.init.orthogonal_
    )
    with pytest.raises(
        ValueError, match=r"they come from Filled\(orthogonal_\); pass miss='zeros'"
    ):
        export_module(layer, tmp_path / "a.sks", miss="initial")
    export_module(layer, tmp_path / "a.sks")


def test_modules_that_cannot_be_exported(tmp_path):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got dict"):
        export_module({}, tmp_path / "model.sks")
    with pytest.raises(ValueError, match="the module has no layer of sparsekit"):
        export_module(torch.nn.Linear(1, 1), tmp_path / "a.sks")
    layer = sparsekit.Embedding(9, 3, name="meta", device="meta")
    with pytest.raises(RuntimeError, match="meta: the layer is on meta"):
        export_module(layer, tmp_path / "a.sks")
    model, *_ = trained(0)
    model.items.world_size = 4
    with pytest.raises(
        RuntimeError, match=r"items: .* among 4 ranks. Save a checkpoint \(.*export"
    ):
        export_module(model, tmp_path / "a.sks")
    assert not any(tmp_path.iterdir())


def test_a_vector_that_a_format_cannot_hold_is_named(tmp_path):
    model, made, _ = trained()
    model.items.assign(torch.tensor([499]), torch.tensor([[1, float("inf"), 0, 0]]))
    checkpoint.save(model, tmp_path / "saved", made)
    message = "a.sks: table items: key 499 cannot be stored as int8: its values from 0 to inf are"
    with pytest.raises(ValueError, match=message):
        export_module(model, tmp_path / "a.sks", rows="int8")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "saved", tmp_path / "a.sks", rows="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_damaged_checkpoint_is_refused(tmp_path):
    model, made, _ = trained()
    checkpoint.save(model, tmp_path / "saved", made)
    file = tmp_path / "saved" / "table-0002-rank-0000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(checkpoint.CheckpointError, match=f"{file.name}: is damaged"):
        export_checkpoint(tmp_path / "saved", tmp_path / "a.sks")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
