"""A load replaces the whole contents of a table."""

import functools
import json
import struct

import pytest
import torch

import sparsekit
from sparsekit import checkpoint, optim
from sparsekit.checkpoint import CheckpointError, Checkpoints
from sparsekit.checkpoint.manifest_file import read_manifest
from sparsekit.checkpoint.tensor_file import TensorFile
from sparsekit.nn import Constant
from sparsekit.tables.hash_table import HashTable

from .models import made, train


def layer_of(*keys, capacity=9, seed=3, value=1.0, **options):
    layer = sparsekit.Embedding(capacity, 2, name="ids", seed=seed, **options)
    if keys:
        layer.assign(torch.tensor(keys), torch.full((len(keys), 2), value))
    return layer


@pytest.mark.parametrize("capacity", [9, 7])
@pytest.mark.parametrize("hash_table", [True, False])
def test_new_keys_begin_as_where_it_was_saved(tmp_path, hash_table, capacity):
    saved = layer_of(1, capacity=7, use_hashtable=hash_table)
    path = checkpoint.save(saved, tmp_path / "a")
    loaded = layer_of(2, 3, 4, seed=5, value=2.0, capacity=capacity, use_hashtable=hash_table)
    checkpoint.load(loaded, path)
    assert int(loaded.seed) == 3
    alike = layer_of(1, capacity=capacity, use_hashtable=hash_table)
    keys = torch.arange(7 if hash_table else capacity)
    assert torch.equal(loaded(keys), alike(keys))


def test_rows_without_a_key_are_zeros_again(tmp_path):
    path = checkpoint.save(layer_of(1, 2), tmp_path / "a")
    loaded = layer_of(*range(9), value=7.0)
    checkpoint.load(loaded, path)
    assert loaded.weight.tolist() == [[1, 1]] * 2 + [[0, 0]] * 7


def moved_by_an_optimizer(layer):
    """Take an optimizer step that moves all rows, even rows without a key."""
    layer.weight.grad = torch.ones_like(layer.weight)
    optim.SGD(layer.parameters(), lr=0.1).step()


def looked_up(layer):
    layer(torch.tensor([1]))
    layer.eval()(torch.tensor([1]))
    layer.train()


@pytest.mark.parametrize("before", [moved_by_an_optimizer, looked_up])
@pytest.mark.parametrize("inserts", [True, False])
def test_values_that_new_keys_would_undo_are_looked_for_again(tmp_path, before, inserts):
    path = checkpoint.save(layer_of(), tmp_path / "a")
    loaded = layer_of(1)
    before(loaded)
    checkpoint.load(loaded, path)
    loaded.weight.data[3] = 5.0  # torch does not count this write
    with pytest.raises(RuntimeError, match="ids: weight was written to"):
        loaded.train(inserts)(torch.tensor([1]))


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("placement", ["hash", "modulo", None])
def test_as_many_rows_as_there_is_room_for(tmp_path, size, placement):
    options = {"placement": placement} if placement else {"use_hashtable": False}
    path = checkpoint.save(layer_of(*range(size), capacity=size, **options), tmp_path / "a")
    loaded = layer_of(capacity=5, **options)
    if size > 5:
        said = "6 rows, .* capacity of 5" if placement else "6 rows for rank 0, whose capacity is 5"
        with pytest.raises(CheckpointError, match=f"table table has {said}"):
            checkpoint.load(loaded, path)
    else:
        checkpoint.load(loaded, path)
        assert loaded.vectors(torch.arange(5)).tolist() == [[1, 1]] * 5


def test_a_hash_table_of_another_load_factor(tmp_path):
    path = checkpoint.save(layer_of(*range(9)), tmp_path / "a")
    loaded = layer_of()
    loaded.table = HashTable(9, load_factor=0.1, name="ids")
    checkpoint.load(loaded, path)
    assert loaded.table.keys().tolist() == list(range(9))


@pytest.mark.parametrize("hash_table", [True, False])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_steps_that_are_due_are_not_those_of_what_is_loaded(tmp_path, with_optimizer, hash_table):
    model, optimizers = made("Adam", hash_table=hash_table)
    train(model, optimizers, 0, 2)
    path = checkpoint.save(model, tmp_path / "a", optimizers)
    expected = model.rows.weight.detach().clone()
    train(model, optimizers, 2, 5)  # most rows are late
    checkpoint.load(model, path, optimizers if with_optimizer else None)
    model.rows.catch_up()
    assert torch.equal(model.rows.weight, expected)


