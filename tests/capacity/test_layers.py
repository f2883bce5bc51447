"""Curves of layers are those of the keys that they look up in training."""

import pytest
import torch

import sparsekit
from sparsekit.capacity import CapacityCurve, LayerCurves
from sparsekit.lookup.watch import watched

from .plain import zipf


def same(found, lookups, **options):
    curve = CapacityCurve(**options)
    for keys in lookups:
        curve.add(keys)
    return found == curve.read()


def test_a_layer_hits_as_often_as_predicted():
    layer = sparsekit.Embedding(2000, 4, on_full="evict", max_rows=300, name="users")
    lookups = zipf(3000, 64, 200, 1)
    with LayerCurves(layer, rows=[300], ttls=()) as curves, torch.no_grad():
        for keys in lookups:
            layer(keys)
        layer.eval()
        layer(torch.arange(1000))
    layer.train()
    found = curves.read()["users"]
    counts = layer.row_counts()
    layer(torch.arange(1000))  # no longer watched
    assert (found.lookups, found.keys) == (200, counts.asked)
    assert found.points[0].hit_rate == pytest.approx(counts.found / counts.asked, abs=1e-12)
    assert curves.read()["users"] == found
    assert watched == {}


def test_features_of_a_group():
    users = sparsekit.DistributedEmbedding("sum", None, 4, 1, 2, name="users")
    films = sparsekit.DistributedEmbedding("sum", None, 4, 1, 2, name="films")
    group = sparsekit.EmbeddingGroup(
        {"users": users, "films": films},
        {
            "user": "users",
            "seen": "films",
            "bought": "films",
            "shown": sparsekit.Feature("films", insert=False, combiner="sum", max_nnz=2),
        },
    )
    asked, of_films = [], []
    with LayerCurves(group) as curves:
        for step in range(20):
            keys = {
                name: (torch.randint(50 + step, (8,)), torch.arange(0, 9, 2))
                for name in ("user", "seen", "bought", "shown")
            }
            group(keys)
            asked.append(keys["user"][0])
            of_films.append(torch.cat([keys["seen"][0], keys["bought"][0]]))
        found = curves.read()
    assert list(found) == ["users", "films"]
    assert same(found["users"], asked)
    assert same(found["films"], of_films)


def test_a_key_that_stands_for_nothing_is_not_counted():
    layer = sparsekit.EmbeddingBag(100, 4, mode="sum", padding_key=-1, name="bags")
    with LayerCurves(layer) as curves:
        layer(torch.tensor([[3, -1], [-1, -1], [4, 3]]))
    found = curves.read()["bags"]
    assert (found.keys, found.distinct) == (2, 2)


def test_errors():
    with pytest.raises(ValueError, match="model has no sparsekit layer with a hash table"):
        LayerCurves(torch.nn.Linear(2, 2))
    layer = sparsekit.Embedding(10, 4, name="x")
    with LayerCurves(layer):
        with pytest.raises(ValueError, match="x is being watched already"):
            LayerCurves(layer)
        with pytest.raises(ValueError, match="rows must be in"):
            LayerCurves(sparsekit.Embedding(10, 4), rows=[-1])
    assert watched == {}


def test_several_ranks_are_refused(monkeypatch):
    layer = sparsekit.Embedding(10, 4, name="x")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(NotImplementedError, match="on 4 ranks each sees the keys of its own"):
        LayerCurves(layer)
    assert watched == {}
