"""Files of rating and wide models restore predictions, in tables that are large enough."""

import pytest
import torch

from sparsekit import TableFullError
from sparsekit.datasets import Ratings
from sparsekit.hashing import SplitHashEncoder
from sparsekit.models import QuantileBuckets, RatingModel, UserHistory, WideModel
from sparsekit.recipes import saved
from sparsekit.recipes.ratings import model as ratings

USERS, ITEMS = torch.arange(12) // 3, torch.arange(12) % 5
RATINGS = Ratings(USERS, ITEMS, 1.0 + torch.arange(12) % 4, torch.arange(12).double())


@pytest.fixture
def rated(tmp_path):
    model = RatingModel(RATINGS, dim=3, capacity=20, history_size=2, seed=5)
    model.losses(USERS, ITEMS, RATINGS.ratings)
    with torch.no_grad():
        model.mean.add_(0.25)
        model.project.weight.mul_(2)
    model.save(tmp_path / "model")
    return model.eval()


@pytest.mark.parametrize(("capacity", "expected"), [(None, 20), (5, 5), (30, 30)])
def test_a_rating_model_predicts_as_before(rated, tmp_path, capacity, expected):
    loaded = RatingModel.load(tmp_path / "model", capacity=capacity).eval()
    assert torch.equal(loaded(USERS, ITEMS), rated(USERS, ITEMS))
    assert loaded.table_sizes() == rated.table_sizes() == {"user": 4, "item": 5, "rated": 5}
    assert {layer.capacity for layer in loaded.embeddings.layers.values()} == {expected}
    assert (loaded.low, loaded.high) == (1, 4)
    assert loaded.history.max_items == 2
    assert not loaded.mean.data.equal(RATINGS.ratings.mean())


def test_rows_of_several_ranks_may_need_a_larger_table(rated, tmp_path):
    state = saved.read(tmp_path / "model", RatingModel.FORMAT)
    state["settings"]["capacity"] = 3  # capacity of each of two ranks
    torch.save(state, tmp_path / "model")
    loaded = RatingModel.load(tmp_path / "model")
    assert {layer.capacity for layer in loaded.embeddings.layers.values()} == {5}
    with pytest.raises(TableFullError):
        RatingModel.load(tmp_path / "model", capacity=4)


def test_defaults_of_rating_models():
    model = RatingModel(RATINGS)
    assert {layer.on_full for layer in model.embeddings.layers.values()} == {"grow"}
    sizes = [layer.embedding_vec_size for layer in model.embeddings.layers.values()]
    assert sizes == [33, 33, 32]
    assert model.history.max_items == UserHistory(RATINGS).max_items == 32
    # The figures in the docs were measured with these defaults.
    assert (ratings.L2_VECTORS, ratings.L2_RATED, ratings.L2_BIASES) == (0.15, 0.4, 0.01)
    assert torch.equal(model.project.weight, torch.eye(32))
    assert model.mean.item() == RATINGS.ratings.mean().item()
    vectors = model.embeddings.layers["user"].vectors(torch.arange(50))
    assert 0.045 < vectors.abs().max() <= 0.05


def test_the_rows_beyond_the_columns_are_not_loaded(tmp_path):
    encoder = SplitHashEncoder({"a": 50})
    model = WideModel(encoder, QuantileBuckets({"a": [2.0]}), loss="mse", seed=3)
    model.save(tmp_path / "model")
    state = saved.read(tmp_path / "model", WideModel.FORMAT)
    keys, vectors = state["table"]
    # Table sizes are rounded up on three ranks, so their files may contain one more key.
    state["table"] = torch.cat([keys, keys[-1:] + 1]), torch.cat([vectors, vectors[:1]])
    torch.save(state, tmp_path / "model")
    loaded = WideModel.load(tmp_path / "model", {"a": 50})
    assert torch.equal(loaded.weights(), model.weights())
    assert torch.equal(loaded.head.weight, model.head.weight)
    assert loaded.buckets.edges["a"].tolist() == [2.0]
    for expected in ({}, {"a": 51}, {"b": 50}):
        with pytest.raises(ValueError, match=r"model: "):
            WideModel.load(tmp_path / "model", expected)


def test_a_wide_model_starts_from_its_seed_alone():
    encoder = SplitHashEncoder({"a": 50})
    torch.manual_seed(1)
    model = WideModel(encoder)
    torch.manual_seed(2)
    same, other = WideModel(encoder), WideModel(encoder, seed=1)
    assert model.loss == "bce"
    assert not model.head.bias.any()
    assert model.head.weight.abs().max() <= model.dim**-0.5
    assert torch.equal(model.head.weight, same.head.weight)
    assert not torch.equal(model.head.weight, other.head.weight)
    assert torch.equal(model.weights(), same.weights())
    assert not torch.equal(model.weights(), other.weights())
