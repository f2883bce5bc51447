"""`forget` leaves nothing of a key in any file, and all else as it was."""

import os
import shutil

import pytest
import torch

from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, Checkpoints, draft
from sparsekit.checkpoint.manifest_file import read_manifest

from .evicting import made, state_of, train
from .models import assert_equal
from .models import made as model_of
from .models import train as train_model
from .test_crashes import held_up


def chain_in(folder, steps=10, score="lru", complete_every=999):
    """Save a chain over a run that evicts; return the layer, optimizer, and state at each step."""
    layer, optimizer = made(score)
    keep, states = Checkpoints(folder, complete_every=complete_every, keep=999), []
    for step in range(steps):
        train(layer, optimizer, step, step + 1)
        keep.save(step, layer, optimizer)
        states.append(state_of(layer, optimizer))
    keep.close()
    return layer, optimizer, states


def row_bytes(states, key):
    """Return the bytes of everything that a row has ever had, but single numbers."""
    found = set()
    for state in states:
        for row in (state["keys"] == key).nonzero().flatten().tolist():
            columns = (state[n][row] for n in state if state[n].dim() == 2 and n != "counts")
            found |= {column.numpy().tobytes() for column in columns if column.any()}
    return found


def scan(folder, texts):
    """Return the texts that are in some file in a folder."""
    contents = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return {text for text in texts if text in contents}


def without(state, keys):
    stay = ~torch.isin(state["keys"], torch.tensor(keys))
    rows = len(state["keys"])
    found = {
        name: value[stay] if value.dim() and len(value) == rows and name != "clock" else value
        for name, value in state.items()
    }
    if "counts" in state:
        counts = state["counts"]
        found["counts"] = counts[~torch.isin(counts[:, 0], torch.tensor(keys))]
    return found


def loaded_state(path, score="lru"):
    layer, optimizer = made(score, seed=9)
    checkpoint.load(layer, path, optimizer)
    return state_of(layer, optimizer)


