"""If a save is killed or cannot write, the earlier checkpoints stay intact."""

import contextlib
import copy
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError, Checkpoints
from sparsekit.train import Trainer

from .models import assert_equal, contents, keys_of_step, made, train

KILLS = 50


def in_a_fork(function):
    """Run a function in a forked process; return the process id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return process


def ended_well(process):
    return os.waitpid(process, 0)[1] == 0


def save_for_ever(folder, model, optimizers, seed):
    """Save in an endless loop, at random in the background or not, until the process is killed."""
    chance = random.Random(seed)
    keep = Checkpoints(folder, keep=2, complete_every=chance.choice([1, 3]))
    latest = keep.latest()
    step = int(latest.name.split("-")[1]) if latest else -1
    while True:
        step += 1
        model.users.assign(torch.tensor([2**40]), torch.full((1, 8), float(step)))
        model.out.bias.data.fill_(float(step))
        if chance.random() < 0.5:
            keep.async_save(step, model, optimizers, state={})
        else:
            keep.save(step, model, optimizers)


def test_killed_at_any_moment(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    loaded, of_loaded = made(seed=1)
    step = -1
    life = 0.06  # seconds before the kill; grows on a busy machine, so that saves begin in time
    for seed in range(KILLS):
        process = in_a_fork(lambda seed=seed: save_for_ever(tmp_path, model, optimizers, seed))
        time.sleep(random.Random(seed).uniform(0.0, life))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        found = Checkpoints(tmp_path).load(loaded, of_loaded)
        if found is None:
            assert step == -1  # a checkpoint that has appeared must stay
            life *= 1.3
            continue
        assert found.step >= step
        life = life * 1.3 if found.step == step else max(0.06, life / 1.2)
        step = found.step
        assert loaded.out.bias.item() == step
        assert loaded.users.vectors(torch.tensor([2**40])).unique().tolist() == [step]
    assert step > KILLS / 4  # otherwise most processes were killed before their first save
    Checkpoints(tmp_path, keep=1).save(step + 1000, model, optimizers)
    left = [path.name for path in tmp_path.iterdir() if path.name != ".lock"]
    assert left == [f"step-{step + 1000:012d}"]  # drafts of killed saves are removed


def test_a_disk_that_is_full(tmp_path):
    model, optimizers = made()
    keep = Checkpoints(tmp_path)
    keep.save(0, model, optimizers)
    before = contents(model, optimizers)
    train(model, optimizers, 0, 3)

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # acts like a full disk
        fresh = Checkpoints(tmp_path)
        for save in (fresh.save, lambda *a: fresh.async_save(*a).wait()):
            with pytest.raises(CheckpointError, match=r"table-0000.*: cannot be written: File too"):
                save(1, model, optimizers)

    keep.close()
    assert ended_well(in_a_fork(fill))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-000000000000"]
    checkpoint.load(model, tmp_path, optimizers)
    assert_equal(contents(model, optimizers), before)


def test_a_folder_that_cannot_be_written(tmp_path):
    model, optimizers = made()
    checkpoint.save(model, tmp_path / "old", optimizers)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file: cannot be made: File exists"):
        checkpoint.save(model, tmp_path / "file" / "new", optimizers)
    tmp_path.chmod(0o555)

    def save_read_only():
        if os.getuid() == 0:  # root could write anywhere
            os.setuid(65534)
        with pytest.raises(CheckpointError, match="cannot be made: Permission denied"):
            checkpoint.save(model, tmp_path / "new", optimizers)
        with pytest.raises(CheckpointError, match=r"\.lock: cannot be written: Permission denied"):
            Checkpoints(tmp_path).save(0, model, optimizers)

    for parent in tmp_path.parents:
        if "pytest-of-" in str(parent):  # pytest denies other users access to these folders
            parent.chmod(0o755)
    try:
        assert ended_well(in_a_fork(save_read_only))
    finally:
        tmp_path.chmod(0o755)
    checkpoint.load(model, tmp_path / "old", optimizers)


def test_a_folder_that_vanishes(tmp_path, monkeypatch):
    model, optimizers = made()
    keep = Checkpoints(tmp_path / "a")
    keep.save(0, model, optimizers)
    write = checkpoint.save.__globals__["write"]

    def vanish(path, *arguments):
        if "table-0001" in path.name:
            shutil.rmtree(tmp_path / "a")
        return write(path, *arguments)

    with monkeypatch.context() as context:
        context.setitem(checkpoint.save.__globals__, "write", vanish)
        with pytest.raises(CheckpointError, match=r"table-0001.*: cannot be written: No such file"):
            keep.save(1, model, optimizers)
    assert keep.latest() is None
    keep.save(2, model, optimizers)
    assert keep.load(model, optimizers).step == 2


def test_something_is_there_already(tmp_path):
    model, optimizers = made()
    checkpoint.save(model, tmp_path / "a", optimizers)
    for save in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(CheckpointError, match="a: there is something already"):
            save(model, tmp_path / "a", optimizers)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_step_is_saved_again(tmp_path):
    """A save may even replace the base of the latest checkpoint."""
    model, optimizers = made()
    keep = Checkpoints(tmp_path, complete_every=9)
    for step in (0, 1, 2, 1, 0):
        train(model, optimizers, step, step + 1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            keep.save(step, model, optimizers)
        loaded, of_loaded = made()
        checkpoint.load(loaded, tmp_path / f"step-{step:012d}", of_loaded)
        assert_equal(contents(loaded, of_loaded), contents(model, optimizers))
    assert "step-000000000002: has the changes since checkpoint" in str(said[0].message)
    assert "step-000000000001 is there too and stays the latest" in str(said[1].message)


def test_after_a_failed_save_all_rows_are_written(tmp_path, monkeypatch):
    model, optimizers = made()
    keep = Checkpoints(tmp_path, complete_every=5)
    keep.save(0, model, optimizers)
    train(model, optimizers, 0, 2)

    def fail(*_):
        raise CheckpointError("no")

    with monkeypatch.context() as context:
        context.setattr("sparsekit.checkpoint.draft.Draft.publish", fail)
        for save in (keep.save, lambda *a: keep.async_save(*a).wait()):
            with pytest.raises(CheckpointError, match="no"):
                save(1, model, optimizers)
    train(model, optimizers, 2, 3)
    keep.save(3, model, optimizers)
    loaded, of_loaded = made()
    assert keep.load(loaded, of_loaded).step == 3
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_training_goes_on_while_a_save_is_written(tmp_path, monkeypatch):
    model, optimizers = made()
    train(model, optimizers, 0, 2)
    before = contents(model, optimizers)
    original = checkpoint.save.__globals__["write"]
    (tmp_path / "wait").touch()

    def slow(*arguments):
        while (tmp_path / "wait").exists():
            time.sleep(0.01)
        return original(*arguments)

    monkeypatch.setitem(checkpoint.save.__globals__, "write", slow)
    background = checkpoint.async_save(model, tmp_path / "a", optimizers)
    assert not background.done()
    train(model, optimizers, 2, 6)
    (tmp_path / "wait").unlink()
    assert background.wait() == tmp_path / "a"
    assert background.done()
    checkpoint.load(model, tmp_path / "a", optimizers)
    assert_equal(contents(model, optimizers), before)


@contextlib.contextmanager
def held_up(monkeypatch):
    """Block saves before they write, until the context ends or the yielded function is called."""
    original = checkpoint.save.__globals__["write"]
    go_on = threading.Event()

    def wait(*arguments):
        go_on.wait()
        return original(*arguments)

    with monkeypatch.context() as context:
        context.setitem(checkpoint.save.__globals__, "write", wait)
        try:
            yield go_on.set
        finally:
            go_on.set()


def interrupt_soon():
    """Raise a KeyboardInterrupt in this thread a little later, while it waits."""
    own = threading.get_ident()
    threading.Timer(0.05, lambda: signal.pthread_kill(own, signal.SIGINT)).start()


@pytest.mark.parametrize("who", ["save", "background", "checkpoints", "next save", "close"])
def test_a_wait_that_is_interrupted(tmp_path, monkeypatch, who):
    """After an interrupted wait, the next wait lasts until the thread has ended."""
    model, optimizers = made()
    keep = Checkpoints(tmp_path)
    with held_up(monkeypatch) as go_on:
        background = keep.async_save(4, model, optimizers)
        waits = {
            "background": background.wait,
            "checkpoints": keep.wait,
            "next save": lambda: keep.save(5, model, optimizers),
            "save": lambda: keep.async_save(5, model, optimizers),
            "close": keep.close,
        }
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            waits[who]()
        assert not background.done()
        threading.Timer(0.1, go_on).start()
        keep.wait()
        assert background.done()
    assert keep.latest().name == "step-000000000004"
    keep.close()


def test_a_trainer_that_is_interrupted_twice(tmp_path, monkeypatch):
    """If a batch and then the wait for its save are interrupted, the save still completes."""
    model, optimizers = made()
    keep = Checkpoints(tmp_path)

    def loss(model, batch):
        if len(batch[0]) == 1:
            monkeypatch.setattr(keep, "wait", interrupted)
            raise KeyboardInterrupt
        return (model(batch[0]) ** 2).flatten(), 0.0

    def interrupted():
        interrupt_soon()
        Checkpoints.wait(keep)

    trainer = Trainer(
        model, loss, optimizers, checkpoints=keep, checkpoint_every=1, stream=io.StringIO()
    )
    with held_up(monkeypatch) as go_on:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit((keys_of_step(0, 3),), epochs=1, batch_size=2)
        threading.Timer(0.1, go_on).start()
        Checkpoints.wait(keep)
    assert keep.latest().name == "step-000000000001"
    monkeypatch.undo()
    keep.close()


def test_a_program_that_ends_while_a_save_is_written(tmp_path):
    program = """if True:
        import sys, time, torch, sparsekit
        from sparsekit import checkpoint

        write = checkpoint.save.__globals__["write"]

        def slow(*arguments):
            time.sleep(0.3)
            return write(*arguments)

        checkpoint.save.__globals__["write"] = slow
        layer = sparsekit.Embedding(10, 4, name="ids")
        layer(torch.tensor([5]))
        checkpoint.Checkpoints(sys.argv[1]).async_save(7, layer)
        assert not checkpoint.latest(sys.argv[1])
    """
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    layer = sparsekit.Embedding(10, 4, name="ids")
    assert checkpoint.load(layer, tmp_path).step == 7
    assert layer.table.keys().tolist() == [5]


def test_a_draft_is_another_jobs_until_it_is_published(tmp_path, monkeypatch):
    """Another job's save removes only the drafts of killed saves."""
    model, optimizers = made()
    rename = os.rename
    others = []

    def save_beside(source, target):
        if "part-" in str(source) and str(target).endswith("/a") and not others:
            others.append(in_a_fork(lambda: checkpoint.save(model, tmp_path / "b", optimizers)))
            assert ended_well(others[0])
        rename(source, target)

    monkeypatch.setattr(os, "rename", save_beside)
    checkpoint.save(model, tmp_path / "a", optimizers)
    assert others
    for name in ("a", "b"):
        checkpoint.load(model, tmp_path / name, optimizers)
        assert ".writer" not in os.listdir(tmp_path / name)


