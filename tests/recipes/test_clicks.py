"""DLRM and DeepFM compute their formulas."""

import pytest
import torch

from sparsekit.data import Batch, KeyedJaggedTensor
from sparsekit.models import DLRM, DeepFM
from sparsekit.recipes.clicks.dlrm import LowRankCross

FEATURES = ["user", "item", "tags"]
# Bags of 3 samples: one key each for user and item; none, two and one for tags.
LENGTHS = torch.tensor([1] * 6 + [0, 2, 1])
SPARSE = KeyedJaggedTensor(
    FEATURES,
    torch.tensor([5, -7, 5, 2**62, 1, 2, 8, 9, 8]),
    torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0)),
)
DENSE = torch.tensor([[0.5, 1.0], [2.0, 0.0], [1.0, 3.0]])


def bags(model):
    """Return the sum of each bag's rows, as a tensor ``[3, features, columns]``."""
    out = []
    for name in FEATURES:
        values, offsets = SPARSE[name]
        rows = model.embeddings.layers[name].vectors(values)
        out.append(torch.stack([part.sum(0) for part in rows.split(offsets.diff().tolist())]))
    return torch.stack(out, 1)


def test_cross_layers_are_those_of_the_paper():
    cross = LowRankCross(4, 2, 3, torch.Generator().manual_seed(0))
    assert not any(linear.bias.any() for linear in cross.up)
    for linear in cross.up:
        torch.nn.init.normal_(linear.bias)
    x0 = torch.randn(5, 4)
    x = x0
    for down, up in zip(cross.down, cross.up, strict=True):
        x = x0 * (x @ down.weight.T @ up.weight.T + up.bias) + x
    torch.testing.assert_close(cross(x0), x)


def test_dlrm_is_bottom_vectors_cross_top():
    model = DLRM(FEATURES, 2, rows=20, dim=4, bottom=[6], top=[5], cross_layers=2, cross_rank=3)
    found = model(DENSE, SPARSE)
    vectors = torch.cat([model.bottom(DENSE), bags(model).flatten(1)], 1)
    torch.testing.assert_close(found, model.top(model.cross(vectors))[:, 0])
    assert found.shape == (3,)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_dlrm_without_numbers():
    model = DLRM(FEATURES, 0, rows=20, dim=4, top=[5], cross_rank=3)
    found = model(torch.empty(3, 0), SPARSE)
    torch.testing.assert_close(found, model.top(model.cross(bags(model).flatten(1)))[:, 0])


def test_deepfm_is_its_formula():
    model = DeepFM(FEATURES, 2, rows=20, dim=4, deep=[6])
    found = model(DENSE, SPARSE)
    rows = bags(model)
    for i in range(3):
        weights, vectors = rows[i, :, 0], rows[i, :, 1:]
        pairs = sum(vectors[a] @ vectors[b] for a in range(3) for b in range(a))
        deep = model.deep(torch.cat([DENSE[i], vectors.flatten()]))[0]
        linear = model.linear.weight[0] @ DENSE[i] + model.linear.bias[0]
        torch.testing.assert_close(found[i], linear + weights.sum() + pairs + deep)


@pytest.mark.parametrize("kind", [DLRM, DeepFM])
def test_the_seed_decides_on_all_weights(kind):
    def weights(seed):
        torch.manual_seed(seed + 100)  # the random state must make no difference
        model = kind(FEATURES, 2, rows=20, dim=4, seed=seed)
        model(DENSE, SPARSE)
        parts = [bags(model)]
        parts += [p.detach() for n, p in model.named_parameters() if "embeddings" not in n]
        return torch.cat([part.reshape(-1) for part in parts])

    torch.testing.assert_close(weights(1), weights(1), rtol=0, atol=0)
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("kind", [DLRM, DeepFM])
def test_rows_of_each_table(kind):
    model = kind(FEATURES, 2, rows={"user": 5, "item": 6, "tags": 7}, dim=4)
    assert [layer.capacity for layer in model.embeddings.layers.values()] == [5, 6, 7]


@pytest.mark.parametrize("kind", [DLRM, DeepFM])
def test_an_empty_batch(kind):
    model = kind(FEATURES, 2, rows=20, dim=4)
    no_rows = torch.zeros(1, dtype=torch.int64)
    batch = Batch(None, torch.empty(0, 2), KeyedJaggedTensor(FEATURES, no_rows[:0], no_rows))
    assert model(batch.dense, batch.sparse).shape == (0,)