def some_keys(states):
    """Return keys of every kind: early and gone, gone in the middle, there to the end, new."""
    ever = sorted({key for state in states for key in state["keys"].tolist()})
    lives = {key: [key in state["keys"].tolist() for state in states] for key in ever}
    kinds = {}
    for key, life in lives.items():
        kinds.setdefault((life[0], life[-1], life[len(life) // 2]), key)
    assert len(kinds) >= 3
    return sorted(kinds.values())


def test_counts_of_keys_that_wait_go_too(tmp_path):
    *_, states = chain_in(tmp_path, score="admission")
    waiting = states[-1]["counts"][:, 0]
    first = states[0]["counts"][:, 0]
    keys = [int(waiting[-1]), int(first[torch.isin(first, waiting, invert=True)][0])]
    assert int(waiting[-1]) not in states[-1]["keys"].tolist()
    checkpoint.forget(tmp_path, keys)
    for step, state in enumerate(states):
        path = tmp_path / f"step-{step:012d}"
        assert_equal(loaded_state(path, "admission"), without(state, keys))
        assert path in checkpoint.verify(path)
    texts = {torch.tensor([key, count]).numpy().tobytes() for key in keys for count in (1, 2, 3)}
    assert scan(tmp_path, texts) == set()
    assert checkpoint.forget(tmp_path, keys) == 0


def test_a_key_that_has_only_waited(tmp_path):
    """Files of changes are rewritten for its counts alone, and still list all removed keys."""
    *_, states = chain_in(tmp_path, score="admission")
    with_rows = set().union(*(state["keys"].tolist() for state in states))
    waiting = [key for key in states[-1]["counts"][:, 0].tolist() if key not in with_rows]
    tables = [read_manifest(path).tables["table"] for path in sorted(tmp_path.glob("step-*"))]
    removed = [table.shards[0].removed for table in tables]
    assert sum(removed) > 10
    assert checkpoint.forget(tmp_path, waiting[:1]) == 0
    tables = [read_manifest(path).tables["table"] for path in sorted(tmp_path.glob("step-*"))]
    assert [table.shards[0].removed for table in tables] == removed
    for step, state in enumerate(states):
        found = loaded_state(tmp_path / f"step-{step:012d}", "admission")
        assert_equal(found, without(state, waiting[:1]))


@pytest.mark.parametrize("score", ["lru", "lfu", "admission"])
@pytest.mark.parametrize("complete_every", [1, 4, 999])
def test_no_file_has_anything_of_the_keys(tmp_path, score, complete_every):
    *_, states = chain_in(tmp_path, score=score, complete_every=complete_every)
    keys = some_keys(states)
    texts = set.union(*(row_bytes(states, key) for key in keys))
    others = set.union(*(row_bytes(states[-1:], key) for key in states[-1]["keys"][:20].tolist()))
    others -= texts
    assert scan(tmp_path, texts) == texts
    rows = checkpoint.forget(tmp_path, torch.tensor([*keys, *keys, 12345]))
    assert rows >= len(keys)
    assert scan(tmp_path, texts) == set()
    assert scan(tmp_path, others) == others
    for step, state in enumerate(states):
        path = tmp_path / f"step-{step:012d}"
        assert_equal(loaded_state(path, score), without(state, keys))
        assert path in checkpoint.verify(path)
    assert sorted(os.listdir(tmp_path)) == [".lock", *(f"step-{i:012d}" for i in range(10))]
    assert checkpoint.forget(tmp_path, keys) == 0


def test_a_key_that_is_nowhere_changes_nothing(tmp_path):
    chain_in(tmp_path, steps=3)
    before = {path: os.stat(path).st_ino for path in tmp_path.rglob("*")}
    assert checkpoint.forget(tmp_path, torch.tensor([12345], dtype=torch.int32)) == 0
    assert checkpoint.forget(tmp_path, []) == 0
    assert {path: os.stat(path).st_ino for path in tmp_path.rglob("*")} == before


def test_one_checkpoint_and_its_chain(tmp_path):
    """Checkpoints that share nothing with it stay as they are."""
    *_, states = chain_in(tmp_path, steps=6, complete_every=3)
    key = next(k for k in states[5]["keys"].tolist() if k in states[0]["keys"].tolist())
    before = {path: os.stat(path).st_ino for path in tmp_path.rglob("*.safetensors")}
    assert checkpoint.forget(tmp_path / "step-000000000001", [key]) > 0
    for step, state in enumerate(states):
        expected = without(state, [key]) if step < 3 else state
        assert_equal(loaded_state(tmp_path / f"step-{step:012d}"), expected)
    for path, inode in before.items():
        kept = "table" not in path.name or int(path.parent.name[-1]) >= 3
        assert (os.stat(path).st_ino == inode) == kept
    alone = checkpoint.save(made()[0], tmp_path / "alone")
    assert checkpoint.forget(alone, [key]) == 0


def test_a_neighbour_whose_chain_cannot_be_read(tmp_path):
    """It may follow the checkpoint and have the keys, so that it must not be passed over."""
    *_, states = chain_in(tmp_path, steps=3)
    manifest = tmp_path / "step-000000000002" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    key = int(states[0]["keys"][0])
    with pytest.raises(CheckpointError, match=f"{manifest}: "):
        checkpoint.forget(tmp_path / "step-000000000000", [key])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_some_tables_of_several(tmp_path):
    model, optimizers = model_of(hash_table=False)
    train_model(model, optimizers, 0, 2)
    checkpoint.save(model, tmp_path / "a", optimizers)
    key = int(model.users.table.keys()[0])
    with pytest.raises(ValueError, match=r"no table named x; tables: users, rows$"):
        checkpoint.forget(tmp_path / "a", [key], "x")
    with pytest.raises(ValueError, match="table rows has no hash table"):
        checkpoint.forget(tmp_path / "a", [0], "rows")
    assert checkpoint.forget(tmp_path / "a", [key, 0]) == 1 + (0 in model.users.table.keys() != 0)
    loaded, of_loaded = model_of(hash_table=False, seed=1)
    checkpoint.load(loaded, tmp_path / "a", of_loaded)
    assert torch.equal(loaded.rows.weight, model.rows.weight)
    assert sorted([*loaded.users.table.keys().tolist(), key]) == sorted(
        model.users.table.keys().tolist()
    )


def test_it_raises_before_anything_is_changed(tmp_path):
    chain_in(tmp_path, steps=3)
    file = tmp_path / "step-000000000001" / "table-0000-rank-0000.safetensors"
    content = file.read_bytes()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(TypeError, match=r"forget: keys must be int64 or int32, got torch.float32"):
        checkpoint.forget(tmp_path, torch.tensor([0.5]))
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"{file}: is damaged"):
        checkpoint.forget(tmp_path, [0])
    file.write_bytes(content)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for nothing in (tmp_path / "none", tmp_path / "step-000000000001" / "none"):
        with pytest.raises(CheckpointError, match="none: has no checkpoints"):
            checkpoint.forget(nothing, [0])


def test_what_killed_saves_have_left_goes_too(tmp_path):
    *_, states = chain_in(tmp_path, steps=2)
    key = int(states[1]["keys"][0])
    left = tmp_path / f".step-000000000002.part-{'0' * 32}"
    shutil.copytree(tmp_path / "step-000000000001", left)
    (left / ".writer").touch()
    checkpoint.forget(tmp_path, [key])
    assert not left.exists()
    assert scan(tmp_path, row_bytes(states, key)) == set()


def test_a_save_in_the_background_is_waited_for(tmp_path, monkeypatch):
    layer, optimizer = made()
    keep = Checkpoints(tmp_path)
    keep.save(0, layer, optimizer)
    train(layer, optimizer, 0, 1)
    key = int(layer.table.keys()[0])
    with held_up(monkeypatch):
        keep.async_save(1, layer, optimizer)
        with pytest.raises(CheckpointError, match="is being written; wait until the save"):
            checkpoint.forget(tmp_path, [key])
    keep.wait()
    assert checkpoint.forget(tmp_path, [key]) == 1
    keep.close()


def test_a_run_that_goes_on_writes_all_rows_first(tmp_path):
    """The rows that it remembers may be gone from the files."""
    layer, optimizer = made()
    keep = Checkpoints(tmp_path, complete_every=999)
    train(layer, optimizer, 0, 3)
    keep.save(0, layer, optimizer)
    kept, erased = layer.table.keys()[:2].tolist()
    checkpoint.forget(tmp_path, [kept, erased])
    layer.erase(torch.tensor([erased]))
    for step in (1, 2):
        path = keep.save(step, layer, optimizer)
        assert read_manifest(path).tables["table"].complete == (step == 1)
        assert_equal(loaded_state(path), state_of(layer, optimizer))
    keep.close()


class Killed(BaseException):
    pass


def test_a_crash_at_any_moment_leaves_a_chain_that_loads(tmp_path, monkeypatch):
    """Each checkpoint is as before or without the keys, and a second call ends the work."""
    *_, states = chain_in(tmp_path / "a", steps=6)
    keys = some_keys(states)
    texts = set.union(*(row_bytes(states, key) for key in keys))
    calls = iter(())

    def dies(function):
        def call(*arguments):
            if next(calls, None) == 0:
                raise Killed
            return function(*arguments)

        return call

    for where, name in ((draft.os, "rename"), (draft, "exchange"), (draft.os, "link")):
        monkeypatch.setattr(where, name, dies(getattr(where, name)))
    monkeypatch.setattr(draft.Draft, "end", dies(draft.Draft.end))
    died = 0
    for moment in range(0, 27, 3):
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "a", folder)
        calls = iter(range(moment, -1, -1))
        try:
            checkpoint.forget(folder, keys)
        except Killed:
            died += 1
        calls = iter(())
        for step, state in enumerate(states):
            found = loaded_state(folder / f"step-{step:012d}")
            rest = without(state, keys)
            whole = len(found["keys"]) == len(state["keys"])
            assert_equal(found, state if whole else rest)
        checkpoint.forget(folder, keys)
        assert scan(folder, texts) == set()
        for step, state in enumerate(states):
            assert_equal(loaded_state(folder / f"step-{step:012d}"), without(state, keys))
        shutil.rmtree(folder)
    assert died > 5
