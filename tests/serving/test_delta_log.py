"""A delta log has exactly what training has changed, whoever has changed it."""

import random
import threading

import pytest
import torch

from sparsekit import optim
from sparsekit.serving import DeltaLog, LogError, Snapshot
from sparsekit.serving.log_folder import LogFolder

from .following import (
    ALL_KEYS,
    DIM,
    KEYS,
    OPTIMIZERS,
    assert_serves,
    keys_of,
    log_of,
    made,
    train,
)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_version_has_the_vectors_of_its_step(tmp_path, name, fused):
    model, optimizer = made(optimizer=OPTIMIZERS[name])
    if fused:
        if name == "torch's Adagrad":
            pytest.skip("not one of sparsekit's")
        attached = optim.fuse_in_backward(optimizer, model)
    train(model, optimizer, 0)
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        assert_serves(snapshot, model)
        for step in range(1, 20):
            train(model, optimizer, step)
            assert log.step(dense_version=step)
            progress = snapshot.refresh()
            assert (progress.version, progress.deltas) == (log.version, 1)
            assert (snapshot.version, snapshot.dense_version, snapshot.step) == (step, step, step)
            assert_serves(snapshot, model, known=ALL_KEYS)
    if fused:
        attached.remove()


@pytest.mark.parametrize("name", ["SGD", "LazyAdam"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_delta_has_the_rows_of_its_step_only(tmp_path, name, fused):
    model, optimizer = made(optimizer=OPTIMIZERS[name])
    if fused:
        optim.fuse_in_backward(optimizer, model)
    with log_of(tmp_path, model, every_steps=3) as log, Snapshot(tmp_path) as snapshot:
        for step in range(9):
            train(model, optimizer, step)
            found = log._changed["films"].find()
            assert not found.compared  # all writes have been marked
            assert log.step() == (step % 3 == 2)
            if step % 3 == 2:
                steps = [keys_of(s) for s in range(step - 2, step + 1)]
                keys = torch.cat(steps)
                users = len((keys // KEYS % 50).unique())
                assert snapshot.refresh().rows_written == len(keys.unique()) + users


def erase(model, optimizer, chance):
    keys = model["films"].table.keys()
    model["films"].erase(keys[torch.rand(len(keys), generator=chance) < 0.3])


def write_in_place(model, optimizer, chance):
    with torch.no_grad():
        if len(model["films"].table) > 5:
            model["films"].weight[5].fill_(0.25)
        model["users"].weight[7, 2] += 1


def assign(model, optimizer, chance):
    keys = torch.randint(-50, 400, (20,), generator=chance) * KEYS
    model["films"].assign(keys, torch.rand(20, DIM, generator=chance))


def load_other(model, optimizer, chance):
    other, of_other = made(seed=3)
    for step in range(40, 44):
        train(other, of_other, step)
    model.load_state_dict(other.state_dict())


def swap_vectors(model, optimizer, chance):
    """Give rows other keys whose vectors are the same."""
    keys = model["films"].table.keys()
    if len(keys):
        with torch.no_grad():
            model["films"].weight[: len(keys)] = 0.5
    erase(model, optimizer, chance)


def reset(model, optimizer, chance):
    model["films"].reset_parameters()


def replace_weight(model, optimizer, chance):
    other, of_other = made(seed=3)
    train(other, of_other, 50)
    model.load_state_dict(other.state_dict(), assign=True)
    optimizer.param_groups[0]["params"][:] = model.parameters()


def nothing(model, optimizer, chance):
    pass


OTHERS = [erase, write_in_place, assign, load_other, swap_vectors, reset, replace_weight, nothing]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_writes_to_rows_is_served(tmp_path, seed):
    chance, drawn = random.Random(seed), torch.Generator().manual_seed(seed)
    model, optimizer = made(optimizer=OPTIMIZERS["SGD"])
    with log_of(tmp_path, model, every_steps=100) as log, Snapshot(tmp_path) as snapshot:
        for step in range(30):
            chance.choice(OTHERS)(model, optimizer, drawn)
            if chance.random() < 0.7:
                train(model, optimizer, step)
            if chance.random() < 0.3:
                chance.choice(OTHERS)(model, optimizer, drawn)
            log.flush()
            snapshot.refresh()
            assert snapshot.version == log.version
            assert_serves(snapshot, model, known=ALL_KEYS)


@pytest.mark.parametrize("rows", ["int8", "int4", "float16"])
def test_rows_are_encoded_as_those_of_the_base(tmp_path, rows):
    model, optimizer = made()
    train(model, optimizer, 0)
    with log_of(tmp_path, model, rows) as log, Snapshot(tmp_path) as snapshot:
        for step in range(1, 5):
            train(model, optimizer, step)
            log.step()
            snapshot.refresh()
            assert_serves(snapshot, model, rows)


def test_nothing_is_written_when_nothing_has_changed(tmp_path):
    model, optimizer = made()
    with log_of(tmp_path, model) as log:
        assert not log.step()
        train(model, optimizer, 0)
        assert log.step()
        assert not log.step()
        assert log.step(dense_version=5)
        assert log.version == 2


def test_a_delta_that_cannot_be_written_comes_with_the_next_one(tmp_path, monkeypatch):
    model, optimizer = made()
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        train(model, optimizer, 0)
        with monkeypatch.context() as patch:

            def full(*_):
                raise OSError(28, "No space left on device", str(tmp_path))

            patch.setattr("sparsekit.serving.draft.Draft.write", full)
            with pytest.raises(OSError, match="No space left"):
                log.step()
        assert log.version == 0
        train(model, optimizer, 1)
        log.step()
        assert snapshot.refresh().version == log.version == 1
        assert_serves(snapshot, model)


def test_a_version_that_readers_may_have_is_not_written_twice(tmp_path, monkeypatch):
    model, optimizer = made()
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        train(model, optimizer, 0)
        with monkeypatch.context() as patch:
            from sparsekit.serving import delta_log

            write = delta_log.write_delta

            def interrupted(*arguments):
                write(*arguments)
                raise KeyboardInterrupt

            patch.setattr(delta_log, "write_delta", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.step()
        snapshot.refresh()
        train(model, optimizer, 1)
        log.step()
        assert snapshot.refresh().version == log.version == 2
        assert_serves(snapshot, model)


def test_vectors_that_cannot_be_stored_are_named(tmp_path):
    model, optimizer = made()
    train(model, optimizer, 0)
    with log_of(tmp_path, model, "int8") as log, Snapshot(tmp_path) as snapshot:
        key = int(model["films"].table.keys()[3])
        before = model["films"].weight.detach()[3].clone()
        with torch.no_grad():
            model["films"].weight[3, 2] = torch.nan
        with pytest.raises(ValueError, match=f"table films: key {key} .* nan"):
            log.step()
        with torch.no_grad():
            model["films"].weight[3] = before
            model["films"].weight[4] = 0.5
        log.step()
        snapshot.refresh()
        assert_serves(snapshot, model, "int8")


def test_two_jobs_do_not_write_to_a_log(tmp_path):
    model, _ = made()
    message = r"another job writes to this log \(process \d+"
    with log_of(tmp_path, model), pytest.raises(LogError, match=message):
        log_of(tmp_path, model)
    log_of(tmp_path, model).close()


def test_two_logs_of_a_model_both_have_all(tmp_path):
    model, optimizer = made(optimizer=OPTIMIZERS["LazyAdam"])
    folders = [tmp_path / "a", tmp_path / "b"]
    first, second = (log_of(folder, model) for folder in folders)
    with first, second, Snapshot(folders[0]) as a, Snapshot(folders[1]) as b:
        for step in range(6):
            train(model, optimizer, step)
            first.step()
            if step % 2:
                second.step()
                b.refresh()
                assert_serves(b, model)
            a.refresh()
            assert_serves(a, model)


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_seconds": -1.0}])
def test_wrong_arguments_are_refused(tmp_path, options):
    model, _ = made()
    with pytest.raises(ValueError, match="must be positive"):
        DeltaLog(tmp_path, model, **options)
    assert not list(tmp_path.iterdir())


def test_a_restart_from_an_earlier_state_is_served(tmp_path):
    model, optimizer = made()
    early = {name: value.clone() for name, value in model.state_dict().items()}
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        for step in range(5):
            train(model, optimizer, step)
            log.step()
        snapshot.refresh()
        # A part of a version that has never become complete.
        (tmp_path / f"delta-{9:020d}-00001-of-00002.skd").write_bytes(b"part")
        log.close()
        again, _ = made()
        again.load_state_dict(early)
        log = log_of(tmp_path, again)
        assert log.version == 10
        assert [path.name for path in tmp_path.glob("[bd]*")] == [f"base-{10:020d}.sks"]
        progress = snapshot.refresh()
        assert (progress.version, progress.deltas) == (10, 0)
        assert_serves(snapshot, again, known=ALL_KEYS)
        log.close()


def test_deltas_are_compacted_while_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsekit.serving.delta_log._FEW_BYTES", 0)
    model, optimizer = made()
    with log_of(tmp_path, model, compact_at=0.5) as log, Snapshot(tmp_path) as snapshot:
        for step in range(40):
            train(model, optimizer, step)
            log.step()
            snapshot.refresh()
            assert_serves(snapshot, model, known=ALL_KEYS)
        log._end_compaction()
        assert log.compaction_error is None
        assert max(LogFolder.read(tmp_path).bases) > 10
        with Snapshot(tmp_path) as other:
            other.refresh()
            assert_serves(other, model, known=ALL_KEYS)
    assert threading.active_count() == 1


def test_an_error_of_a_compaction_is_shown(tmp_path):
    model, optimizer = made()
    log = log_of(tmp_path, model)
    train(model, optimizer, 0)
    log.step()
    base = tmp_path / f"base-{0:020d}.sks"
    damaged = bytearray(base.read_bytes())
    damaged[2 * 4096 + 1] ^= 1  # in the rows of the first table
    base.write_bytes(damaged)
    log._compaction = threading.Thread(target=log._compact)
    log._compaction.start()
    with pytest.warns(UserWarning, match=f"{base.name}: damaged"):
        log.close()


def test_a_log_that_cannot_be_opened_is_not_locked(tmp_path):
    model, _ = made()
    log_of(tmp_path, model).close()
    base = tmp_path / f"base-{0:020d}.sks"
    sound = base.read_bytes()
    base.write_bytes(b"no base")
    for _ in range(2):
        with pytest.raises(LogError, match=f"{base.name}: damaged"):
            log_of(tmp_path, model)
    base.write_bytes(sound)
    log_of(tmp_path, model).close()


def test_erased_keys_are_gone_from_readers_and_from_the_folder(tmp_path):
    model, optimizer = made()
    for step in range(3):
        train(model, optimizer, step)
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        layer = model["films"]
        gone = layer.table.keys()[::3].clone()
        vectors = layer.vectors(gone).numpy()
        assert snapshot.lookup("films", gone.numpy(), found=True)[1].all()
        assert layer.erase(gone) == len(gone) > 10
        log.step()
        snapshot.refresh()
        assert not snapshot.lookup("films", gone.numpy(), found=True)[1].any()
        assert_serves(snapshot, model)
        log.compact()
        snapshot.refresh()
        assert_serves(snapshot, model)
        data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        kept = layer.table.keys()[:1]
        assert kept.numpy().tobytes() in data
        assert layer.vectors(kept).numpy().tobytes() in data
        for key, vector in zip(gone.numpy(), vectors, strict=True):
            assert key.tobytes() not in data
            assert vector.tobytes() not in data