def test_copies_of_states_in_any_memory(tmp_path):
    """States are saved right even if they are strided copies, or views of a larger tensor."""
    model, optimizers = made()
    train(model, optimizers, 0, 4)
    model, optimizers = copy.deepcopy((model, optimizers))
    state = optimizers[0].state[model.users.weight]
    assert not state["exp_avg"].is_contiguous()
    assert state["exp_avg"]._base is None
    other = optimizers[0].state[model.rows.weight]
    wide = torch.zeros(*other["exp_avg"].shape, 3)
    wide[..., 1] = other["exp_avg"]
    other["exp_avg"] = wide[..., 1]
    checkpoint.async_save(model, tmp_path / "a", optimizers).wait()
    loaded, of_loaded = made(seed=1)
    checkpoint.load(loaded, tmp_path / "a", of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))


def test_no_memory_for_copies(tmp_path, monkeypatch):
    model, optimizers = made()
    keep = Checkpoints(tmp_path)

    def refuse(*_):
        raise RuntimeError("can't allocate memory: you tried to allocate 99 bytes\nand a trace")

    with monkeypatch.context() as context:
        context.setattr("sparsekit.checkpoint.snapshot.Copies.of", refuse)
        with pytest.raises(CheckpointError, match=r"cannot be copied: can't .* 99 bytes; save"):
            keep.async_save(1, model, optimizers)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    keep.async_save(1, model, optimizers)
    assert keep.load(model, optimizers).step == 1
    keep.close()


