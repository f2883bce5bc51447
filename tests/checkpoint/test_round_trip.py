"""Contents are restored bit for bit, and training continues as if uninterrupted."""

import json

import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, Checkpoints

from .models import OPTIMIZERS, Model, assert_equal, contents, made, train
from .numpy_reader import read_file, read_manifest, read_table


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, optimizer):
    model, optimizers = made(optimizer)
    train(model, optimizers, 0, 5)
    checkpoint.save(model, tmp_path / "a", optimizers)
    before = contents(model, optimizers)
    train(model, optimizers, 5, 12)
    loaded, of_loaded = made(optimizer, seed=1)
    train(loaded, of_loaded, 50, 53)  # the load must replace these steps
    checkpoint.load(loaded, tmp_path / "a", of_loaded)
    assert_equal(contents(loaded, of_loaded), before)
    train(loaded, of_loaded, 5, 12)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


@pytest.mark.parametrize("optimizer", ["LazyAdam", "Adam", "Ftrl"])
def test_rows_have_their_old_places(tmp_path, optimizer):
    model, optimizers = made(optimizer)
    train(model, optimizers, 0, 3)
    checkpoint.save(model, tmp_path / "a", optimizers)
    loaded, of_loaded = made(optimizer)
    checkpoint.load(loaded, tmp_path / "a", of_loaded)
    assert torch.equal(loaded.users.table.keys(), model.users.table.keys())
    used = len(model.users.table)
    assert torch.equal(loaded.users.weight[:used], model.users.weight[:used])


def test_before_the_first_step(tmp_path):
    model, optimizers = made()
    checkpoint.save(model, tmp_path / "a", optimizers)
    loaded, of_loaded = made(seed=1)
    train(loaded, of_loaded, 0, 2)
    checkpoint.load(loaded, tmp_path / "a", of_loaded)
    assert len(loaded.users.table) == 0
    assert torch.equal(loaded.users.vectors(torch.arange(9)), model.users.vectors(torch.arange(9)))
    for pair in ((model, optimizers), (loaded, of_loaded)):
        torch.manual_seed(3)  # for dropout
        train(*pair, 0, 3)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_another_kind_of_table(tmp_path):
    model, optimizers = made(hash_table=False)
    train(model, optimizers, 0, 5)
    checkpoint.save(model, tmp_path / "a", optimizers)
    hashed, of_hashed = made(hash_table=True)
    checkpoint.load(hashed, tmp_path / "a", of_hashed)
    assert_equal(contents(hashed, of_hashed), contents(model, optimizers))
    checkpoint.save(hashed, tmp_path / "b", of_hashed)
    plain, of_plain = made(hash_table=False, seed=3)
    checkpoint.load(plain, tmp_path / "b", of_plain)
    assert_equal(contents(plain, of_plain), contents(model, optimizers))


def test_keys_that_are_no_row_numbers(tmp_path):
    model, _ = made(hash_table=True)
    model.rows.assign(torch.tensor([3, -5]), torch.ones(2, 4))
    checkpoint.save(model, tmp_path / "a")
    plain, _ = made(hash_table=False)
    with pytest.raises(CheckpointError, match=r"table rows: key -5 .* no row number in \[0, 700\)"):
        checkpoint.load(plain, tmp_path / "a")


@pytest.mark.parametrize("capacity", [650, 5000])
def test_another_capacity(tmp_path, capacity):
    model, optimizers = made("Adagrad")
    train(model, optimizers, 0, 5)
    checkpoint.save(model, tmp_path / "a", optimizers)
    loaded, of_loaded = made("Adagrad", capacity=capacity)
    checkpoint.load(loaded, tmp_path / "a", of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))
    for pair in ((model, optimizers), (loaded, of_loaded)):
        torch.manual_seed(3)  # for dropout
        train(*pair, 5, 40)  # new keys start with the optimizer's initial states
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_rows_that_do_not_fit(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 5)
    checkpoint.save(model, tmp_path / "a", optimizers)
    small, of_small = made(capacity=100)
    small.rows.assign(torch.tensor([5]), torch.ones(1, 4))
    size = len(model.users.table)
    with pytest.raises(CheckpointError, match=f"table users has {size} rows, .*capacity of 100"):
        checkpoint.load(small, tmp_path / "a", of_small)
    assert len(small.users.table) == 0
    assert len(small.rows.table) == 1  # the load has changed neither table