class Overwrites:
    """Object that overwrites a file when it loads its state, as another process might."""

    def __init__(self, file, old, new):
        self.change = file, struct.pack("<q", old), struct.pack("<q", new)

    def load_state_dict(self, _):
        file, old, new = self.change
        file.write_bytes(file.read_bytes().replace(old, new))


@pytest.mark.parametrize("key", [100, 101, 103])
def test_a_file_that_changes_while_it_is_loaded(tmp_path, key):
    """The load writes no row for a key that is not in the table."""
    keep = Checkpoints(tmp_path, complete_every=2)
    layer = layer_of(*range(100, 105))
    keep.save(0, layer, state={"it": State()})
    layer.assign(torch.tensor([100, 101, 103]), torch.zeros(3, 2))
    path = keep.save(1, layer, state={"it": State()})
    keep.close()
    file = path / "table-0000-rank-0000.safetensors"
    loaded = layer_of()
    with pytest.raises(CheckpointError, match=f"{file}: has changed while it was loaded"):
        checkpoint.load(loaded, path, state={"it": Overwrites(file, key, 77)})


FACTS = {
    "layer": "ids", "dim": 2, "dtype": "bfloat16", "key_dtype": "int32", "capacity": 9,
    "hash_table": True, "placement": "modulo", "owners": None, "seed": 5,
    "initializer": str(Constant(7.0)), "optimizer": None, "states": {}, "settings": {},
    "complete": True, "scores": None,
}  # fmt: skip


def test_a_manifest_tells_of_a_table(tmp_path):
    layer = sparsekit.Embedding(
        9, 2, name="ids", dtype=torch.bfloat16, key_dtype=torch.int32, placement="modulo", seed=5,
        embedding_initializer=Constant(7.0),
    )  # fmt: skip
    layer(torch.arange(3, dtype=torch.int32))
    path = checkpoint.save(torch.nn.ModuleDict({"t": layer}), tmp_path / "a", step=4)
    manifest = read_manifest(path)
    (table,) = manifest.tables.values()
    assert {name: getattr(table, name) for name in FACTS} == FACTS
    assert [vars(shard) for shard in table.shards] == [
        {
            "rank": 0,
            "file": "table-0000-rank-0000.safetensors",
            "rows": 3,
            "size": 3,
            "removed": 0,
            "counts": 0,
        }
    ]
    assert (manifest.step, manifest.version) == (4, sparsekit.build_info()["version"])


