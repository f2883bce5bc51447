"""Tests of saving and loading through torch.distributed.checkpoint in one process."""

import copy
import io
import json
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import sparsekit
from sparsekit.checkpoint import CheckpointError, DcpState
from sparsekit.checkpoint.dcp_source import DcpSource, ToLoad, ToSave

from .models import OPTIMIZERS, Model, assert_equal, contents, made, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path, model, optimizers=None, **options):
    dcp.save({"app": DcpState(model, optimizers, **options)}, checkpoint_id=path)


def load(path, model, optimizers=None, **options):
    state = DcpState(model, optimizers, load_from=path, **options)
    dcp.load({"app": state}, checkpoint_id=path)
    return state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path, optimizer):
    model, optimizers = made(optimizer)
    train(model, optimizers, 0, 5)
    save(tmp_path, model, optimizers)
    before = contents(model, optimizers)
    train(model, optimizers, 5, 9)
    loaded, of_loaded = made(optimizer, seed=1)
    train(loaded, of_loaded, 50, 52)  # the load must replace these steps
    load(tmp_path, loaded, of_loaded)
    assert torch.equal(
        loaded.users.table.keys(), model.users.table.keys()[: len(loaded.users.table)]
    )
    assert_equal(contents(loaded, of_loaded), before)
    train(loaded, of_loaded, 5, 9)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


@pytest.mark.parametrize("options", [{"capacity": 650}, {"capacity": 3000}, {"hash_table": False}])
def test_other_tables(tmp_path, options):
    model, optimizers = made("Ftrl")
    train(model, optimizers, 0, 5)
    save(tmp_path, model, optimizers)
    loaded, of_loaded = made("Ftrl", seed=3, **options)
    load(tmp_path, loaded, of_loaded)
    found, expected = contents(loaded, of_loaded), contents(model, optimizers)
    if "hash_table" in options:  # a table without a hash table has a row for every key in range
        rows = expected["rows keys"]
        for name in [name for name in found if name.startswith("rows ") and found[name].dim()]:
            found[name] = found[name][rows]
    assert_equal(found, expected)


def test_before_the_first_step(tmp_path):
    model, optimizers = made()
    save(tmp_path, model, optimizers)
    loaded, of_loaded = made(seed=1)
    train(loaded, of_loaded, 0, 2)
    load(tmp_path, loaded, of_loaded)
    assert len(loaded.users.table) == 0
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_rows_that_do_not_fit_and_dims(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 5)
    save(tmp_path, model, optimizers)
    small, of_small = made(capacity=100)
    small.rows.assign(torch.tensor([5]), torch.ones(1, 4))
    before = contents(small, of_small)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: table users has .*capacity of 100"):
        load(tmp_path, small, of_small)
    other, of_other = made("Ftrl")
    with pytest.raises(CheckpointError, match="optimizer 0 is LazyAdam, and Ftrl was given"):
        load(tmp_path, other, of_other)
    assert_equal(contents(small, of_small), before)
    with pytest.raises(CheckpointError, match="table users has dim 8, and 6 in the module"):
        load(tmp_path, Model(dim=6))
    narrow = made(dtype=torch.bfloat16)[0]
    with pytest.raises(CheckpointError, match="table users is float32, and bfloat16 in the mod"):
        load(tmp_path, narrow)
    load(tmp_path, narrow, cast=True)
    keys = model.users.table.keys()
    assert torch.equal(narrow.users.vectors(keys), model.users.vectors(keys).bfloat16())


def test_names_that_differ(tmp_path):
    model, _ = made()
    save(tmp_path, model)
    other = torch.nn.ModuleDict({"users": Model().users, "new": Model().rows})
    with pytest.raises(CheckpointError, match=r"it lacks new; it has besides out\.bias, .*rows"):
        load(tmp_path, other)
    state = load(tmp_path, other, strict=False)
    assert state.missing == ["new"]
    assert {"rows", "steps", "out.weight"} <= set(state.unexpected)


