"""A load that fails changes nothing and raises a documented error."""

import json
import os
import shutil
import struct
import zlib

import pytest
import torch
from peak_memory import forget_peak, peak

import sparsekit
from sparsekit import checkpoint, optim
from sparsekit.checkpoint import CheckpointError, Checkpoints
from sparsekit.checkpoint.encoding import MOST_NESTED
from sparsekit.checkpoint.manifest_file import read_manifest

from .models import assert_equal, contents, made, train
from .mutations import damaged, mutated, seeds, time_limit
from .test_damage import rewritten


class Note:
    """Object with a state; it loads any state, or raises if `refuses` is set."""

    def __init__(self, value, refuses=False):
        self.value, self.refuses = value, refuses

    def state_dict(self):
        return {"value": self.value, "tensor": torch.ones(3)}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("another file than this state is of")
        self.value = state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a complete and an incremental checkpoint; return the folder."""
    folder = tmp_path_factory.mktemp("refusals")
    model, optimizers = made(capacity=64, rows=600)
    keep = Checkpoints(folder, complete_every=2)
    for step in range(2):
        model.users.assign(torch.arange(20 * step, 20 * step + 25), torch.rand(25, 8))
        train_rows(model, optimizers)
        keep.save(step, model, optimizers, state={"note": Note(5)})
    keep.close()
    return folder


def train_rows(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    score = (
        model.users(torch.arange(10).view(10, 1, 1)).sum()
        + model.rows(torch.arange(40).view(40, 1, 1)).sum()
    )
    (score + sum(p.sum() for p in model.top.parameters())).backward()
    for optimizer in optimizers:
        optimizer.step()


def odd_checkpoint(folder, chance):
    """Make a random change in one of the two checkpoints, and update the checksums affected."""
    step = folder / f"step-{chance.randrange(2):012d}"
    kind = chance.choice(["manifest"] * 4 + ["header"] * 2 + ["keys"] * 2 + ["cut", "bytes"])
    if kind == "manifest":
        part = chance.choice(["tables", "optimizers", "ranks", "files", None, None])

        def change(values):
            if part is None:
                return replace_all(values, mutated(values, chance))
            values[part] = mutated({"": values[part]}, chance).get("", values[part])

        rewritten(step, change)
        return
    files = sorted(step.glob("*.safetensors"))
    file = chance.choice([f for f in files if kind != "keys" or f.name.startswith("table")])
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    if kind == "header":
        text = json.dumps(mutated({"": header or {"x": {}}}, chance).get("", [])).encode()
        content = struct.pack("<Q", len(text)) + text + content[8 + length :]
    elif kind == "keys":
        begin, end = (8 + length + at for at in header["keys"]["data_offsets"])
        keys = list(struct.unpack(f"<{(end - begin) // 8}q", content[begin:end]))
        if keys:
            odd = [keys[0], -1, 2**62, -(2**63), 699, 10**6]
            keys[chance.randrange(len(keys))] = chance.choice(odd)
        content = content[:begin] + struct.pack(f"<{len(keys)}q", *keys) + content[end:]
    else:
        content = (
            content[: chance.randrange(len(content))] if kind == "cut" else damaged(content, chance)
        )
    file.write_bytes(content)

    def as_written(values):
        crc = f"{zlib.crc32(content):08x}"
        values["files"][file.name] = {"bytes": len(content), "crc32": crc}

    rewritten(step, as_written)


def replace_all(values, others):
    values.clear()
    values.update(others)


def named(folder, error):
    assert str(folder) in str(error), error


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


@time_limit
def test_odd_checkpoints_are_loaded_and_resharded_or_refused(saved, tmp_path):
    """A failure changes nothing and leaves no file. A huge size in a file allocates no memory."""
    results = dict.fromkeys(["load", "no load", "reshard", "no reshard"], 0)
    model, optimizers, note = None, [], Note(0)
    files, before = open_files(), forget_peak()
    for number, chance in enumerate(seeds()):
        if model is None:
            model, optimizers = made(capacity=64, rows=700, hash_table=number % 2 == 0)
            train_rows(model, optimizers)
            earlier, random_numbers = contents(model, optimizers), torch.get_rng_state()
            note.value = 0
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        odd_checkpoint(folder, chance)
        newest = folder / "step-000000000001"
        try:
            checkpoint.load(model, newest, optimizers, state={"note": note})
            results["load"] += 1
            train_rows(model, optimizers[:1])  # the loaded model can be trained
            model = None
        except CheckpointError as error:
            results["no load"] += 1
            named(folder, error)
            assert_equal(contents(model, optimizers), earlier)
            assert torch.equal(torch.get_rng_state(), random_numbers)
            assert note.value == 0
        try:
            checkpoint.reshard(newest, folder / "out", 1 + number % 3)
            results["reshard"] += 1
            read_manifest(folder / "out")
        except CheckpointError as error:
            results["no reshard"] += 1
            named(folder, error)
            assert not (folder / "out").exists()
        left = {path.name for path in folder.iterdir()}
        assert left - {"out", ".lock"} == {"step-000000000000", "step-000000000001"}
        assert open_files() == files
        shutil.rmtree(folder)
    assert peak() - before < 100 << 20
    print(results)
    assert min(results.values()) > 0, results


class OfInt32(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.ids = sparsekit.Embedding(9, 2, name="ids", key_dtype=dtype)
        self.top = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("key", [2**31, -(2**31) - 1])
def test_keys_that_an_int32_layer_cannot_be_asked_for(tmp_path, monkeypatch, key):
    monkeypatch.setattr("sparsekit.checkpoint.table_files.PIECE", 16)  # two keys
    wide, narrow = OfInt32(torch.int64), OfInt32(torch.int32)
    keys = torch.tensor([2**31 - 1, -(2**31), 7])
    wide.ids.assign(keys, torch.rand(3, 2))
    checkpoint.save(wide, tmp_path / "fits")
    checkpoint.load(narrow, tmp_path / "fits")
    vectors = narrow.ids.vectors(keys.to(torch.int32))
    assert torch.equal(vectors, wide.ids.vectors(keys))
    wide.ids.assign(torch.tensor([5, key]), torch.rand(2, 2))
    checkpoint.save(wide, tmp_path / "wide")
    before = {name: value.clone() for name, value in narrow.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"table ids: key {key} of row 4 is no int32"):
        checkpoint.load(narrow, tmp_path / "wide")
    assert all(torch.equal(value, before[name]) for name, value in narrow.state_dict().items())


def test_an_object_that_refuses_its_state(saved):
    model, optimizers = made(capacity=64)
    before = contents(model, optimizers)
    with pytest.raises(ValueError, match="another file"):
        checkpoint.load(model, saved, optimizers, state={"note": Note(1, refuses=True)})
    assert_equal(contents(model, optimizers), before)


@pytest.mark.parametrize("nested", [MOST_NESTED - 3, MOST_NESTED - 2, MOST_NESTED + 1])
def test_a_state_is_as_deep_when_saved_as_when_loaded(tmp_path, nested):
    """Any state that can be saved can be loaded; the save raises if a state is too deep."""
    state = 1
    for _ in range(nested):
        state = (state,)
    note = Note(state)
    if nested > MOST_NESTED - 3:
        with pytest.raises(CheckpointError, match="nested"):
            checkpoint.save(torch.nn.Linear(1, 1), tmp_path / "a", state={"note": note})
        assert os.listdir(tmp_path) == []
        return
    checkpoint.save(torch.nn.Linear(1, 1), tmp_path / "a", state={"note": note})
    loaded = Note(0)
    checkpoint.load(torch.nn.Linear(1, 1), tmp_path / "a", state={"note": loaded})
    assert loaded.value["value"] == state


def test_what_a_manifest_cannot_have_is_not_saved(tmp_path):
    for module, match in (
        (torch.nn.ModuleDict({"t" * 1001: sparsekit.Embedding(9, 2, name="t")}), "name of a table"),
        (torch.nn.ModuleDict({"t": sparsekit.Embedding(9, 2, name="t" * 1001)}), "layer must be"),
    ):
        with pytest.raises(CheckpointError, match=match):
            checkpoint.save(module, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_settings_of_another_kind_are_refused(tmp_path):
    """A load refuses settings that torch's optimizer would accept but fail on in its next step."""
    model, optimizers = made()
    train(model, optimizers, 0, 1)
    checkpoint.save(model, tmp_path / "a", optimizers)
    for number, name, value in ((1, "lr", "fast"), (1, "betas", [0.9]), (0, "lr", -1.0)):

        def change(values, number=number, name=name, value=value):
            values["optimizers"][number]["groups"][0][name] = value

        folder = tmp_path / f"{number}{name}"
        shutil.copytree(tmp_path / "a", folder)
        rewritten(folder, change)
        with pytest.raises(CheckpointError, match=f"optimizers: .*{name}"):
            checkpoint.load(model, folder, optimizers)