@pytest.mark.parametrize("length", [1, 500, 501])
def test_a_file_tells_of_which_table_it_is(tmp_path, length):
    path = checkpoint.save(torch.nn.ModuleDict({"t" * length: layer_of(1)}), tmp_path / "a")
    content = (path / "table-0000-rank-0000.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert header["__metadata__"] == {"table": "t" * min(length, 500)}


class Buffers(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("kept", torch.full((2,), value))
        self.register_buffer("scratch", torch.full((3,), value), persistent=False)
        self.register_buffer("none", None)
        # Wrappers store their model as `module`, but this class is not a wrapper.
        self.module = torch.nn.Linear(1, 1)


def test_buffers_and_wrappers(tmp_path):
    model = Buffers(1.0)
    compiled = functools.partial(torch.compile, backend="eager")
    path = checkpoint.save(compiled(model), tmp_path / "a")
    with TensorFile(path / "dense.safetensors") as file:
        names = set(file.places)
    assert names == {"module.kept", "module.module.weight", "module.module.bias"}
    for wrap in (lambda module: module, compiled):
        loaded = Buffers(0.0)
        checkpoint.load(wrap(loaded), path)
        assert (loaded.kept.tolist(), loaded.scratch.tolist()) == ([1, 1], [0, 0, 0])


def test_states_that_were_loaded_and_not_used_are_saved_by_key(tmp_path):
    """States are matched by key, even if the keys are in other rows."""
    one, other = (layer_of(*keys, capacity=5) for keys in ((1, 2, 3), (3, 2, 1)))
    optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (one, other)]
    one(torch.tensor([1])).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    path = checkpoint.save(other, tmp_path / "a", optimizers[1])
    loaded = layer_of(capacity=5)
    of_loaded = optim.SGD(loaded.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(loaded, path, of_loaded)
    assert loaded.table.keys().tolist() == [3, 2, 1]
    momentum = of_loaded.state[loaded.weight]["momentum_buffer"]
    assert momentum[:3].tolist() == [[0, 0], [0, 0], [1, 1]]


@pytest.mark.parametrize("kind", [optim.LazyAdam, torch.optim.SparseAdam])
def test_states_that_were_loaded_follow_the_keys(tmp_path, kind):
    """Loaded states follow their keys, even before the optimizer's first step."""
    layers = [layer_of(1, 2, 3), layer_of()]
    optimizers = [kind([*each.parameters()], lr=0.1) for each in layers]
    layers[0](torch.tensor([1])).sum().backward()
    optimizers[0].step()
    path = checkpoint.save(layers[0], tmp_path / "a", optimizers[0])
    checkpoint.load(layers[1], path, optimizers[1])
    layers[1].load_state_dict(layer_of(3, 2, 1).state_dict())
    layers[1](torch.tensor([3]))
    average = optimizers[1].state[layers[1].weight]["exp_avg"]
    assert average[:3].ne(0).tolist() == [[False] * 2] * 2 + [[True] * 2]


def wide_from(offset):
    """Return a function that makes a strided copy of a state, at an offset in its memory."""

    def make(state):
        memory = torch.zeros(3 * state.numel() + offset)
        wide = torch.empty(0).set_(memory.untyped_storage(), offset, (*state.shape, 3))
        wide[..., 1] = state
        return wide[..., 1]

    return make


def permuted(state):
    rows, dim = state.shape
    memory = torch.empty_strided((rows, dim, 2), (2 * dim, 1, dim))
    memory[..., 1] = state
    return memory[..., 1]


def rows_of_a_longer_one(state):
    memory = torch.zeros(len(state) + 4, state.shape[1])
    memory[3:-1] = state
    return memory[3:-1]


def second_half(state):
    memory = torch.zeros(len(state), 2, state.shape[1])
    half = memory.view(-1, state.shape[1])[len(state) :]
    half[:] = state
    return half


@pytest.mark.parametrize(
    "make", [wide_from(0), wide_from(5), permuted, rows_of_a_longer_one, second_half]
)
def test_states_of_any_memory_are_copied(tmp_path, make):
    layer, loaded = layer_of(1, 2, 3), layer_of()
    optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (layer, loaded)]
    layer(torch.tensor([1, 2])).sum().backward()
    optimizers[0].step()
    state = optimizers[0].state[layer.weight]
    expected = state["momentum_buffer"].clone()
    state["momentum_buffer"] = make(expected)
    path = checkpoint.async_save(layer, tmp_path / "a", optimizers[0]).wait()
    checkpoint.load(loaded, path, optimizers[1])
    assert torch.equal(optimizers[1].state[loaded.weight]["momentum_buffer"], expected)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (torch.eye(9).to_sparse(), "a tensor that is sparse_coo cannot"),
        (torch.ones(9, dtype=torch.float8_e5m2), r"a table's rows cannot have torch\.float8_e5m2"),
        (torch.ones(9, dtype=torch.complex64), r"a table's rows cannot have torch\.complex64"),
        (torch.ones(8, 2), r"a tensor of shape \[8, 2\] is neither a number nor one for .* 9 rows"),
        ([torch.ones(3)], r"a tensor of shape \[3\] is neither a number nor one for each"),
        (torch.ones((), dtype=torch.int16), r"a number for a table cannot be torch\.int16"),
        ({1, 2}, "but no set"),
    ],
)
def test_states_that_a_table_cannot_have(tmp_path, state, said):
    layer = layer_of(1)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight] = {"odd": state}
    with pytest.raises(CheckpointError, match=rf"^table\.odd, which the optimizer keeps: .*{said}"):
        checkpoint.save(layer, tmp_path / "a", optimizer)
    assert not list(tmp_path.iterdir())


