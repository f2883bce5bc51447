"""Fingerprints detect each changed row, and marks belong to one table."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit.checkpoint import CheckpointError, changes, snapshot
from sparsekit.checkpoint.changes import Changes, Fingerprints
from sparsekit.checkpoint.snapshot import Snapshot


@pytest.mark.parametrize("block", [1, 500, 1 << 18])
def test_the_highest_bits_of_any_words(monkeypatch, block):
    """Changes of the highest bits must be detected. Even factors or plain sums would lose them."""
    monkeypatch.setattr(changes, "_BLOCK", block)
    words = 24
    choices = [{i} for i in range(words)]
    choices += [{i, j} for i in range(words) for j in range(i)]
    rows = torch.ones(len(choices), words, dtype=torch.float64)
    prints = Fingerprints(len(rows) + 1)
    none = np.empty(0, dtype=np.int64)
    assert prints.update([rows], len(rows), none).tolist() == list(range(len(rows)))
    assert prints.update([rows], len(rows), none).tolist() == []
    for row, chosen in enumerate(choices):
        rows[row, sorted(chosen)] *= -1
    assert prints.update([rows], len(rows), none).tolist() == list(range(len(rows)))


def test_new_rows_of_zeros_in_any_block(monkeypatch):
    """New rows of zeros are found, although unused rows have the same fingerprints."""
    monkeypatch.setattr(changes, "_BLOCK", 16)  # two rows
    rows = torch.zeros(9, 1, dtype=torch.float64)
    prints = Fingerprints(len(rows))
    for known, now in ((0, 1), (1, 4), (4, 4), (4, 9)):
        keys = np.arange(now)
        of_other_keys = Changes.between(keys[:known], keys).rows
        assert prints.update([rows], now, of_other_keys).tolist() == list(range(known, now))


def shard_of(layer):
    return Snapshot(torch.nn.ModuleDict({"ids": layer}), [], {}).shards[0]


@pytest.mark.parametrize(("name", "value"), [("table", None), ("rank", 1), ("world_size", 2)])
def test_rows_of_another_kind_or_place_are_others(monkeypatch, name, value):
    shard = shard_of(sparsekit.Embedding(9, 2, name="ids"))
    before = shard.identity()
    assert shard.identity() == before
    names = ("table", "rank", "world_size")
    layer = {each: getattr(shard.layer, each) for each in names}
    monkeypatch.setattr(shard, "layer", SimpleNamespace(**layer | {name: value}))
    assert shard.identity() != before


@pytest.mark.parametrize(
    "other",
    [
        sparsekit.Embedding(10, 2, name="ids"), sparsekit.Embedding(9, 3, name="ids"),
        sparsekit.Embedding(9, 2, name="ids", dtype=torch.bfloat16),
    ],
    ids=["capacity", "dim", "dtype"],
)  # fmt: skip
def test_rows_of_another_shape_are_others(other):
    assert shard_of(other).identity() != shard_of(sparsekit.Embedding(9, 2)).identity()


def test_a_table_that_has_lost_a_key_is_not_saved(monkeypatch):
    layer = sparsekit.Embedding(9, 2, name="ids")
    layer.assign(torch.arange(5), torch.ones(5, 2))
    shard = shard_of(layer)
    (keys, *_) = shard.columns_to_write(None)
    assert [each.tolist() for each in keys.pieces()] == [[0, 1, 2, 3, 4]]
    buckets = layer.table.buckets.view(torch.int32)
    buckets[buckets == 3] = -1  # row 3 now has no key
    monkeypatch.setattr(snapshot, "_KEYS", 2)
    pieces = keys.pieces()
    assert next(pieces).tolist() == [0, 1]
    with pytest.raises(CheckpointError, match="ids: the table is damaged: rows 2 to 4 have 1 keys"):
        next(pieces)