def test_another_dtype_on_request(tmp_path):
    model, _ = made()
    model.users.assign(torch.arange(9), torch.rand(9, 8))
    checkpoint.save(model, tmp_path / "a")
    narrow, _ = made(dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="table users is float32, and bfloat16 in the module"):
        checkpoint.load(narrow, tmp_path / "a")
    checkpoint.load(narrow, tmp_path / "a", cast=True)
    keys = torch.arange(9)
    assert torch.equal(narrow.users.vectors(keys), model.users.vectors(keys).bfloat16())
    checkpoint.save(narrow, tmp_path / "b")
    vector = read_table(tmp_path / "b", "users")[3]["vectors"]
    assert vector.tolist() == narrow.users.vectors(torch.tensor(3)).tolist()


def test_tables_that_differ(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    checkpoint.save(model, tmp_path / "a", optimizers)
    with pytest.raises(CheckpointError, match="table users has dim 8, and 6 in the module"):
        checkpoint.load(Model(dim=6), tmp_path / "a", strict=False)
    other = torch.nn.ModuleDict({"users": model.users, "new": Model().rows})
    with pytest.raises(CheckpointError, match=r"it lacks new; it has besides out\.bias, .*rows"):
        checkpoint.load(other, tmp_path / "a")
    found = checkpoint.load(other, tmp_path / "a", strict=False)
    assert found.missing == ["new"]
    assert {"rows", "steps", "out.weight"} <= set(found.unexpected)


@pytest.mark.parametrize("count", [1, 5, 6, 9])
def test_a_refusal_names_five(tmp_path, count):
    checkpoint.save(torch.nn.ModuleDict(), tmp_path / "a")
    layers = {f"t{i}": sparsekit.Embedding(9, 2, name=f"t{i}") for i in range(count)}
    names = ", ".join(list(layers)[:5]) + (f" and {count - 5} more" if count > 5 else "")
    with pytest.raises(CheckpointError, match=f"does not fit the module: it lacks {names}; pass"):
        checkpoint.load(torch.nn.ModuleDict(layers), tmp_path / "a")


def test_a_layer_on_meta_is_not_loaded(tmp_path):
    path = checkpoint.save(sparsekit.Embedding(9, 2), tmp_path / "a")
    with pytest.raises(RuntimeError, match="ids: the layer is on meta"):
        checkpoint.load(sparsekit.Embedding(9, 2, name="ids", device="meta"), path)


def test_dense_tensors_that_differ(tmp_path):
    model = torch.nn.Linear(3, 2)
    checkpoint.save(model, tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weight has shape \[2, 3\], and \[2, 4\]"):
        checkpoint.load(torch.nn.Linear(4, 2), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weight is torch\.float32, and torch\.float64"):
        checkpoint.load(model.double(), tmp_path / "a")
    checkpoint.load(model, tmp_path / "a", cast=True)


def test_optimizers_that_differ(tmp_path):
    model, optimizers = made("LazyAdam")
    train(model, optimizers, 0, 2)
    checkpoint.save(model, tmp_path / "a", optimizers)
    before = contents(model, optimizers)
    with pytest.raises(CheckpointError, match="2 optimizers, and 1 were given"):
        checkpoint.load(model, tmp_path / "a", optimizers[:1])
    other, of_other = made("Ftrl")
    with pytest.raises(CheckpointError, match="optimizer 0 is LazyAdam, and Ftrl was given"):
        checkpoint.load(other, tmp_path / "a", of_other)
    fewer = torch.optim.Adam(model.out.parameters())
    with pytest.raises(CheckpointError, match=r"optimizer 1, Adam, has other parameters: top\.0"):
        checkpoint.load(model, tmp_path / "a", [optimizers[0], fewer])
    assert_equal(contents(model, optimizers), before)


def test_groups_and_parameters_of_no_module_and_settings_of_none(tmp_path):
    def stepped(rate, **settings):
        module = torch.nn.Linear(1, 1)
        outside = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        groups = [{"params": [*module.parameters()]}, {"params": outside, "lr": rate}]
        optimizer = torch.optim.Adam(groups, **settings)
        for number, parameter in enumerate([*module.parameters(), *outside]):
            parameter.grad = torch.full_like(parameter, rate * number)
        optimizer.step()
        return module, optimizer

    module, optimizer = stepped(1.0)
    checkpoint.save(module, tmp_path / "a", optimizer)
    for settings in ({}, {"foreach": False}):  # foreach is None by default, but may be set
        other, loaded = stepped(3.0, **settings)
        checkpoint.load(other, tmp_path / "a", loaded)
        parameters = [each for group in loaded.param_groups for each in group["params"]]
        for ours, theirs in zip(optimizer.state.values(), parameters, strict=True):
            assert torch.equal(ours["exp_avg"], loaded.state[theirs]["exp_avg"])
        assert [group["lr"] for group in loaded.param_groups] == [0.001, 1.0]


def test_other_states(tmp_path):
    model, optimizers = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.5**step)
    train(model, optimizers, 0, 1)
    scheduler.step()
    checkpoint.save(model, tmp_path / "a", optimizers, state={"scheduler": scheduler}, step=1)
    loaded, of_loaded = made()
    of_scheduler = torch.optim.lr_scheduler.LambdaLR(of_loaded[0], lambda step: 0.5**step)
    found = checkpoint.load(loaded, tmp_path / "a", of_loaded, state={"scheduler": of_scheduler})
    assert found.step == 1
    assert of_scheduler.last_epoch == 1
    assert of_loaded[0].param_groups[0]["lr"] == 0.005
    with pytest.raises(CheckpointError, match="no state of reader, but of scheduler"):
        checkpoint.load(loaded, tmp_path / "a", of_loaded, state={"reader": of_scheduler})


class Odd:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def test_values_of_states(tmp_path):
    value = {
        "numbers": [1, 2.5, float("inf"), 2**62, True, None],
        "nested": {"tuple": (1, (2, "three")), 5: "five", "$tensor": "no tensor"},
        "tensors": (torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 2)),
        "empty": [{}, [], (), ""],
    }
    model = torch.nn.Linear(1, 1)
    checkpoint.save(model, tmp_path / "a", state={"odd": Odd(value)})
    odd = Odd()
    checkpoint.load(model, tmp_path / "a", state={"odd": odd})
    tensors = odd.value.pop("tensors")
    assert all(map(torch.equal, tensors, value.pop("tensors")))
    assert odd.value == value
    with pytest.raises(CheckpointError, match=r"state\.odd\.file.* no PosixPath"):
        checkpoint.save(model, tmp_path / "b", state={"odd": Odd({"file": tmp_path})})
    assert not (tmp_path / "b").exists()


def test_tensors_of_one_path(tmp_path):
    first, *others = torch.arange(8).split(2)
    value = {"a.b": first, "a": {"b": others[0]}, "1": others[1], 1: others[2]}
    model = torch.nn.Linear(1, 1)
    checkpoint.save(model, tmp_path / "a", state={"odd": Odd(value)})
    odd = Odd()
    checkpoint.load(model, tmp_path / "a", state={"odd": odd})
    found = odd.value
    assert all(
        map(torch.equal, (found["a.b"], found["a"]["b"], found["1"], found[1]), (first, *others))
    )


def test_random_numbers_go_on(tmp_path):
    checkpoint.save(torch.nn.Linear(1, 1), tmp_path / "a")
    expected = torch.rand(3)
    checkpoint.load(torch.nn.Linear(1, 1), tmp_path / "a")
    assert torch.equal(torch.rand(3), expected)


def test_a_layer_alone(tmp_path):
    layer = Model().users
    layer.assign(torch.tensor([-(2**63), 5]), torch.ones(2, 8))
    checkpoint.save(layer, tmp_path / "a")
    other = Model().users
    checkpoint.load(other, tmp_path / "a")
    assert other.table.keys().tolist() == [-(2**63), 5]
    assert read_manifest(tmp_path / "a")["tables"].keys() == {"table"}


def test_keys_and_rows_in_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.snapshot, "_KEYS", 7)
    monkeypatch.setattr(checkpoint.snapshot, "_BUCKETS", 16)
    for module in ("tensor_file", "table_files"):
        monkeypatch.setattr(f"sparsekit.checkpoint.{module}.PIECE", 100)
    model, optimizers = made()
    train(model, optimizers, 0, 5)
    keep = Checkpoints(tmp_path, complete_every=3)
    keep.save(0, model, optimizers)
    train(model, optimizers, 5, 6)
    keep.save(1, model, optimizers)
    loaded, of_loaded = made()
    checkpoint.load(loaded, tmp_path, of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_a_reader_in_numpy(tmp_path):
    model, optimizers = made("Ftrl", hash_table=False)
    train(model, optimizers, 0, 3)
    keep = Checkpoints(tmp_path, complete_every=3)
    keep.save(0, model, optimizers)
    train(model, optimizers, 3, 5)
    path = keep.save(1, model, optimizers)
    assert read_manifest(path)["base"]["folder"] == "step-000000000000"
    expected = contents(model, optimizers)
    for name in ("users", "rows"):
        rows = read_table(path, name)
        assert sorted(rows) == expected[f"{name} keys"].tolist()
        for part in ("vectors", "accumulator", "linear"):
            found = [rows[key][part].tolist() for key in sorted(rows)]
            assert found == expected[f"{name} {part}"].tolist(), (name, part)
    files = read_manifest(path)["files"]
    dense = read_file(path / "dense.safetensors", files["dense.safetensors"]["crc32"])
    assert dense["module.out.bias"].tolist() == model.out.bias.tolist()
    assert json.loads((path / "manifest.json").read_text())["optimizers"][0]["kind"] == "Ftrl"
