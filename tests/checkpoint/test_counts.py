"""Counts of keys that wait for admission, in checkpoints of tables that count in other ways."""

import pytest
import torch

import sparsekit
from sparsekit import checkpoint
from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.manifest_file import read_manifest
from sparsekit.tables.admission import counts_of

from .evicting import made, state_of, train

EXACT = {"admission": sparsekit.MinCount(3)}
SKETCH = {"admission": sparsekit.MinCount(3, sketch_bytes=1024)}


def saved(folder, **options):
    layer, optimizer = made(**options)
    train(layer, optimizer, 0, 6)
    return layer, checkpoint.save(layer, folder / "a", optimizer)


def loaded(path, **options):
    layer, optimizer = made(seed=9, **options)
    train(layer, optimizer, 30, 33)  # counts of its own, which the load replaces
    checkpoint.load(layer, path, optimizer)
    return layer


def estimates(layer, keys):
    """Return the counts of keys, as a lookup that has them once would read them, less 1."""
    return layer.life.counts.add(keys, torch.zeros_like(keys), 10**6)


@pytest.mark.parametrize("of", [EXACT, SKETCH], ids=["exact", "sketch"])
def test_the_same_kind(tmp_path, of):
    layer, path = saved(tmp_path, **of)
    counts = layer.life.counts.state()
    assert counts.any()
    assert torch.equal(loaded(path, **of).life.counts.state(), counts)
    expect, of_expected = made(**of)
    train(expect, of_expected, 0, 12)
    again, of_again = made(seed=9, **of)
    checkpoint.load(again, path, of_again)
    train(again, of_again, 6, 12)
    for name, value in state_of(expect, of_expected).items():
        assert torch.equal(state_of(again, of_again)[name], value), name


def test_exact_counts_into_a_sketch(tmp_path):
    layer, path = saved(tmp_path, **EXACT)
    keys, counts = layer.life.counts.state()[:, :2].T.contiguous()
    assert (estimates(loaded(path, **SKETCH), keys) >= counts).all()


@pytest.mark.parametrize("width", [256, 4096])
def test_a_sketch_into_one_of_another_size_is_never_too_low(tmp_path, width):
    layer, path = saved(tmp_path, **SKETCH)
    keys = torch.arange(200) * 2**33
    to = loaded(path, admission=sparsekit.MinCount(3, sketch_bytes=width))
    true = dict(
        zip(*saved(tmp_path / "b", **EXACT)[0].life.counts.state()[:, :2].T.tolist(), strict=True)
    )
    found = dict(zip(keys.tolist(), estimates(to, keys).tolist(), strict=True))
    assert len(true) > 10
    assert all(found[key] >= count for key, count in true.items())
    if width > 1024:
        assert torch.equal(estimates(to, keys), estimates(layer, keys))


def test_a_sketch_into_exact_counts_begins_anew(tmp_path):
    _, path = saved(tmp_path, **SKETCH)
    with pytest.warns(UserWarning, match="table table has counted keys in a sketch"):
        layer = loaded(path, **EXACT)
    assert not len(layer.life.counts.state())


@pytest.mark.parametrize("of", [EXACT, SKETCH], ids=["exact", "sketch"])
def test_with_and_without_counts(tmp_path, of):
    _, path = saved(tmp_path, **of)
    assert loaded(path).life.counts is None
    _, without = saved(tmp_path / "b")
    assert not loaded(without, **of).life.counts.state().any()


def test_reshard_keeps_counts_exactly(tmp_path):
    layer, path = saved(tmp_path, **EXACT)
    state = layer.life.counts.state()
    there = checkpoint.reshard(path, tmp_path / "three", 3)
    assert all(shard.counts > 0 for shard in read_manifest(there).tables["table"].shards)
    back = checkpoint.reshard(there, tmp_path / "one", 1)
    found = loaded(back, **EXACT).life.counts.state()
    assert torch.equal(found[found[:, 0].argsort()], state[state[:, 0].argsort()])


def test_a_count_below_one_is_damage(tmp_path, monkeypatch):
    layer, optimizer = made(**EXACT)
    train(layer, optimizer, 0, 6)
    state = layer.life.counts.state()
    state[3, 1] = 0
    monkeypatch.setattr(layer.life.counts, "state", lambda: state)
    path = checkpoint.save(layer, tmp_path / "a", optimizer)
    with pytest.raises(CheckpointError, match="is damaged: a count is out of range"):
        loaded(path, **EXACT)


def test_a_key_with_two_counts_is_damage(tmp_path, monkeypatch):
    layer, optimizer = made(**EXACT)
    train(layer, optimizer, 0, 6)
    state = layer.life.counts.state()
    state[3, 0] = state[4, 0]
    monkeypatch.setattr(layer.life.counts, "state", lambda: state)
    path = checkpoint.save(layer, tmp_path / "a", optimizer)
    to, of = made(seed=9, **EXACT)
    train(to, of, 30, 33)
    before = state_of(to, of)
    with pytest.raises(CheckpointError, match="a key has two counts"):
        checkpoint.load(to, path, of)
    for name, value in state_of(to, of).items():
        assert torch.equal(value, before[name]), name


def test_sketches_of_several_ranks_are_never_too_low():
    of_ranks = [counts_of(SKETCH["admission"], torch.device("cpu")) for _ in range(3)]
    keys = torch.arange(90)
    for rank, counts in enumerate(of_ranks):
        counts.add(keys[rank::3], keys[rank::3] + 1, 0)
    all_ = counts_of(SKETCH["admission"], torch.device("cpu"))
    all_.load_all([counts.state() for counts in of_ranks])
    assert (all_.add(keys, torch.zeros_like(keys), 0) >= keys + 1).all()
