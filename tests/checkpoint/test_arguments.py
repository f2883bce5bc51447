"""Check that functions and classes that save or load honour all their arguments."""

import gc
import os
import threading
import weakref

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, Checkpoints, background
from sparsekit.checkpoint.manifest_file import read_manifest

from .models import assert_equal, contents, made, saved_chain, train
from .test_refusals import Note

SAVES = {
    "save": lambda path, step, *a, **k: checkpoint.save(*a, **k, step=step),
    "async_save": lambda path, step, *a, **k: checkpoint.async_save(*a, **k, step=step).wait(),
    "Checkpoints.save": lambda path, step, model, _, *a, **k: Checkpoints(path).save(
        step, model, *a, **k
    ),
    "Checkpoints.async_save": lambda path, step, model, _, *a, **k: (
        Checkpoints(path).async_save(step, model, *a, **k).wait()
    ),
}


@pytest.mark.parametrize("way", SAVES)
def test_all_that_is_given_is_saved(tmp_path, way):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    state = {"note": Note(5), "other": Note("six")}
    path = SAVES[way](tmp_path, 7, model, tmp_path / "a", optimizers, state=state)
    loaded, of_loaded = made(seed=1)
    state = {"note": Note(0), "other": Note(0)}
    assert checkpoint.load(loaded, path, of_loaded, state=state).step == 7
    assert [each.value["value"] for each in state.values()] == [5, "six"]
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_paths_may_be_texts_and_relative(tmp_path, monkeypatch):
    """Results are absolute paths, since the program may change its working directory."""
    layer = sparsekit.Embedding(9, 2, name="ids")
    layer.assign(torch.arange(3), torch.ones(3, 2))
    monkeypatch.chdir(tmp_path)
    keep = Checkpoints("run")
    written = {
        "run/step-000000000001": lambda: keep.save(1, layer),
        "run/step-000000000002": lambda: keep.async_save(2, layer).wait(),
        "a": lambda: checkpoint.save(layer, "a"),
        "b": lambda: checkpoint.async_save(layer, "b").wait(),
        "c": lambda: checkpoint.reshard("a", "c", 1),
        "d": lambda: checkpoint.export("a", "d", "npz"),
        "e": lambda: checkpoint.import_tables(checkpoint.sources_of("npz", "d"), "e"),
    }
    for name, write in written.items():
        assert write() == tmp_path / name
    assert keep.latest() == tmp_path / "run/step-000000000002"
    assert checkpoint.latest("run").name == "step-000000000002"
    assert checkpoint.load(layer, "run").step == 2
    assert [path.name for path in checkpoint.verify("run")] == ["step-000000000002"]
    assert not checkpoint.diff("a", "run")
    saving = keep.async_save(3, layer)
    monkeypatch.chdir("/")
    assert saving.wait() == tmp_path / "run/step-000000000003"
    keep.close()


def load_latest(model, path, *arguments, **options):
    return Checkpoints(path).load(model, *arguments, **options)


@pytest.mark.parametrize("load", [checkpoint.load, load_latest], ids=["load", "Checkpoints.load"])
def test_each_option_of_a_load_is_for_what_it_says(tmp_path, load):
    model, optimizers = made()
    Checkpoints(tmp_path).save(7, model, optimizers, state={"note": Note(5)})
    narrow = made(dtype=torch.bfloat16)[0]
    with pytest.raises(CheckpointError, match="pass cast=True"):
        load(narrow, tmp_path, strict=False)
    found = load(narrow, tmp_path, cast=True)
    assert (found.step, found.missing, found.unexpected) == (7, [], [])
    fewer = torch.nn.ModuleDict({"users": made()[0].users, "new": torch.nn.Linear(1, 1)})
    with pytest.raises(CheckpointError, match="pass strict=False"):
        load(fewer, tmp_path, cast=True)
    found = load(fewer, tmp_path, strict=False)
    assert found.missing == ["new.bias", "new.weight"]
    assert found.unexpected == sorted(
        ["rows", "steps", *(n for n, _ in model.named_parameters() if n.startswith(("top", "out")))]
    )
    state = {"note": Note(0), "unknown": Note(1)}
    with pytest.raises(CheckpointError, match="no state of unknown, but of note"):
        load(model, tmp_path, state=state, cast=True)
    assert state["note"].value == 0
    load(model, tmp_path, state=state, strict=False)
    assert (state["note"].value["value"], state["unknown"].value) == (5, 1)


