"""Folders keep the right checkpoints, show only complete ones, and belong to one run."""

import contextlib
import os
import shutil
import socket
import warnings

import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, Checkpoints, draft
from sparsekit.checkpoint.lock import Lock, lock_folder

from .models import assert_equal, contents, made, train
from .test_crashes import ended_well, in_a_fork


def layer_of(number):
    """Return a table with one key, whose vector identifies the save."""
    layer = sparsekit.Embedding(10, 2, name="ids")
    layer.assign(torch.tensor([5]), torch.full((1, 2), float(number)))
    return layer


def number_of(path):
    layer = sparsekit.Embedding(10, 2, name="ids")
    checkpoint.load(layer, path)
    return int(layer.vectors(torch.tensor([5]))[0, 0])


def names(path):
    return sorted(each.name for each in path.iterdir() if each.name != ".lock")


def step(number):
    return f"step-{number:012d}"


@contextlib.contextmanager
def warned():
    """Yield a list to which the warnings' messages are added when the context ends."""
    texts = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in said]


def filled(path, *steps, **options):
    """Fill a folder with checkpoints, as an earlier run would."""
    keep = Checkpoints(path, keep=10, **options)
    for number in steps:
        keep.save(number, layer_of(number))
    keep.close()


@pytest.mark.parametrize("kind", ["save", "async_save", "claim"])
def test_an_older_runs_folder_is_refused(tmp_path, kind):
    filled(tmp_path, 10, 20)
    keep = Checkpoints(tmp_path)
    first = {"save": keep.save, "async_save": keep.async_save, "claim": keep.claim}[kind]
    for number in (0, 20):
        with pytest.raises(CheckpointError, match=rf"up to {step(20)}.*step {number}: go on from"):
            first(number, layer_of(7))
    assert names(tmp_path) == [step(10), step(20)]
    first(21, layer_of(21))
    keep.save(21, layer_of(22))
    keep.close()
    assert number_of(tmp_path) == 22


def test_a_run_that_goes_on_from_the_folder_may_save_below(tmp_path):
    filled(tmp_path, 10, 20)
    keep = Checkpoints(tmp_path)
    keep.load(layer_of(0))
    with warned() as texts:
        keep.save(15, layer_of(15))
        keep.save(20, layer_of(21))
        keep.save(25, layer_of(25))
    assert len(texts) == 1
    assert f"{step(15)} was saved, but {step(20)} is there too and stays the latest" in texts[0]
    assert number_of(tmp_path) == 25
    keep.close()
    with pytest.raises(CheckpointError, match="checkpoints of another run"):
        keep.save(25, layer_of(0))  # after close, another run may have saved here
    # A damaged checkpoint is ignored.
    (tmp_path / step(25) / "manifest.crc32").unlink()
    with warned():
        Checkpoints(tmp_path).save(22, layer_of(22))


@pytest.mark.parametrize("in_background", [False, True])
def test_the_one_just_written_stays(tmp_path, in_background):
    """A new checkpoint is kept even if older ones have higher steps or the latest is damaged."""
    filled(tmp_path, 10, 20, 30)
    keep = Checkpoints(tmp_path, keep=1)
    keep.load(layer_of(0))
    (tmp_path / step(30) / "manifest.crc32").write_text("0")

    def save(number):
        with warned() as texts:
            if in_background:
                keep.async_save(number, layer_of(number)).wait()
            else:
                keep.save(number, layer_of(number))
        return texts

    texts = save(21)
    assert names(tmp_path) == [step(number) for number in (10, 20, 21, 30)]
    assert [text for text in texts if "nothing is removed" in text and step(30) in text]
    shutil.rmtree(tmp_path / step(30))
    assert not save(22)
    assert names(tmp_path) == [step(22)]
    texts = save(2)
    assert names(tmp_path) == [step(2), step(22)]
    assert [text for text in texts if f"{step(22)} is there too" in text]
    keep.close()


