"""Tables of all kinds are followed."""

import numpy as np
import torch

import sparsekit
from sparsekit.serving import Snapshot
from sparsekit.serving.log_folder import LogFolder

from .following import ALL_KEYS, DIM, KEYS, OPTIMIZERS, assert_serves, log_of, made, train


def test_rows_of_tables_that_evict_are_erased(tmp_path):
    model, optimizer = made(rows=60, on_full="evict", max_rows=50, optimizer=OPTIMIZERS["LazyAdam"])
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        for step in range(40):
            train(model, optimizer, step)
            log.step()
            snapshot.refresh()
            assert_serves(snapshot, model, known=ALL_KEYS)
    assert model["films"].life.evicted > 0


def test_a_new_seed_makes_a_new_base(tmp_path):
    model, optimizer = made(seed=None)
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        absent = np.arange(500, 520) * KEYS
        for step in range(4):
            train(model, optimizer, step)
            if step == 2:
                model["films"].name = model["films"]._given_seed = None
                model["films"].reset_parameters()
            log.step()
            snapshot.refresh()
            assert_serves(snapshot, model)
            expected = model["films"].vectors(torch.from_numpy(absent))
            np.testing.assert_array_equal(snapshot.lookup("films", absent), expected)
        assert LogFolder.read(tmp_path).bases == [3]


def test_vectors_are_limited_as_in_evaluation(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"users": sparsekit.Embedding(50, DIM, max_norm=0.5)})
    optimizer = OPTIMIZERS["LazyAdam"](model.parameters())
    keys = torch.arange(0, 50, 2)
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        for _ in range(4):
            (-model["users"](keys).sum() * 100).backward()
            optimizer.step()
            optimizer.zero_grad()
            log.step()
            snapshot.refresh()
            served = snapshot.lookup("users", keys)
            with torch.no_grad():
                assert torch.equal(served, model["users"](keys).detach())


def test_rows_in_files_are_followed(tmp_path):
    (tmp_path / "rows").mkdir()
    model, optimizer = made(storage=f"mmap:{tmp_path / 'rows'}", optimizer=OPTIMIZERS["LazyAdam"])
    with log_of(tmp_path / "log", model) as log, Snapshot(tmp_path / "log") as snapshot:
        for step in range(6):
            train(model, optimizer, step)
            log.step()
            snapshot.refresh()
            assert_serves(snapshot, model, known=ALL_KEYS)


def test_tables_that_grow_are_followed(tmp_path):
    model, optimizer = made(rows=None, optimizer=OPTIMIZERS["LazyAdam"])
    with log_of(tmp_path, model) as log, Snapshot(tmp_path) as snapshot:
        for step in range(0, 200, 10):
            train(model, optimizer, step)
            log.step()
            snapshot.refresh()
            assert_serves(snapshot, model, known=ALL_KEYS)