def test_rows_states_are_in_the_files_of_their_table_alone(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 1)
    path = checkpoint.save(model, tmp_path / "a", optimizers)
    with TensorFile(path / "dense.safetensors") as file:
        named = [name for name in file.places if name.startswith("optimizers.")]
    assert named
    assert not [name for name in named if "users" in name or "rows" in name]


def test_states_side_by_side_are_copied_once(tmp_path):
    layer = layer_of(1)
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    saving = checkpoint.async_save(layer, tmp_path / "a", optimizer)
    saving.wait()
    assert set(saving._copies._kept) == {"table.vectors", "table.exp_avg", "table.buckets"}


def test_nothing_that_is_saved_or_copied_is_part_of_a_graph(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 1)
    saving = checkpoint.async_save(model, tmp_path / "a", optimizers)
    saving.wait()
    snapshot, copies = saving._writing.snapshot, saving._copies._kept
    columns = [each for shard in snapshot.shards for each in shard.columns.values()]
    tensors = [*columns, *copies.values(), *snapshot.dense.values(), *snapshot.own.values()]
    assert not any(each.requires_grad for each in tensors)


class State:
    def __init__(self):
        self.tensor = torch.zeros(3)

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def test_what_is_written_in_the_background_is_as_it_was(tmp_path, monkeypatch):
    """A save in the background writes all states as they were at the time of the call."""
    layer, state = layer_of(1), State()
    model = torch.nn.ModuleDict({"ids": layer, "top": torch.nn.Linear(1, 1)})
    bias = model["top"].bias.item()
    original = checkpoint.save.__globals__["write"]

    def write(*arguments):
        with torch.no_grad():
            for tensor in (*model.parameters(), state.tensor):
                tensor += 1
        layer.reset_parameters()
        layer.assign(torch.tensor([7]), torch.zeros(1, 2))
        return original(*arguments)

    monkeypatch.setitem(checkpoint.save.__globals__, "write", write)
    keep = Checkpoints(tmp_path)
    path = keep.async_save(0, model, state={"it": state}).wait()
    keep.close()
    loaded = torch.nn.ModuleDict({"ids": layer_of(), "top": torch.nn.Linear(1, 1)})
    found = State()
    checkpoint.load(loaded, path, state={"it": found})
    assert loaded["ids"].vectors(torch.tensor([1])).tolist() == [[1, 1]]
    assert loaded["top"].bias.item() == bias
    assert found.tensor.tolist() == [0, 0, 0]


def test_a_table_that_was_replaced_within_a_chain(tmp_path):
    def model(*keys):
        layers = {name: sparsekit.Embedding(9, 2, name=name) for name in "ab"}
        for layer in layers.values() if keys else ():
            layer.assign(torch.tensor(keys), torch.ones(len(keys), 2))
        return torch.nn.ModuleDict(layers)

    saved, keep = model(1, 2), Checkpoints(tmp_path / "run", complete_every=9)
    keep.save(0, saved)
    saved["a"].reset_parameters()
    saved["a"].assign(torch.tensor([7]), torch.ones(1, 2))
    path = keep.save(1, saved)
    keep.close()
    tables = read_manifest(path).tables
    assert (tables["a"].complete, tables["b"].complete) == (True, False)
    for source in (path, checkpoint.reshard(path, tmp_path / "two", 2)):
        loaded = model(3, 4)
        checkpoint.load(loaded, source)
        found = {name: sorted(loaded[name].table.keys().tolist()) for name in "ab"}
        assert found == {"a": [7], "b": [1, 2]}


def test_fresh_states_have_the_dtype_of_saved_ones(tmp_path):
    options = {"use_hashtable": False, "dtype": torch.bfloat16}
    layers = [sparsekit.Embedding(capacity, 2, name="ids", **options) for capacity in (5, 9)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in layers]
    layers[0].weight.grad = torch.ones_like(layers[0].weight)
    optimizers[0].step()
    path = checkpoint.save(layers[0], tmp_path / "a", optimizers[0])
    checkpoint.load(layers[1], path, optimizers[1])
    momentum = optimizers[1].state[layers[1].weight]["momentum_buffer"]
    assert momentum.dtype == torch.bfloat16
    assert momentum.tolist() == [[1, 1]] * 5 + [[0, 0]] * 4