def test_dots_and_brackets_in_names(tmp_path):
    """Module names may contain dots, the separator that torch.distributed.checkpoint uses."""
    nested = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"b": Model().users})})
    nested["a"]["table-0000-rank-0000"] = torch.nn.Linear(2, 2)
    nested["a.b"[:1] + "_b"] = Model().rows
    nested["a"]["b"].assign(torch.arange(5), torch.rand(5, 8))
    dcp.save({"my.app": DcpState(nested), "my": {"app2": torch.ones(2)}}, checkpoint_id=tmp_path)
    loaded = copy.deepcopy(nested)
    loaded["a"]["b"].reset_parameters()
    torch.nn.init.zeros_(loaded["a"]["table-0000-rank-0000"].weight)
    state = {
        "my.app": DcpState(loaded, load_from=tmp_path, name="my.app"),
        "my": {"app2": torch.zeros(2)},
    }
    dcp.load(state, checkpoint_id=tmp_path)
    keys = torch.arange(5)
    assert torch.equal(loaded["a"]["b"].vectors(keys), nested["a"]["b"].vectors(keys))
    linear = loaded["a"]["table-0000-rank-0000"]
    assert torch.equal(linear.weight, nested["a"]["table-0000-rank-0000"].weight)
    assert torch.equal(state["my"]["app2"], torch.ones(2))


def test_other_states_and_random_numbers(tmp_path):
    model, optimizers = made()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.5**step)
    train(model, optimizers, 0, 1)
    scheduler.step()
    save(tmp_path, model, optimizers, state={"scheduler": scheduler})
    expected = torch.rand(3)
    loaded, of_loaded = made()
    of_scheduler = torch.optim.lr_scheduler.LambdaLR(of_loaded[0], lambda step: 0.5**step)
    load(tmp_path, loaded, of_loaded, state={"scheduler": of_scheduler})
    assert of_scheduler.last_epoch == 1
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(CheckpointError, match="no state of reader, but of scheduler"):
        load(tmp_path, loaded, of_loaded, state={"reader": of_scheduler})


