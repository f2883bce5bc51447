"""Readers get writes that are interrupted, or that no version of the weight tells of."""

import os
import threading

import pytest
import torch

import sparsekit
from sparsekit import optim
from sparsekit.serving import Snapshot
from sparsekit.serving.log_folder import LogFolder, compact, compacting
from sparsekit.serving.merge import merge_table
from sparsekit.tables.written_rows import Write, WrittenRows

from .following import DIM, OPTIMIZERS, assert_serves, keys_of, log_of, made, train


@pytest.fixture
def model_and_optimizer():
    model, optimizer = made(optimizer=OPTIMIZERS["LazyAdam"])
    train(model, optimizer, 0)
    return model, optimizer


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_fused_steps_of_torch_reach_readers(tmp_path, model_and_optimizer, name):
    model, _ = model_and_optimizer
    weight = model["films"].weight
    fused = getattr(torch.optim, name)([weight], lr=0.1, fused=True)
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        weight.grad = torch.zeros_like(weight)  # as that of a weight that other code uses as well
        weight.grad[: len(model["films"].table)] = 1.0
        fused.step()
        weight.grad = None
        assert log.step()
        snapshot.refresh()
        assert_serves(snapshot, model)


def test_steps_of_sparsekit_are_still_marked(tmp_path, model_and_optimizer):
    model, optimizer = model_and_optimizer
    with log_of(tmp_path, model) as log:
        train(model, optimizer, 1)
        assert not log._changed["films"].find().compared


def test_rows_that_were_rounded_on_the_way_reach_readers(tmp_path, model_and_optimizer):
    model, optimizer = model_and_optimizer
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        model["films"].bfloat16()
        model["films"].float()  # to the dtype of before, but rounded
        train(model, optimizer, 1)
        assert log.step()
        snapshot.refresh()
        assert_serves(snapshot, model)


