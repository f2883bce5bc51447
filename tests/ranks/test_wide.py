"""The wide model on N ranks gets the same weights, files and metrics as on one rank."""

import io

import pytest
import torch

from sparsekit.hashing import SplitHashEncoder
from sparsekit.models import QuantileBuckets, WideModel
from sparsekit.recipes.wide.model import select_rows
from sparsekit.train import Trainer
from sparsekit.train.metrics import gather

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

# 104 columns cannot be divided evenly among three ranks: one table has an extra row.
LENGTHS = {"city": 300, "age": 50}
SAMPLES = 131


def make_data():
    generator = torch.Generator().manual_seed(0)
    city, age = (torch.randint(0, high, (SAMPLES,), generator=generator) for high in (60, 90))
    labels = ((city % 3 == 0) | (age > 60)).float()
    return {"city": [f"city {c}" for c in city.tolist()], "age": age}, labels


def make_model(columns, loss="bce"):
    buckets = QuantileBuckets.fit(columns, ["age"], 10)
    return WideModel(SplitHashEncoder(LENGTHS), buckets, loss=loss, seed=1)


def train(rank, optimizer, loss, path=None):
    """Train on batches of 31 samples over all ranks; return all weights, losses and scores."""
    columns, labels = make_data()
    model = make_model(columns, loss)
    matrix = model.encode(columns)
    trainer = Trainer(
        model,
        lambda _, batch: (model.losses(select_rows(matrix, batch[0]), batch[1]), 0.0),
        [model.optimizer(optimizer, 31)],
        stream=io.StringIO(),
    )
    history = trainer.fit((torch.arange(SAMPLES), labels), epochs=5, global_batch_size=31)
    if path is not None:
        model.save(path)
    head = torch.cat([p.detach().reshape(-1) for p in model.head.parameters()])
    with torch.no_grad():
        scores = model(matrix)
    return model.weights().detach(), head, [epoch.loss for epoch in history], scores


@pytest.mark.pairs
@pytest.mark.parametrize("loss", ["bce", "mse"])
@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_ranks_have_the_weights_of_one(ranks, optimizer, loss):
    one = train(0, optimizer, loss)
    for weights, head, losses, scores in ranks(train, optimizer, loss):
        close = {"rtol": 0, "atol": 2e-6}
        torch.testing.assert_close(weights, one[0], **close)
        torch.testing.assert_close(head, one[1], **close)
        torch.testing.assert_close(scores, one[3], **close)
        assert losses == pytest.approx(one[2], abs=1e-6)
    if optimizer == "ftrl":
        assert 0 < (one[0] == 0).sum() < one[0].numel()


def load(rank, path):
    model = WideModel.load(path, LENGTHS)
    return model(model.encode(make_data()[0])).detach()


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_a_model_is_saved_by_ranks_for_any_number_of_them(ranks, tmp_path, optimizer):
    path = tmp_path / "model.pt"
    expected = ranks(train, optimizer, "bce", path)[0][3]
    for scores in (load(0, path), *ranks(load, path)):
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)
    train(0, optimizer, "bce", path)
    for scores in ranks(load, path):
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def gather_some(rank, lengths):
    own = torch.arange(lengths[rank]) + 100 * rank
    return gather(own), gather(own.double() / 3), gather(torch.stack([own, -own], 1))


@pytest.mark.parametrize("lengths", [(3, 0, 2), (0, 0, 0), (1, 4, 4)])
def test_gather_keeps_the_order_of_ranks_and_takes_uneven_shares(ranks, lengths):
    results = ranks(gather_some, lengths)
    expected = [100 * rank + i for rank in range(len(results)) for i in range(lengths[rank])]
    for whole, floats, pairs in results:
        assert whole.tolist() == expected
        assert pairs.tolist() == [[value, -value] for value in expected]
        assert floats.tolist() == [value / 3 for value in expected]