def test_a_load_without_load_from_writes_nothing(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    save(tmp_path, model, optimizers)
    train(model, optimizers, 2, 3)
    model.users.weight.data += 1
    before = contents(model, optimizers)
    for planner in (None, dcp.DefaultLoadPlanner(allow_partial_load=True)):
        state = {"app": DcpState(model, optimizers)}
        with pytest.raises(CheckpointException, match=r"pass DcpState\(\.\.\., load_from=path\)"):
            dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    with pytest.raises(CheckpointError, match=r"pass DcpState\(\.\.\., load_from=path\)"):
        DcpState(model).load_state_dict({})
    assert_equal(contents(model, optimizers), before)


def test_a_save_before_a_load(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    save(tmp_path / "a", model, optimizers)
    state = {"app": DcpState(model, optimizers, load_from=tmp_path / "a")}
    with pytest.raises(CheckpointException, match=r"load_from=.*nothing to save before it has"):
        dcp.save(state, checkpoint_id=tmp_path / "b")
    assert not list((tmp_path / "b").glob("**/.metadata"))
    dcp.load(state, checkpoint_id=tmp_path / "a")
    dcp.save(state, checkpoint_id=tmp_path / "b")  # once loaded, the state can be saved
    loaded, of_loaded = made(seed=2)
    load(tmp_path / "b", loaded, of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_a_planner_that_does_not_flatten(tmp_path):
    model, _ = made()
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    with pytest.raises(CheckpointException, match="a planner with flatten_state_dict=True"):
        dcp.save({"app": DcpState(model)}, checkpoint_id=tmp_path, planner=planner)


def test_load_from_another_checkpoint(tmp_path):
    model, optimizers = made()
    for name in ("a", "b"):
        save(tmp_path / name, model, optimizers)
    before = contents(model, optimizers)
    state = {"app": DcpState(model, optimizers, load_from=tmp_path / "a")}
    with pytest.raises(CheckpointError, match=r"/a: is load_from, and .* read another"):
        dcp.load(state, checkpoint_id=tmp_path / "b")
    assert_equal(contents(model, optimizers), before)


def test_nothing_there(tmp_path):
    model, _ = made()
    with pytest.raises(CheckpointError, match=r"none: is no checkpoint of torch\.distributed"):
        load(tmp_path / "none", model)
    dcp.save({"model": torch.nn.Linear(2, 2).state_dict()}, checkpoint_id=tmp_path / "other")
    with pytest.raises(CheckpointError, match="other: has nothing that a DcpState has saved"):
        load(tmp_path / "other", model)


def test_other_entries_whose_names_end_alike(tmp_path):
    other = {"my_sparsekit_format": torch.ones(1)}
    dcp.save({"app": DcpState(Model())} | other, checkpoint_id=tmp_path)
    dcp.load({"app": DcpState(Model(), load_from=tmp_path)} | other, checkpoint_id=tmp_path)


def test_several_states(tmp_path):
    models = {name: Model().users for name in ("one", "two")}
    for number, layer in enumerate(models.values()):
        keys = torch.arange(4, 6 + number)
        layer.assign(keys, torch.full((len(keys), 8), float(number)))
    dcp.save({name: DcpState(m) for name, m in models.items()}, checkpoint_id=tmp_path)
    other = Model().users
    with pytest.raises(CheckpointError, match=r"several.*: 'one', 'two'; pass name="):
        load(tmp_path, other)
    with pytest.raises(CheckpointError, match="no DcpState has saved as 'three', but as 'one'"):
        load(tmp_path, other, name="three")
    for number, name in enumerate(models):
        state = {name: DcpState(other, load_from=tmp_path, name=name)}
        dcp.load(state, checkpoint_id=tmp_path)
        assert other.vectors(torch.tensor([5])).tolist() == [[number] * 8]


def test_a_reader(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    save(tmp_path, model, optimizers)
    loaded, of_loaded = made(seed=2)
    reader = dcp.FileSystemReader(tmp_path)
    dcp.load(
        {"app": DcpState(loaded, of_loaded, load_from=reader)},
        storage_reader=reader,
    )
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


@pytest.mark.parametrize("name", [None, ""])
def test_a_state_that_is_all_that_was_saved(tmp_path, name):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    dcp.save(DcpState(model, optimizers).state_dict(), checkpoint_id=tmp_path)
    loaded, of_loaded = made(seed=2)
    state = DcpState(loaded, of_loaded, load_from=tmp_path, name=name)
    entries = state.state_dict()
    dcp.load(entries, checkpoint_id=tmp_path)
    state.load_state_dict(entries)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


class Unnamed(dcp.FileSystemReader):
    """Reader of a storage that has no paths."""

    @property
    def checkpoint_id(self):
        raise AttributeError


def test_errors_name_the_path_or_the_kind_of_reader(tmp_path):
    dcp.save({"app": {"x": torch.ones(1)}}, checkpoint_id=tmp_path)
    for load_from, said in (
        (tmp_path, tmp_path), (str(tmp_path), tmp_path), (dcp.FileSystemReader(tmp_path), tmp_path),
        (Unnamed(tmp_path), "Unnamed"),
    ):  # fmt: skip
        state = DcpState(Model(), load_from=load_from)
        with pytest.raises(CheckpointError, match=f"^{said}: has nothing that a DcpState"):
            state.state_dict()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_in_the_background(tmp_path, kind):
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store"
    )
    try:
        model, optimizers = made()
        train(model, optimizers, 0, 2)
        before = contents(model, optimizers)
        found = dcp.async_save(
            {"app": DcpState(model, optimizers)},
            checkpoint_id=tmp_path / "a",
            async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType(kind),
        )
        train(model, optimizers, 2, 6)
        found.result()
        loaded, of_loaded = made(seed=2)
        load(tmp_path / "a", loaded, of_loaded)
        assert_equal(contents(loaded, of_loaded), before)
        state = {"app": DcpState(model, optimizers, load_from=tmp_path / "a")}
        with pytest.raises(CheckpointException, match=r"nothing to save before it has"):
            dcp.async_save(state, checkpoint_id=tmp_path / "b").result()
    finally:
        torch.distributed.destroy_process_group()


def test_notes_that_do_not_belong_together(tmp_path):
    states = [DcpState(Model()).state_dict() for _ in range(2)]
    notes = [state["notes"]["0000"] for state in states]
    mixed = [{"0000": notes[0], "0001": notes[1]}, {"0000": notes[0][1:]}, {}]
    for number, own in enumerate(mixed):
        path = tmp_path / str(number)
        dcp.save({"app": states[0] | {"notes": own}}, checkpoint_id=path)
        with pytest.raises(CheckpointError, match=rf"{path}: is damaged: notes of ranks"):
            load(path, Model())


def of_users(**changes):
    """Return a function that changes the entry of the table `users` in a note."""
    return lambda note: note["tables"]["users"].update(changes)


ODD_NOTES = {
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"5",
    "an empty one": b"{}",
    "a deep one": b"[" * 100_000,
    "another rank": lambda note: note.update(rank=1),
    "more ranks": lambda note: note.update(world_size=2),
    "no id": lambda note: note.pop("id"),
    "an odd id": lambda note: note.update(id="x"),
    "odd tables": lambda note: note.update(tables=5),
    "an odd table": lambda note: note["tables"].update(users=5),
    "an odd shard": of_users(shard={}),
    "odd states": of_users(states=5),
    "an odd state": of_users(states={"x": {}}),
    "an odd dim": of_users(dim=-1),
    "odd optimizers": lambda note: note.update(optimizers=5),
    "odd files": lambda note: note.update(files=[]),
    "an odd state of the rank": lambda note: note.update(rank_state=5),
}


@pytest.mark.parametrize("kind", ODD_NOTES)
def test_odd_notes(tmp_path, kind):
    state, change = DcpState(Model()).state_dict(), ODD_NOTES[kind]
    if callable(change):
        note = json.loads(bytes(state["notes"]["0000"].numpy()))
        change(note)
        change = json.dumps(note).encode()
    state["notes"] = {"0000": torch.frombuffer(bytearray(change), dtype=torch.uint8)}
    dcp.save({"app": state}, checkpoint_id=tmp_path)
    said = rf"{tmp_path}(: is damaged: notes of ranks|/notes: )"
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, Model())


def test_odd_names_of_notes_and_an_odd_format(tmp_path):
    state = DcpState(Model()).state_dict()
    odd = {
        "notes of ranks x, 0000": {"notes": {"x": state["notes"]["0000"], **state["notes"]}},
        r"sparsekit_format has shape \[2\]": {"sparsekit_format": torch.tensor([1, 1])},
        r"sparsekit_format has shape \[\]": {"sparsekit_format": torch.tensor(1)},
    }
    for number, (said, change) in enumerate(odd.items()):
        path = tmp_path / str(number)
        dcp.save({"app": state | change}, checkpoint_id=path)
        with pytest.raises(CheckpointError, match=f"{path}: is damaged: {said}"):
            load(path, Model())


def test_notes_are_in_the_order_of_ranks(tmp_path):
    """Notes are sorted by rank as a number, even if their names differ in length."""
    module = torch.nn.Linear(1, 1)
    state, notes = DcpState(module).state_dict(), {}
    note = json.loads(bytes(state["notes"]["0000"].numpy())) | {"world_size": 2}
    for rank, name in enumerate(("9", "10")):
        text = bytearray(json.dumps(note | {"rank": rank}).encode())
        notes[name] = torch.frombuffer(text, dtype=torch.uint8)
    state |= {"notes": notes, "rank-0001": state["rank-0000"]}
    dcp.save({"app": state}, checkpoint_id=tmp_path)
    loaded = torch.nn.Linear(1, 1)
    load(tmp_path, loaded)
    assert torch.equal(loaded.weight, module.weight)


def test_what_torch_has_read_is_compared_with_what_is_there(tmp_path):
    model = Model()
    save(tmp_path, model)
    state = DcpState(model, load_from=tmp_path)
    (note,) = DcpSource(tmp_path, None)._notes.values()
    for notes in ({}, {"0000": note, "0001": note}, {"0001": note}, {"0000": note + 1}, None):
        state.state_dict()
        with pytest.raises(CheckpointError, match="has read another"):
            state.load_state_dict({} if notes is None else {"notes": notes})
    state.load_state_dict({"notes": {"0000": note}})


def test_parts_that_are_not_as_their_note_says(tmp_path):
    model = Model()
    model.users.assign(torch.arange(9), torch.rand(9, 8))
    state = DcpState(model).state_dict()
    state["table-0000-rank-0000"]["vectors"] = torch.rand(8, 8)
    dcp.save({"app": state}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"table-0000-rank-0000: is damaged: vectors should"):
        load(tmp_path, Model())
    path = tmp_path / "format"
    dcp.save({"app": state | {"sparsekit_format": "no tensor"}}, checkpoint_id=path)
    with pytest.raises(CheckpointError, match=rf"{path}: app\.sparsekit_format cannot be read"):
        load(path, Model())


def test_keys_and_rows_in_many_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsekit.checkpoint.snapshot._KEYS", 7)
    monkeypatch.setattr("sparsekit.checkpoint.table_files.PIECE", 100)
    model, optimizers = made()
    train(model, optimizers, 0, 5)
    save(tmp_path, model, optimizers)
    loaded, of_loaded = made(seed=1)
    load(tmp_path, loaded, of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_what_was_read_goes_with_the_part(tmp_path):
    save(tmp_path, Model())
    with DcpSource(tmp_path, None).file("table-0001-rank-0000.safetensors") as part:
        read = weakref.ref(part.read("vectors"))
        assert read() is not None
    assert read() is None


def test_damage_is_named(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    save(tmp_path, model, optimizers)
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    before = contents(model, optimizers)
    for cut in (0, len(content) // 2):
        file.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=rf"{tmp_path}: app\.\S+ cannot be read"):
            load(tmp_path, model, optimizers)
    file.unlink()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: app\.\S+ cannot be read"):
        load(tmp_path, model, optimizers)
    assert_equal(contents(model, optimizers), before)


def test_a_newer_format(tmp_path, monkeypatch):
    model, _ = made()
    with monkeypatch.context() as patch:
        patch.setattr("sparsekit.checkpoint.dcp.VERSION", 2)
        save(tmp_path, model)
    with pytest.raises(CheckpointError, match="its format is 2, and this one reads 1"):
        load(tmp_path, model)


def test_what_cannot_be_saved(tmp_path):
    class Odd:
        def state_dict(self):
            return {"set": {1, 2}}

    with pytest.raises(CheckpointError, match=r"state\.odd\.set: .* no set"):
        save(tmp_path, Model(), state={"odd": Odd()})
    layer = sparsekit.Embedding(10, 4, device="meta")
    with pytest.raises(RuntimeError, match="the layer is on meta"):
        save(tmp_path, layer)


def test_torch_save_of_the_state_dict_goes_on(tmp_path):
    """On one rank, torch.save still saves a state_dict, and it loads at a different capacity."""
    model, optimizers = made()
    train(model, optimizers, 0, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizers[0].state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    loaded, of_loaded = made(capacity=2000, seed=1)
    loaded.load_state_dict(states[0])
    of_loaded[0].load_state_dict(states[1])
    found, expected = contents(loaded, of_loaded), contents(model, optimizers)
    for name in expected:
        if name.startswith(("users ", "rows ")):
            used = len(expected[name]) if expected[name].dim() else None
            assert torch.equal(found[name][:used] if used else found[name], expected[name]), name


def test_marked_tensors_refuse_what_they_are_not_for():
    tensor = torch.zeros(1)
    saved, loaded = tensor.as_subclass(ToSave), ToLoad.of(tensor, "there")
    with pytest.raises(CheckpointError, match=r"pass DcpState\(\.\.\., load_from=path\)"):
        saved.__create_chunk_list__()
    with pytest.raises(CheckpointError, match="a planner with flatten_state_dict=True"):
        saved.__reduce_ex__(2)
    with pytest.raises(CheckpointError, match=r"^x: a DcpState with load_from='there' has nothing"):
        loaded.__create_write_items__("x", None)
    assert type(loaded.new_empty(2, dtype=torch.int8)) is ToLoad