def test_an_interrupt_before_a_write_is_counted_loses_nothing(
    tmp_path, model_and_optimizer, monkeypatch
):
    model, optimizer = model_and_optimizer

    def interrupted(_):
        raise KeyboardInterrupt

    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        before = model["films"].weight.detach().clone()
        model["films"](keys_of(0).view(-1, 1, 1)).square().sum().backward()
        with monkeypatch.context() as patch:
            patch.setattr("torch.autograd.graph.increment_version", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        assert not torch.equal(before, model["films"].weight)
        optimizer.zero_grad()
        train(model, optimizer, 50)  # other rows
        assert log.step()
        snapshot.refresh()
        assert_serves(snapshot, model)


def test_writes_of_two_threads_at_once_are_compared():
    weight = sparsekit.Embedding(8, 2).weight
    weight.written_rows = marks = WrittenRows(weight)
    first, second = Write([weight]), Write([weight])
    rows = torch.tensor([3])
    weight.detach()[rows] = 1.0
    weight.detach()[rows + 1] = 1.0
    first.done([rows])
    second.done([rows + 1])
    assert not marks.complete(weight)


def test_late_rows_are_not_searched_for_without_a_log(monkeypatch):
    """Choosing rows by a mask would make the host wait for a device."""
    model, optimizer = made(optimizer=lambda p: optim.Adam(p, lr=0.01, mode="catch_up"))
    train(model, optimizer, 0)
    shapes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
                shapes.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Watch():
        optimizer.catch_up(model["films"].weight, torch.tensor([0, -1, 3]))
    assert shapes == []


def test_an_interrupted_delta_leaves_no_gap(tmp_path, model_and_optimizer, monkeypatch):
    model, optimizer = model_and_optimizer

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        train(model, optimizer, 1)
        with monkeypatch.context() as patch:
            patch.setattr("sparsekit.serving.draft.os.replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                log.step()
        for step in (2, 3):
            train(model, optimizer, step)
            assert log.step()
            snapshot.refresh()
            assert snapshot.version == log.version
            assert_serves(snapshot, model)
        log.compact()


def test_a_base_that_readers_have_is_not_replaced(tmp_path, model_and_optimizer, monkeypatch):
    model, optimizer = model_and_optimizer
    layer = model["films"]

    def failing(*_, **__):
        raise OSError("cannot be read")

    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        layer.padding_key = 5  # needs a base
        with monkeypatch.context() as patch:
            patch.setattr("sparsekit.serving.delta_log.BaseFile.read", failing)
            with pytest.raises(OSError, match="cannot be read"):
                log.step()
        snapshot.refresh()
        train(model, optimizer, 1)
        log.step()
        train(model, optimizer, 2)
        log.step()
        snapshot.refresh()
        assert_serves(snapshot, model)


def test_another_largest_norm_reaches_readers(tmp_path):
    layer = sparsekit.EmbeddingBag(400, DIM, max_norm=0.5, name="films", seed=3)
    model = torch.nn.ModuleDict({"films": layer})
    layer(keys_of(0)[None])
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        layer.max_norm = 0.01
        assert log.step()
        snapshot.refresh()
        keys = layer.table.keys()
        layer.eval()
        expected = layer(keys[:, None]).detach().numpy()
        assert (snapshot.lookup("films", keys.numpy()) == expected).all()


def test_rows_that_keys_share_are_served_after_a_reset(tmp_path):
    shared = {"admission": sparsekit.MinCount(2), "before_admission": sparsekit.Fallback(4)}
    model, optimizer = made(score="lru", **shared)
    for step in (0, 0, 1, 1):
        train(model, optimizer, step)
    layer = model["films"]
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        layer.reset_parameters()
        assert log.step()
        snapshot.refresh()
        keys = keys_of(0)
        layer.eval()
        expected = layer(keys.view(-1, 1, 1)).squeeze(1).detach().numpy()
        assert (snapshot.lookup("films", keys.numpy()) == expected).all()
        log.compact()


def test_a_compaction_that_succeeds_ends_the_warning(tmp_path, model_and_optimizer, monkeypatch):
    model, optimizer = model_and_optimizer
    monkeypatch.setattr("sparsekit.serving.delta_log._FEW_BYTES", 0)

    def failing(_):
        raise OSError("full")

    with log_of(tmp_path, model, compact_at=1e-9) as log:
        with monkeypatch.context() as patch:
            patch.setattr("sparsekit.serving.delta_log.compact", failing)
            train(model, optimizer, 1)
            log.step()
            with pytest.warns(UserWarning, match="compaction failed: full"):
                log._end_compaction()
        train(model, optimizer, 2)
        log.step()
        log._end_compaction()  # warnings are errors
        assert log.compaction_error is None


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_leaves_the_folder_unlocked(tmp_path, model_and_optimizer):
    model, _ = model_and_optimizer
    log = log_of(tmp_path, model)
    log.compaction_error = OSError("full")
    log._compaction = threading.Thread(target=int)
    log._compaction.start()
    with pytest.raises(UserWarning, match="full"):
        log.close()
    assert model["films"].weight.written_rows is None
    log_of(tmp_path, model).close()


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    read, write = os.pipe()
    with compacting(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the other process closes its end
            os._exit(0)
    try:
        with compacting(tmp_path):
            pass
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_base_of_the_trainer_replaces_that_of_a_compaction(
    tmp_path, model_and_optimizer, monkeypatch
):
    model, optimizer = model_and_optimizer
    with log_of(tmp_path, model) as log:
        train(model, optimizer, 1)
        log.step()

        def merged(*arguments):
            model["films"].padding_key = 5  # needs a base
            log.step()
            merge_table(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr("sparsekit.serving.log_folder.merge_table", merged)
            assert compact(tmp_path) == log.version
        assert LogFolder.read(tmp_path).bases == [log.version]


def test_compaction_is_not_tried_anew_with_each_delta(tmp_path, model_and_optimizer, monkeypatch):
    model, optimizer = model_and_optimizer
    monkeypatch.setattr("sparsekit.serving.delta_log._FEW_BYTES", 20000)
    tried = []

    def failing(folder):
        tried.append(folder)
        raise OSError("full")

    monkeypatch.setattr("sparsekit.serving.delta_log.compact", failing)
    with log_of(tmp_path, model, compact_at=1e-9) as log:
        for step in range(20):
            train(model, optimizer, step)
            log.step()
            if log._compaction is not None:
                with pytest.warns(UserWarning, match="full"):
                    log._end_compaction()
        bytes_of_deltas = LogFolder.read(tmp_path).delta_bytes(0)
    assert 1 <= len(tried) <= bytes_of_deltas // 20000


@pytest.mark.parametrize("wrong", [{"dense_version": -1}, {"step": 2**63}, {"step": 1.5}])
def test_numbers_that_files_cannot_hold_are_named(tmp_path, model_and_optimizer, wrong):
    model, optimizer = model_and_optimizer
    with log_of(tmp_path, model) as log:
        train(model, optimizer, 1)
        with pytest.raises((TypeError, ValueError), match=f"{tmp_path}: {next(iter(wrong))} must"):
            log.step(**wrong)
        assert log.step()


def test_data_that_has_been_replaced_reaches_readers(tmp_path, model_and_optimizer):
    model, _ = model_and_optimizer
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        weight = model["films"].weight
        doubled = torch.nn.utils.parameters_to_vector([weight]) * 2
        torch.nn.utils.vector_to_parameters(doubled, [weight])  # assigns to weight.data
        assert log.step()
        snapshot.refresh()
        assert_serves(snapshot, model)


def test_a_version_that_the_user_counts_up_makes_all_rows_be_compared(
    tmp_path, model_and_optimizer
):
    model, _ = model_and_optimizer
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        model["films"].weight.data[3] = 7.0
        torch.autograd.graph.increment_version(model["films"].weight)
        assert log.step()
        snapshot.refresh()
        assert_serves(snapshot, model)