def test_without_verify_damage_is_loaded(tmp_path):
    model, optimizers = made()
    model.users.assign(torch.arange(3), torch.ones(3, 8))
    path = checkpoint.save(model, tmp_path / "a", optimizers)
    file = path / "table-0000-rank-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x41")  # changes the last byte of the last vector
    with pytest.raises(CheckpointError, match=f"{file}: is damaged"):
        checkpoint.load(model, path, optimizers)
    checkpoint.load(model, path, optimizers, verify=False)
    assert model.users.vectors(torch.arange(3))[2, 7] > 8
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{file}: is damaged"):
        checkpoint.load(model, path, optimizers, verify=False)


@pytest.mark.parametrize("step", [None, 0, 7, 2**63 - 1])
def test_the_step_of_a_save_is_that_of_its_load(tmp_path, step):
    layer = sparsekit.Embedding(9, 2, name="ids")
    path = checkpoint.save(layer, tmp_path / "a", step=step)
    assert checkpoint.load(layer, path).step == read_manifest(path).step == step
    saving = checkpoint.async_save(layer, tmp_path / "b", step=step)
    assert checkpoint.load(layer, saving.wait()).step == step


def test_a_dense_tensor_of_another_shape(tmp_path):
    path = checkpoint.save(torch.nn.Linear(3, 2), tmp_path / "a")
    for other in (torch.nn.Linear(2, 3, bias=False), torch.nn.Linear(3, 1, bias=False)):
        shape = r"\[2, 3\], and \[{}, {}\] in the module".format(*other.weight.shape)
        with pytest.raises(CheckpointError, match=f"^{path}: weight has shape {shape}$"):
            checkpoint.load(other, path, strict=False)


def test_random_numbers_go_on_if_the_number_of_ranks_is_the_same(tmp_path):
    layer = sparsekit.Embedding(9, 2, name="ids")
    torch.manual_seed(5)
    path = checkpoint.save(layer, tmp_path / "one")
    two = checkpoint.reshard(path, tmp_path / "two", 2)
    expected = torch.rand(3)
    torch.manual_seed(6)
    other = torch.rand(3)
    for source, found in ((two, other), (path, expected)):
        torch.manual_seed(6)
        checkpoint.load(layer, source)
        assert torch.equal(torch.rand(3), found)


def test_a_step_of_the_chain_is_not_built_on_when_it_is_saved_again(tmp_path):
    keep, layer = Checkpoints(tmp_path, complete_every=9), sparsekit.Embedding(9, 2, name="ids")
    for step in (0, 1, 1):
        layer.assign(torch.tensor([step]), torch.ones(1, 2))
        path = keep.save(step, layer)
    keep.close()
    assert read_manifest(path).base is None
    assert checkpoint.verify(path) == [path]


def test_three_complete_checkpoints_are_kept_unless_told_otherwise(tmp_path):
    keep, layer = Checkpoints(tmp_path), sparsekit.Embedding(9, 2, name="ids")
    for step in range(5):
        keep.save(step, layer)
    keep.close()
    found = checkpoint.folder.steps_in(tmp_path)
    assert list(found) == [2, 3, 4]
    assert all(read_manifest(path).base is None for path in found.values())


@pytest.mark.parametrize("number", [0, -1, 1.5, True, 2**31])
@pytest.mark.parametrize("name", ["keep", "complete_every"])
def test_numbers_of_a_folder(tmp_path, name, number):
    with pytest.raises((TypeError, ValueError), match=f"Checkpoints: {name} must be"):
        Checkpoints(tmp_path, **{name: number})
    Checkpoints(tmp_path, **{name: 2**31 - 1})


@pytest.mark.parametrize("step", [-1, 10**18 + 1, 1.0, True])
def test_steps_of_a_folder(tmp_path, step):
    keep = Checkpoints(tmp_path / "a")
    for save in (keep.save, keep.async_save):
        with pytest.raises((TypeError, ValueError), match="Checkpoints: step must be"):
            save(step, torch.nn.Linear(1, 1))
    assert not list(tmp_path.iterdir())
    keep.save(10**18, torch.nn.Linear(1, 1))
    assert keep.load(torch.nn.Linear(1, 1)).step == 10**18