def test_memory_for_copies_is_kept_from_save_to_save(tmp_path):
    model, optimizers = made()
    keep = Checkpoints(tmp_path)
    seen = []
    for step in range(2):
        train(model, optimizers, step, step + 1)
        saved = keep.async_save(step, model, optimizers)
        seen.append([s.columns["vectors"].data_ptr() for s in saved._writing.snapshot.shards])
        assert [len(s.columns["vectors"]) for s in saved._writing.snapshot.shards] == [
            len(model.users.table), len(model.rows.table)
        ]  # fmt: skip
    assert seen[0] == seen[1]
    keep.close()


def test_few_rows_in_a_checkpoint_of_changes(tmp_path):
    model, optimizers = made()
    train(model, optimizers, 0, 5)
    keep = Checkpoints(tmp_path, complete_every=4)
    keep.save(0, model, optimizers)
    model.users.assign(torch.tensor([5, 2**50]), torch.ones(2, 8))
    with torch.no_grad():
        model.rows.weight[3, 1] += 1  # a write by hand
    path = keep.save(1, model, optimizers)
    tables = checkpoint.manifest_file.read_manifest(path).tables
    assert [(t.complete, t.shards[0].rows) for t in tables.values()] == [(False, 2), (False, 1)]
    model.users.reset_parameters()
    path = keep.save(2, model, optimizers)
    tables = checkpoint.manifest_file.read_manifest(path).tables
    assert [(t.complete, t.shards[0].rows) for t in tables.values()] == [(True, 0), (False, 0)]
    loaded, of_loaded = made()
    keep.load(loaded, of_loaded)
    assert_equal(contents(loaded, of_loaded), contents(model, optimizers))
    with contextlib.suppress(StopIteration):
        assert next(model.users.items()) is None  # the table is empty
