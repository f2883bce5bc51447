"""Incremental checkpoints load correctly on their base, after any restore or failure."""

import copy
import os
import shutil
import sys
import threading
import time
import zlib
from datetime import timedelta

import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import (
    CheckpointError,
    Checkpoints,
    background,
    changes,
    checksum,
    draft,
    snapshot,
    tensor_file,
)
from sparsekit.checkpoint.manifest_file import read_manifest

from .models import assert_equal, contents, made, train
from .test_crashes import held_up


def keeps_changes(folder):
    return Checkpoints(folder, complete_every=99, keep=99)


def loads_as_it_is(path, model, optimizers):
    loaded, of_loaded = made(seed=1)
    checkpoint.load(loaded, path, of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def complete(path):
    """Return a dict of table to whether all its rows are saved, or None if there is no base."""
    manifest = read_manifest(path)
    written = {name: table.complete for name, table in manifest.tables.items()}
    return written if manifest.base else None


def test_back_to_an_earlier_state(tmp_path, monkeypatch):
    """Saves are right after a restore, when rows get other keys. Small limits force many pieces."""
    for module, name, value in (
        (changes, "_BLOCK", 2000), (snapshot, "_KEYS", 50), (tensor_file, "PIECE", 500),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    model, optimizers = made()
    keep = keeps_changes(tmp_path)
    train(model, optimizers, 0, 1)
    earlier = copy.deepcopy((model.state_dict(), [each.state_dict() for each in optimizers]))
    for step in range(4):
        train(model, optimizers, 2 * step, 2 * step + 2)
        loads_as_it_is(keep.save(step, model, optimizers), model, optimizers)
        if step % 2:
            model.load_state_dict(earlier[0])
            for optimizer, state in zip(optimizers, earlier[1], strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
    assert complete(tmp_path / "step-000000000003") == {"users": False, "rows": False}


def table(*keys, value=1.0):
    layer = sparsekit.Embedding(20, 2, name="ids", seed=3)
    layer.assign(torch.tensor(keys, dtype=torch.int64), torch.full((len(keys), 2), value))
    return layer


def test_other_keys_with_the_same_bytes(tmp_path):
    keep, layer = keeps_changes(tmp_path), table(1, 2)
    earlier = copy.deepcopy(layer.state_dict())
    layer.assign(torch.tensor([3, 4]), torch.ones(2, 2))
    keep.save(0, layer)
    for step, keys in ((1, [5, 6]), (2, [7]), (3, [])):
        layer.load_state_dict(earlier)
        layer.assign(torch.tensor(keys, dtype=torch.int64), torch.ones(len(keys), 2))
        path = keep.save(step, layer)
        loaded = table()
        checkpoint.load(loaded, path)
        assert loaded.table.keys().tolist() == [1, 2, *keys]
    swapped = table(2, 1, *range(3, 9))
    keep.save(4, table(1, 2, *range(3, 9)))
    keep.save(5, swapped)
    assert keep.load(loaded).step == 5
    assert loaded.table.keys().tolist() == [2, 1, *range(3, 9)]


def test_a_copy_through_the_same_checkpoints(tmp_path):
    """A model and its copy can be saved in turn, although their rows have different keys."""
    model, optimizers = made()
    keep = keeps_changes(tmp_path)
    train(model, optimizers, 0, 1)
    average, of_average = copy.deepcopy((model, optimizers))
    for step in range(3):
        train(model, optimizers, step, step + 1)
        train(average, of_average, step + 10, step + 11)
        loads_as_it_is(keep.save(2 * step, model, optimizers), model, optimizers)
        loads_as_it_is(keep.save(2 * step + 1, average, of_average), average, of_average)


def test_another_module_through_the_same_checkpoints(tmp_path):
    keep = keeps_changes(tmp_path)
    both = torch.nn.ModuleDict({"a": table(1, 2), "b": table(3)})
    one = torch.nn.ModuleDict({"b": both["b"]})
    for step, module in enumerate((both, one, both, one, one)):
        path = keep.save(step, module)
        loaded = copy.deepcopy(module)
        for layer in loaded.values():
            layer.reset_parameters()
        checkpoint.load(loaded, path)
        for name, layer in module.items():
            assert loaded[name].table.keys().tolist() == layer.table.keys().tolist()
    assert complete(tmp_path / "step-000000000002") == {"a": True, "b": False}


def test_new_rows_of_zeros(tmp_path):
    keep, layer = keeps_changes(tmp_path), table(1)
    keep.save(0, layer)
    layer.assign(torch.tensor([2]), torch.zeros(1, 2))
    keep.save(1, layer)
    loaded = table()
    assert keep.load(loaded).step == 1
    assert loaded.table.keys().tolist() == [1, 2]
    assert loaded.weight[:2].tolist() == [[1, 1], [0, 0]]


def test_a_change_of_any_element_is_saved(tmp_path):
    """A change in any byte is saved, even if a row's size is not a multiple of 8 bytes."""
    keep = keeps_changes(tmp_path)
    layer, loaded = (sparsekit.Embedding(20, 3, name="ids") for _ in range(2))
    optimizer, of_loaded = (
        sparsekit.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (layer, loaded)
    )
    layer(torch.arange(4)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[layer.weight]["momentum_buffer"]
    for step, (column, element) in enumerate(
        (column, element) for column in (layer.weight.detach(), momentum) for element in range(3)
    ):
        column[2, element] += 1
        checkpoint.load(loaded, keep.save(step, layer, optimizer), of_loaded)
        assert torch.equal(loaded.weight[:4], layer.weight[:4])
        of_rows = of_loaded.state[loaded.weight]["momentum_buffer"]
        assert torch.equal(of_rows[:4], momentum[:4])
    assert complete(tmp_path / "step-000000000005") == {"table": False}


SAVE = sys.modules["sparsekit.checkpoint.save"]  # the module, not the function of the same name
FAILURES = {
    "the draft": (draft.Draft, "_locked", OSError(28, "No space left")),
    "the copy": (snapshot.Copies, "of", RuntimeError("no memory")),
    "the snapshot": (snapshot, "random_state", CheckpointError("no")),
    "a file": (SAVE, "write", CheckpointError("no")),
    "the manifest": (SAVE, "write_manifest", CheckpointError("no")),
    "the rename": (draft, "_replace", OSError(28, "No space left")),
}


@pytest.mark.parametrize("what", FAILURES)
@pytest.mark.parametrize("in_background", [False, True])
def test_after_a_failure_nothing_is_taken_as_saved(tmp_path, monkeypatch, what, in_background):
    if what == "the copy" and not in_background:
        pytest.skip("save makes none")
    model, optimizers = made()
    keep = keeps_changes(tmp_path)
    keep.save(0, model, optimizers)
    train(model, optimizers, 0, 2)
    where, name, error = FAILURES[what]

    def fail(*_):
        raise error

    with monkeypatch.context() as context:
        context.setattr(where, name, fail)
        save = (lambda *a: keep.async_save(*a).wait()) if in_background else keep.save
        with pytest.raises(CheckpointError):
            save(1, model, optimizers)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "step-000000000000"]
    loads_as_it_is(keep.save(2, model, optimizers), model, optimizers)
    train(model, optimizers, 2, 3)
    path = keep.save(3, model, optimizers)
    loads_as_it_is(path, model, optimizers)
    assert complete(path) == {"users": False, "rows": False}


@pytest.mark.parametrize("runs", [False, True])
def test_the_start_of_a_thread_is_interrupted(tmp_path, monkeypatch, runs):
    """After the interrupt, saves are right whether or not the thread has started."""
    model, optimizers = made()
    keep = keeps_changes(tmp_path)
    keep.save(0, model, optimizers)
    start = threading.Thread.start

    def interrupted(thread):
        if runs:
            start(thread)
        raise KeyboardInterrupt

    train(model, optimizers, 0, 1)
    with held_up(monkeypatch) as go_on:
        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keep.async_save(1, model, optimizers)
        threading.Timer(0.1, go_on).start()
        keep.wait()
    assert keep.latest().name == f"step-{runs:012d}"
    for step in (2, 3):
        train(model, optimizers, step, step + 1)
        loads_as_it_is(keep.save(step, model, optimizers), model, optimizers)
    keep.close()


@pytest.mark.parametrize("runs", [False, True])
def test_the_start_of_a_checksum_is_interrupted(tmp_path, monkeypatch, runs):
    start = threading.Thread.start

    def interrupted(thread):
        if runs:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(checksum, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(table(1), tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_checksums_of_large_columns(tmp_path, monkeypatch):
    """Only one thread at a time computes the checksum, even if that thread is slow."""
    monkeypatch.setattr(checksum, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(tensor_file, "PIECE", 16)
    done = []

    def slow(piece, before):
        done.append(len(piece))
        # Delay two of the pieces, so that any piece may finish last. The save must wait for all.
        threading.Event().wait(0.05 if len(done) in (3, 4) else 0.001)
        return zlib.crc32(piece, before)

    monkeypatch.setattr(checksum, "zlib", type("", (), {"crc32": staticmethod(slow)}))
    path = checkpoint.save(table(*range(9)), tmp_path / "a")
    assert len(done) > 10
    checkpoint.load(table(), path)


def test_somebody_writes_to_rows_that_are_saved(tmp_path, monkeypatch):
    """If rows change during the save, the checksum still matches the file's contents."""
    layer, add = table(*range(9)), checksum.Summed._add
    monkeypatch.setattr(tensor_file, "PIECE", 16)

    def write_to_rows(summed, view):
        layer.weight.detach().add_(1)
        add(summed, view)
        layer.weight.detach().add_(1)

    with monkeypatch.context() as context:
        context.setattr(checksum.Summed, "_add", write_to_rows)
        path = checkpoint.save(layer, tmp_path / "a")
    checkpoint.load(layer, path)


def test_a_file_that_takes_a_few_bytes_at_a_time(monkeypatch):
    """All bytes are written, and write-back to disk is started once for each part."""
    taken, asked = bytearray(), []

    class File:
        def write(self, view):
            taken.extend(view[:3])
            return min(3, len(view))

        def fileno(self):
            return -1

    monkeypatch.setattr(checksum, "_TO_DISK", 50)
    monkeypatch.setattr(checksum, "_begin_to_write", lambda _, *part: asked.append(part))
    content = bytes(range(200))
    total = checksum.Summed()
    for begin in range(0, 200, 20):
        total.write(File(), content[begin : begin + 20])
    assert bytes(taken) == content
    assert total.crc32() == zlib.crc32(content)
    assert asked == [(0, 60), (60, 60), (120, 60)]


def test_late_rows_are_saved_as_they_are_now(tmp_path):
    model, optimizers = made("Adam")
    train(model, optimizers, 0, 4)
    path = checkpoint.save(model, tmp_path / "a")  # this checkpoint lacks the optimizer
    loaded, _ = made("Adam", seed=1)
    checkpoint.load(loaded, path)
    for name in ("users", "rows"):
        ours, theirs = getattr(model, name), getattr(loaded, name)
        ours.state_dict()  # all rows catch up
        assert torch.equal(theirs.weight, ours.weight)


def test_a_copy_of_another_dtype(tmp_path):
    """Buffers that are reused for copies must fit the new dtype."""
    keep = Checkpoints(tmp_path)
    for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        layer = sparsekit.Embedding(20, 2, name="ids", dtype=dtype)
        layer.assign(torch.tensor([5]), torch.full((1, 2), 1 / 3, dtype=dtype))
        keep.async_save(step, layer).wait()
        loaded = sparsekit.Embedding(20, 2, name="ids", dtype=dtype)
        keep.load(loaded)
        assert torch.equal(loaded.weight, layer.weight)
    keep.close()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_one_in_so_many_is_complete(tmp_path, every):
    keep = Checkpoints(tmp_path, keep=9, complete_every=every)
    for step in range(7):
        base = read_manifest(keep.save(step, table(1))).base
        assert (base and base.folder) == (f"step-{step - 1:012d}" if step % every else None)


def test_a_checkpoint_that_has_all_rows_follows_none(tmp_path):
    """A checkpoint with all rows has no base, and `complete_every` starts counting there."""
    keep = Checkpoints(tmp_path, keep=9, complete_every=3)
    bases = []
    for step, layer in enumerate((table(1), table(2), table(2), table(2), table(2))):
        base = read_manifest(keep.save(step, layer)).base
        bases.append(base and int(base.folder[-1]))
    assert bases == [None, None, 1, 2, None]


def test_an_interrupted_rank_tells_the_first(tmp_path, monkeypatch):
    """Rank 1 reports that it will write nothing, so rank 0 does not wait."""
    writing = checkpoint.save.__globals__["CheckpointWriter"](
        table(1), tmp_path / "a", None, None, 0, None
    )
    writing.draft.folder.mkdir()
    writing.together.rank = 1

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    saving = background.Background(writing)
    with pytest.raises(KeyboardInterrupt):
        saving.begin()
    said = (writing.draft.folder / "rank-0001.failed").read_text()
    assert said == "was interrupted before it had begun"
    writing.together.rank, writing.together.world_size = 0, 2
    writing.write_own()
    with pytest.raises(CheckpointError, match=f"rank 1: {said}"):
        background._wait_for_others(writing)


@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_an_error_that_nobody_thought_of_is_told_by_wait(tmp_path, monkeypatch, kind):
    def fail(*_):
        raise kind("odd")

    monkeypatch.setattr(SAVE, "write", fail)
    said = rf"(?s)a: not saved: Traceback.*{kind.__name__}: odd"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.async_save(table(1), tmp_path / "a").wait()


@pytest.mark.parametrize("gone", [False, True])
def test_a_failure_that_cannot_be_noted_as_it_is(tmp_path, monkeypatch, gone):
    """If an error cannot be saved (not UTF-8, or the folder is gone), the thread ends normally."""
    path = tmp_path / os.fsdecode(b"caf\xe9")

    def fail(file, *_):
        if gone:
            shutil.rmtree(file.parent)
        raise CheckpointError(f"{file}: no")

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(SAVE, "write", fail)
    saving = checkpoint.async_save(table(1), path)
    with pytest.raises(CheckpointError, match=f"{path}: not saved: .*: no"):
        saving.wait()
    saving._task._thread.join()
    assert not raised
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_no_thread(tmp_path, monkeypatch):
    add, ended = checksum.Summed._add, []

    def slow(summed, view):
        time.sleep(0.2)
        add(summed, view)
        ended.append(len(view))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checksum.Summed, "_add", slow)
    monkeypatch.setattr(checksum, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(checksum, "_TO_DISK", 1)
    monkeypatch.setattr(checksum, "_begin_to_write", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoint.save(table(*range(9)), tmp_path / "a")
    assert len(ended) == 1


def test_a_failed_save_removes_what_another_rank_has_still_written(tmp_path, monkeypatch):
    def fail(*_):
        raise CheckpointError("no")

    monkeypatch.setattr(SAVE, "write", fail)
    saving = checkpoint.async_save(table(1), tmp_path / "a")
    saving._task.wait()
    folder = saving._writing.draft.folder
    folder.mkdir(exist_ok=True)
    (folder / "table-0000-rank-0001.safetensors").touch()
    with pytest.raises(CheckpointError, match="not saved: no"):
        saving.wait()
    assert not list(tmp_path.iterdir())


def test_what_was_replaced_goes_before_it_is_asked_for(tmp_path):
    keep = Checkpoints(tmp_path)
    for _ in range(2):
        saving = keep.async_save(0, table(1))
        while not saving.done():
            threading.Event().wait(0.001)
        assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000000000"]
    keep.close()


class Clock:
    """Clock that advances only in sleep()."""

    def __init__(self, at_look):
        self.now, self.looks, self._at_look = 0.0, 0, at_look

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += 1
        self.looks += 1
        self._at_look(self.looks)


@pytest.mark.parametrize("grows", [True, False])
def test_rank_0_waits_as_long_as_others_write(tmp_path, monkeypatch, grows):
    """The timeout of rank 0 restarts whenever a file has grown."""
    writing = checkpoint.save.__globals__["CheckpointWriter"](
        table(1), tmp_path / "a", None, None, 0, None
    )
    writing.begin()
    writing.write_own()
    writing.together.world_size = 2

    # Stands for a file that is renamed after it was listed: its size cannot be read.
    (writing.draft.folder / "rank-0001.new").symlink_to("rank-0001.part")

    def at_look(looks):
        (writing.draft.folder / "rank-0001.new").unlink(missing_ok=True)
        if grows:
            with open(writing.draft.folder / "table-0000-rank-0001.safetensors", "ab") as file:
                file.write(b"more")
        if looks == 50:
            (writing.draft.folder / "rank-0001.part").touch()

    monkeypatch.setattr(background, "time", Clock(at_look))
    monkeypatch.setattr(background.settings, "timeout", timedelta(seconds=5))
    if grows:
        background._wait_for_others(writing)
    else:
        with pytest.raises(CheckpointError, match=r"ranks \[1\] have written nothing for 5 s"):
            background._wait_for_others(writing)
    writing.end()
    assert not list(tmp_path.iterdir())


def test_changes_far_behind_the_first_rows_into_another_dtype(tmp_path, monkeypatch):
    """A save skips pieces of unchanged keys before the first change; a load casts all rows."""
    monkeypatch.setattr(snapshot, "_KEYS", 2)
    keys_of_rows, looked = snapshot.keys_of_rows, []

    def look(table, buckets, begin, end):
        looked.append(begin)
        return keys_of_rows(table, buckets, begin, end)

    monkeypatch.setattr(snapshot, "keys_of_rows", look)
    model = torch.nn.ModuleDict({"ids": sparsekit.Embedding(9, 2, name="ids")})
    keep = Checkpoints(tmp_path, complete_every=2)
    model["ids"].assign(torch.arange(8), torch.zeros(8, 2))
    keep.save(0, model)
    model["ids"].assign(torch.tensor([4, 7]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    looked.clear()
    keep.save(1, model)
    assert looked == [4, 6]
    rounded = torch.nn.ModuleDict({"ids": sparsekit.Embedding(9, 2, name="ids").bfloat16()})
    keep.load(rounded, cast=True)
    values = rounded["ids"](torch.tensor([0, 4, 7]))
    assert values.dtype == torch.bfloat16
    assert values.tolist() == [[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]]