def test_what_a_damaged_one_may_need_stays(tmp_path):
    keep = Checkpoints(tmp_path, keep=2, complete_every=9)
    for number in range(3):
        keep.save(number, layer_of(number))
    (tmp_path / step(2) / "manifest.json").unlink()
    for number in (3, 4, 5):  # step 2 is gone, so step 3 has no base and is complete
        with warned() as texts:
            keep.save(number, layer_of(number))
        assert len(texts) == (number == 3)
    assert names(tmp_path) == [step(number) for number in (3, 4, 5)]
    keep.close()


def test_latest_passes_over_one_whose_base_lacks_a_file(tmp_path):
    filled(tmp_path, 0, 1, complete_every=2)
    filled(tmp_path, 2, 3, complete_every=2)
    next((tmp_path / step(2)).glob("table-*")).unlink()
    with warned() as texts:
        assert checkpoint.latest(tmp_path).name == step(1)
    assert [text for text in texts if "the file is missing" in text]


def killed_in_publish(path, monkeypatch, exchanges):
    """Save over step 0 in a process that is killed while the old checkpoint is replaced."""
    rename, exchange = os.rename, draft.exchange

    def dies(source, target):
        if target.name == step(0):
            os._exit(0)
        rename(source, target)

    def exchange_and_die(one, other):
        assert exchange(one, other)
        os._exit(0)

    with monkeypatch.context() as context:
        if exchanges:
            context.setattr(draft, "exchange", exchange_and_die)
        else:
            context.setattr(draft, "exchange", lambda *_: False)
            context.setattr(draft.os, "rename", dies)
        keep = Checkpoints(path)
        keep.load(layer_of(9))
        assert ended_well(in_a_fork(lambda: keep.save(0, layer_of(1))))


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("then", ["load", "latest", "save"])
def test_killed_while_a_step_is_replaced(tmp_path, monkeypatch, exchanges, then):
    filled(tmp_path, 0)
    if exchanges and not draft.exchange(*(tmp_path / name for name in (step(0), step(0)))):
        pytest.skip("this file system cannot exchange names")
    killed_in_publish(tmp_path, monkeypatch, exchanges)
    if then == "load":
        assert number_of(tmp_path) == exchanges
    if then == "latest":
        assert checkpoint.latest(tmp_path) == tmp_path / step(0)
    Checkpoints(tmp_path).save(1, layer_of(2))
    assert number_of(tmp_path / step(0)) == exchanges
    assert names(tmp_path) == [step(0), step(1)]


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_failed_rename_puts_back_what_was_there(tmp_path, monkeypatch, exchanges):
    filled(tmp_path, 0)
    keep = Checkpoints(tmp_path)
    keep.load(layer_of(9))
    rename = os.rename

    def fail(source, target):
        if ".part-" in source.name and target.name.startswith("step-"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as context:
        context.setattr(draft.os, "rename", fail)
        if not exchanges:
            context.setattr(draft, "exchange", lambda *_: False)
            with pytest.raises(CheckpointError, match="published: Input/output error"):
                keep.save(0, layer_of(1))
        else:
            with pytest.raises(CheckpointError, match="published: Input/output error"):
                keep.save(1, layer_of(1))
    assert names(tmp_path) == [step(0)]
    assert number_of(tmp_path) == 0
    keep.close()


def test_a_file_system_that_cannot_exchange_names(tmp_path, monkeypatch):
    filled(tmp_path, 0)
    keep = Checkpoints(tmp_path)
    keep.load(layer_of(9))
    monkeypatch.setattr(draft, "_EXCHANGE", 1 << 20)  # a flag that the system does not know
    keep.save(0, layer_of(1))
    assert number_of(tmp_path) == 1
    assert names(tmp_path) == [step(0)]
    keep.close()


def test_a_reader_between_the_two_renames(tmp_path, monkeypatch):
    filled(tmp_path, 0)
    keep = Checkpoints(tmp_path)
    keep.load(layer_of(9))
    rename, looked = os.rename, []

    def look(source, target):
        if ".part-" in source.name and target.name == step(0) and not looked:
            looked.append(checkpoint.latest(tmp_path))
        rename(source, target)

    monkeypatch.setattr(draft, "exchange", lambda *_: False)
    monkeypatch.setattr(draft.os, "rename", look)
    keep.save(0, layer_of(1))
    assert looked == [tmp_path / step(0)]
    assert number_of(tmp_path) == 1
    assert names(tmp_path) == [step(0)]
    keep.close()


def async_save(layer, path):
    return checkpoint.async_save(layer, path).wait()


@pytest.mark.parametrize("first", [checkpoint.save, async_save])
@pytest.mark.parametrize("second", [checkpoint.save, async_save])
def test_two_saves_to_one_path(tmp_path, first, second, monkeypatch):
    """The save that finishes first is kept, and the other raises."""
    publish, begun = draft.Draft.publish, []

    def save_another(self):
        if not begun:
            begun.append(True)
            second(layer_of(2), tmp_path / "a")
        publish(self)

    monkeypatch.setattr(draft.Draft, "publish", save_another)
    with pytest.raises(CheckpointError, match="a: there is something already"):
        first(layer_of(1), tmp_path / "a")
    assert number_of(tmp_path / "a") == 2
    assert names(tmp_path) == ["a"]


def test_a_draft_whose_writer_comes_while_it_is_looked_at(tmp_path, monkeypatch):
    path = tmp_path / f".a.part-{'0' * 32}"
    path.mkdir()

    def lock(path, make):
        path.touch()
        raise FileNotFoundError  # the file did not exist a moment ago

    monkeypatch.setattr(draft, "Lock", lock)
    draft.remove_abandoned(tmp_path)
    assert os.listdir(path) == [".writer"]


@pytest.mark.parametrize("moment", ["before the lock", "before it is locked"])
def test_a_draft_is_not_removed_as_it_is_made(tmp_path, monkeypatch, moment):
    """If another job removes abandoned drafts while a draft is created, the new draft survives."""
    looked = []

    class Watched(Lock):
        def __init__(self, path, make=True):
            if make and not looked and moment == "before the lock":
                looked.append(draft.remove_abandoned(tmp_path))
            super().__init__(path, make)

    flock = draft.Lock.__init__.__globals__["fcntl"].flock

    def look_first(file, kind):
        if not looked and moment == "before it is locked" and ".writer" in str(file.name):
            looked.append(None)
            draft.remove_abandoned(tmp_path)
        flock(file, kind)

    monkeypatch.setattr(draft, "Lock", Watched)
    monkeypatch.setattr("fcntl.flock", look_first)
    checkpoint.save(layer_of(4), tmp_path / "a")
    assert looked == [None]
    assert number_of(tmp_path / "a") == 4
    assert names(tmp_path) == ["a"]


def test_the_lock_of_an_unclosed_one_goes_with_it(tmp_path):
    keep = Checkpoints(tmp_path)
    keep.save(0, layer_of(0))
    (tmp_path / "link").symlink_to(tmp_path)
    twin = Checkpoints(tmp_path / "link")  # the same job under another path
    twin.save(1, layer_of(1))

    def another_job():
        return ended_well(in_a_fork(lambda: lock_folder(tmp_path)))

    twin.close()
    assert not another_job()
    del keep
    assert another_job()
    assert not [each for each in os.listdir("/proc/self/fd") if _is_lock(each, tmp_path)]


def test_a_lock_names_its_last_owner_alone(tmp_path):
    (tmp_path / ".lock").write_text("process 123456789 on a host with a long name")
    lock = lock_folder(tmp_path)
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    lock.close()


def _is_lock(number, path):
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{number}").startswith(str(path))
    return False


def test_a_forked_child_keeps_no_lock(tmp_path):
    keep = Checkpoints(tmp_path)
    keep.save(0, layer_of(0))
    held = Lock(tmp_path / "another")
    (to_child, telling), (from_child, answering) = os.pipe(), os.pipe()

    def child():
        os.close(telling)
        os.write(answering, b".")
        os.read(to_child, 1)

    process = in_a_fork(child)
    os.read(from_child, 1)
    try:
        keep.close()
        held.close()
        lock_folder(tmp_path).close()
        Lock(tmp_path / "another").close()
    finally:
        for number in (to_child, telling, from_child, answering):
            os.close(number)
    assert ended_well(process)


def test_a_folder_that_was_made_again_by_another_job(tmp_path):
    run = tmp_path / "run"
    keep = Checkpoints(run)
    keep.save(0, layer_of(0))
    shutil.rmtree(run)
    run.mkdir()
    other = Lock(run / ".lock")
    with pytest.raises(CheckpointError, match="another job writes checkpoints there"):
        keep.save(1, layer_of(1))
    other.close()
    keep.save(1, layer_of(1))
    assert names(run) == [step(1)]
    keep.close()


@pytest.mark.parametrize("gone", ["folder", "base", "its file", "another's"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_base_that_is_gone(tmp_path, gone, in_background):
    """If the base of a new checkpoint is gone, the checkpoint is complete, and can be loaded."""
    model, optimizers = made()
    run = tmp_path / "run"
    keep = Checkpoints(run, complete_every=9)
    for number in range(2):
        train(model, optimizers, number, number + 1)
        keep.save(number, model, optimizers)
    base = run / step(0 if gone == "its file" else 1)
    if gone == "its file":
        (base / "dense.safetensors").unlink()
    else:
        shutil.rmtree(run if gone == "folder" else base)
    if gone == "another's":
        checkpoint.save(model, base, optimizers)
    train(model, optimizers, 3, 4)
    with warned():
        if in_background:
            keep.async_save(2, model, optimizers).wait()
        else:
            keep.save(2, model, optimizers)
        loaded, of_loaded = made()
        assert keep.load(loaded, of_loaded).step == 2
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))
    keep.close()


def test_a_base_that_goes_while_changes_are_written(tmp_path, monkeypatch):
    model, optimizers = made()
    keep = Checkpoints(tmp_path, complete_every=9)
    keep.save(0, model, optimizers)
    original = checkpoint.save.__globals__["write_manifest"]

    def vanish(*arguments):
        shutil.rmtree(tmp_path / step(0))
        original(*arguments)

    with monkeypatch.context() as context:
        context.setitem(checkpoint.save.__globals__, "write_manifest", vanish)
        with pytest.raises(CheckpointError, match=f"since {step(0)}, which is not beside it"):
            keep.save(1, model, optimizers)
    assert names(tmp_path) == []
    keep.save(2, model, optimizers)
    assert keep.load(*made()).step == 2
    keep.close()


def test_all_reaches_the_disk_in_order(tmp_path, monkeypatch):
    """Files are synced, then their folder; then it is renamed, and the parent folder is synced."""
    calls = []
    fsync, rename, exchange = os.fsync, os.rename, draft.exchange

    def recorded(name, call):
        def record(*arguments):
            if name == "fsync":
                number = arguments[0] if isinstance(arguments[0], int) else arguments[0].fileno()
                calls.append((name, os.readlink(f"/proc/self/fd/{number}")))
            else:
                calls.append((name, str(arguments[1])))
            return call(*arguments)

        return record

    monkeypatch.setattr(os, "fsync", recorded("fsync", fsync))
    monkeypatch.setattr(os, "rename", recorded("rename", rename))
    monkeypatch.setattr(draft, "exchange", recorded("exchange", exchange))
    run = tmp_path / "new" / "run"
    keep = Checkpoints(run)
    for _ in range(2):
        calls.clear()
        path = keep.save(0, layer_of(0))
        renames = [i for i, (_, target) in enumerate(calls) if target == str(path)]
        assert len(renames) == 1
        before, after = calls[: renames[0]], calls[renames[0] + 1 :]
        synced = [target for name, target in before if name == "fsync"]
        assert synced[-1].startswith(str(run / f".{path.name}.part-"))
        parts = {os.path.relpath(each, synced[-1]) for each in synced}
        assert parts >= {each.name for each in path.iterdir()} | {"."}
        assert ("fsync", str(run)) in after
        if not _:
            assert {str(tmp_path), str(tmp_path / "new")} <= set(synced)  # these folders are new
    keep.close()