WORKS = {
    "verify": lambda path, out, tell: checkpoint.verify(path, tell),
    "reshard": lambda path, out, tell: checkpoint.reshard(path, out, 2, tell),
    "export": lambda path, out, tell: checkpoint.export(path, out, "npz", tell),
    "diff": lambda path, out, tell: checkpoint.diff(path, path, tell),
}


@pytest.mark.parametrize("work", WORKS)
def test_progress_is_told_file_by_file(tmp_path, work):
    """Progress is reported file by file, after the sizes of all files have been checked."""
    saved_chain(tmp_path)
    told = []
    WORKS[work](tmp_path, tmp_path / "out", told.append)
    folders = sorted(tmp_path.glob("step-*"))
    sizes = [file.bytes for each in folders for file in read_manifest(each).files.values()]
    assert told == sizes * (2 if work == "diff" else 1)
    last = [*read_manifest(folders[0]).files][-1]
    with open(folders[0] / last, "ab") as file:
        file.write(b"more")
    told.clear()
    with pytest.raises(CheckpointError, match=f"{last}: is damaged"):
        WORKS[work](folders[-1], tmp_path / "new", told.append)
    assert not told


def test_progress_of_an_import(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsekit.checkpoint.sources.PIECE", 100)
    np.savez(tmp_path / "t.npz", vectors=np.ones((30, 5), np.float32))
    told = []
    sources = checkpoint.sources_of("npz", tmp_path)
    checkpoint.import_tables(sources, tmp_path / "out", on_progress=told.append)
    assert sum(told) == 30 * 5 * 4
    assert len(told) > 5


def test_what_writes_in_the_background_is_nice(tmp_path, monkeypatch):
    """The writing thread gets a higher niceness; the training thread keeps its own."""
    seen = []
    original = checkpoint.save.__globals__["write"]

    def write(*arguments):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return original(*arguments)

    monkeypatch.setitem(checkpoint.save.__globals__, "write", write)
    layer = sparsekit.Embedding(9, 2, name="ids")
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    checkpoint.async_save(layer, tmp_path / "a").wait()
    assert set(seen) == {min(own + background._NICE, 19)}
    seen.clear()
    checkpoint.save(layer, tmp_path / "b")
    assert set(seen) == {own}
    assert background._NICE > 5

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert checkpoint.async_save(layer, tmp_path / "c").wait() == tmp_path / "c"


@pytest.mark.parametrize("again", ["load", "wait"])
def test_what_a_load_waits_for(tmp_path, monkeypatch, again):
    """A load first waits for a save in the background and raises that save's error once."""
    original = checkpoint.save.__globals__["write"]
    go_on = threading.Event()

    def write(*arguments):
        go_on.wait()
        return original(*arguments)

    monkeypatch.setitem(checkpoint.save.__globals__, "write", write)
    keep, layer = Checkpoints(tmp_path), sparsekit.Embedding(9, 2, name="ids")
    saving = keep.async_save(3, layer)
    assert not saving.done()
    threading.Timer(0.2, go_on.set).start()
    assert keep.load(layer).step == 3
    assert saving.done()

    def fail(*_):
        raise CheckpointError("no")

    monkeypatch.setitem(checkpoint.save.__globals__, "write", fail)
    keep.async_save(4, layer)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/step-000000000004: not saved: no"):
        keep.wait()
    if again == "load":
        assert keep.load(layer).step == 3
    else:
        keep.wait()
    keep.close()


def test_a_closed_folder_keeps_no_memory_and_no_claim(tmp_path):
    keep, layer = Checkpoints(tmp_path), sparsekit.Embedding(9, 2, name="ids")
    saved = weakref.ref(keep.async_save(3, layer))
    assert keep._copies._kept
    keep.close()
    assert not keep._copies._kept
    gc.collect()
    assert saved() is None
    with pytest.raises(CheckpointError, match="checkpoints of another run"):
        keep.save(2, layer)
