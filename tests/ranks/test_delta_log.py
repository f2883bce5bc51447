"""Ranks write a delta log together: a version appears when all parts have."""

import numpy as np
import pytest
import torch
from serving.following import KEYS, keys_of

import sparsekit
from sparsekit import optim
from sparsekit.serving import Snapshot
from sparsekit.serving import delta_log as module
from sparsekit.serving.delta_log import DeltaLog

from .pool import Ranks

DIM, STEPS = 8, 8


def made(fallback):
    """Return a model with a hash table and one without, and its optimizer."""
    options = {}
    if fallback:
        admission = sparsekit.MinCount(2)
        options = {"admission": admission, "before_admission": sparsekit.Fallback(3)}
    films = sparsekit.DistributedEmbedding("sum", 400, DIM, 1, name="films", seed=3, **options)
    users = sparsekit.DistributedEmbedding("sum", 51, DIM, 1, name="users", use_hashtable=False)
    model = torch.nn.ModuleDict({"films": films, "users": users})
    return model, optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, step, rank):
    keys = keys_of(2 * step + rank)
    loss = model["films"](keys.view(-1, 1, 1)).square().sum()
    loss = loss + model["users"]((keys // KEYS % 50).view(-1, 1, 1)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def probe(model):
    """Return what the model serves of some keys: all ranks look them up together."""
    model.eval()
    keys = torch.cat([keys_of(step) for step in range(2 * STEPS + 8)]).unique()
    with torch.no_grad():
        films = model["films"](keys.view(-1, 1, 1)).view(len(keys), DIM)
        users = model["users"](torch.arange(51).view(-1, 1, 1))
    model.train()
    return keys.numpy(), films.numpy(), users.view(51, DIM).numpy()


def write(rank, folder, fallback, fail_at):
    """Train and write; return the versions, and what each of them is to serve."""
    model, optimizer = made(fallback)
    train(model, optimizer, 0, rank)
    states, errors = [], []
    log = DeltaLog(folder, model, rows="float32", every_steps=1, compact_at=None)
    states.append((log.version, probe(model)))
    original = module.write_delta

    def full(*arguments):
        raise OSError(28, "No space left on device", str(folder))

    for step in range(1, STEPS):
        train(model, optimizer, step, rank)
        if step == fail_at and rank == 1:
            module.write_delta = full
        if step == 5:
            model["films"].erase(keys_of(3)[:10])
        try:
            log.step(dense_version=step)
            states.append((log.version, probe(model)))
        except (OSError, RuntimeError) as error:
            errors.append(str(error))
        finally:
            module.write_delta = original
    log.close()
    return states, errors


def assert_serves(snapshot, state):
    keys, films, users = state
    np.testing.assert_array_equal(snapshot.lookup("films", keys), films)
    np.testing.assert_array_equal(snapshot.lookup("users", np.arange(51)), users)


@pytest.fixture(scope="module")
def pools():
    made = {world: Ranks(world) for world in (1, 2, 3)}
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_versions_of_ranks_are_served(pools, tmp_path, world, fallback):
    (states, errors), *others = pools[world](write, tmp_path, fallback, None)
    assert not errors
    assert [version for version, _ in states] == list(range(STEPS))
    for other, _ in others:
        assert [version for version, _ in other] == list(range(STEPS))
    deltas = {version: sorted(tmp_path.glob(f"delta-{version:020d}*")) for version in range(STEPS)}
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for version in range(1, STEPS):
        assert len(deltas[version]) == world
        for path in deltas[version]:
            path.rename(hidden / path.name)
    with Snapshot(tmp_path, verify=True) as snapshot:
        for version, state in states:
            for path in deltas[version]:
                assert snapshot.refresh().deltas == 0  # until the last part is there
                (hidden / path.name).rename(path)
            snapshot.refresh()
            assert (snapshot.version, snapshot.dense_version) == (version, version)
            assert_serves(snapshot, state)


def test_a_rank_whose_disk_is_full_stops_all(pools, tmp_path):
    (states, errors), (_, errors_of_other) = pools[2](write, tmp_path, False, 3)
    assert len(errors) == len(errors_of_other) == 1
    assert "No space left" in errors[0]
    assert [version for version, _ in states] == list(range(STEPS - 1))
    with Snapshot(tmp_path) as snapshot:
        snapshot.refresh()
        assert snapshot.version == STEPS - 2
        assert_serves(snapshot, states[-1][1])


def test_a_log_goes_on_with_another_number_of_ranks(pools, tmp_path):
    version = -1
    snapshot = None
    for world in (2, 1, 3):
        (states, errors), *_ = pools[world](write, tmp_path, False, None)
        assert not errors
        assert states[0][0] == version + 1
        version, state = states[-1]
        if snapshot is None:
            snapshot = Snapshot(tmp_path)
        snapshot.refresh()
        assert snapshot.version == version
        assert_serves(snapshot, state)
    snapshot.close()


def without_steps(rank, folder):
    model, _ = made(False)
    try:
        DeltaLog(folder, model)
    except ValueError as error:
        return str(error)


def test_ranks_need_a_number_of_steps(pools, tmp_path):
    for message in pools[2](without_steps, tmp_path):
        assert "give every_steps" in message
