"""Tables of applications grow unless the user or the device says otherwise."""

import pytest
import torch

from sparsekit.datasets import Ratings
from sparsekit.models import DLRM, DeepFM, RatingModel
from sparsekit.recipes.rows import rows_of_table

RATINGS = Ratings(
    torch.tensor([1, 2, 1]), torch.tensor([5, 5, 6]), torch.ones(3), torch.arange(3).double()
)


def test_rows_of_a_table():
    assert rows_of_table(None, {}) is None
    assert rows_of_table(None, {"on_full": "error", "ttl": 3}) is None
    assert rows_of_table(7, {"on_full": "evict"}) == 7
    assert rows_of_table(None, {"on_full": "evict"}) == 100_000
    assert rows_of_table(None, {"use_hashtable": False}) == 100_000
    assert rows_of_table(None, {"device": "cuda:1"}) == 100_000
    with torch.device("meta"):
        assert rows_of_table(None, {}) is None


@pytest.mark.parametrize("kind", [DLRM, DeepFM])
def test_click_models_grow(kind):
    model = kind(["a", "b"], 1)
    assert {layer.on_full for layer in model.embeddings.layers.values()} == {"grow"}
    model = kind(["a"], 1, on_full="evict")
    assert model.embeddings.layers["a"].capacity == 100_000


def test_a_saved_rating_model_grows_again(tmp_path):
    model = RatingModel(RATINGS, dim=3, history_size=2, seed=5)
    model.embeddings.layers["user"].assign(torch.arange(2000), torch.ones(2000, 4))
    model.save(tmp_path / "model")
    loaded = RatingModel.load(tmp_path / "model")
    for name, layer in loaded.embeddings.layers.items():
        assert layer.on_full == "grow"
        keys = model.embeddings.layers[name].table.keys()
        assert torch.equal(layer.vectors(keys), model.embeddings.layers[name].vectors(keys))
    small = RatingModel.load(tmp_path / "model", capacity=3000)
    assert {layer.capacity for layer in small.embeddings.layers.values()} == {3000}