def test_states_of_another_optimizer_of_that_name(tmp_path):
    """A load raises before any change if the saved states do not fit the saved settings."""
    model = OfInt32(torch.int64)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.top(model.ids(torch.arange(3))).sum().backward()
    optimizer.step()
    checkpoint.save(model, tmp_path / "a", optimizer)
    rewritten(tmp_path / "a", lambda v: v["optimizers"][0]["groups"][0].update(momentum=0.0))
    with torch.no_grad():
        model.top.bias += 1
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="table ids: SGD keeps"):
        checkpoint.load(model, tmp_path / "a", optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_key_that_is_there_twice_in_another_kind_of_table(tmp_path):
    """A repeated key is refused even where the layer and the file order their rows differently."""
    model = OfInt32(torch.int64)
    model.ids.assign(torch.arange(5), torch.rand(5, 2))
    checkpoint.save(model, tmp_path / "a")
    file = tmp_path / "a" / "table-0000-rank-0000.safetensors"
    content = file.read_bytes().replace(struct.pack("<2q", 3, 4), struct.pack("<2q", 3, 3))
    file.write_bytes(content)
    entry = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    rewritten(tmp_path / "a", lambda values: values["files"].update({file.name: entry}))
    plain = torch.nn.ModuleDict({"ids": sparsekit.Embedding(9, 2, name="ids", use_hashtable=False)})
    before = plain["ids"].weight.detach().clone()
    with pytest.raises(CheckpointError, match="should have 5 rows, and has 4 keys: a key is there"):
        checkpoint.load(plain, tmp_path / "a", strict=False)
    assert torch.equal(plain["ids"].weight, before)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (3, 77, "should have 6 rows, and has 7 keys: keys are missing in its base$"),
        (4, 5, "should have 6 rows, and has 5 keys: keys are missing in its base, or one is there"),
    ],
    ids=["too many keys", "too few"],
)
def test_a_base_with_other_keys_than_those_that_its_changes_are_of(tmp_path, old, new, said):
    model = OfInt32(torch.int64)
    keep = Checkpoints(tmp_path, complete_every=2)
    model.ids.assign(torch.arange(5), torch.rand(5, 2))
    keep.save(0, model)
    model.ids.assign(torch.tensor([3, 5]), torch.rand(2, 2))
    keep.save(1, model)
    base = tmp_path / "step-000000000000"
    file = base / "table-0000-rank-0000.safetensors"
    content = file.read_bytes()
    at = content.index(struct.pack("<5q", *range(5))) + 8 * old
    content = content[:at] + struct.pack("<q", new) + content[at + 8 :]
    file.write_bytes(content)
    entry = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    rewritten(base, lambda values: values["files"].update({file.name: entry}))
    with pytest.raises(CheckpointError, match=f"step-000000000001: table ids {said}"):
        keep.load(model)
