"""Tests of the autoencoder's random draws, capacity, saved state and range of numbers."""

import math

import pytest
import torch
import torch.distributed as dist

from sparsekit.datasets import Ratings
from sparsekit.models import Autoencoder, DenseAutoencoder, RatedItems
from sparsekit.optim import LazyAdam
from sparsekit.recipes.autoencoder import model as autoencoder


@pytest.fixture
def history():
    users, items = torch.arange(6).repeat_interleave(4), torch.arange(24) * 7 % 11
    return RatedItems(Ratings(users, items, 1.0 + torch.arange(24) % 5, torch.arange(24).double()))


def test_defaults(history):
    model = Autoencoder(history)
    assert (model.dropout, model.negatives, model.source) == (0.8, 512, "")
    assert (model.bias.shape, len(model.hidden)) == ((64,), 1)
    assert "_weights" not in model.state_dict()  # a load may find another history
    sparse, dense = model.optimizers()
    assert isinstance(sparse, LazyAdam)
    assert [group["lr"] for o in (sparse, dense) for group in o.param_groups] == [5e-3] * 2


def test_the_seed_alone_decides_on_weights_and_draws(history):
    def start(seed):
        torch.manual_seed(seed + 9)
        with torch.device("meta"):  # stands in for cuda, since it is available anywhere
            weight = autoencoder._linear(3, torch.Generator("cpu").manual_seed(seed)).weight
        assert weight.is_meta
        spread = autoencoder._linear(100, torch.Generator().manual_seed(seed)).weight.std().item()
        assert spread == pytest.approx(0.1, rel=0.05)
        model = Autoencoder(history, dim=4, seed=seed, negatives=3)
        kept, drawn = model._draw(torch.arange(24))
        vectors = [model.vectors(0, 11), model._table("rated").vectors(history.items)]
        return [
            *model.hidden[0].weight.flatten().tolist(),
            *kept,
            *drawn,
            *torch.cat(vectors, 1).flatten(),
        ]

    assert start(1) == start(1)
    assert start(1) != start(2)


def test_encoding_looks_up_rated_items_alone(history):
    model = Autoencoder(history, dim=4)
    model.encode(torch.arange(2))
    assert len(model._table("rated").table) > 0
    assert len(model._table("scored").table) == 0


def test_hidden_layers_of_the_dense_autoencoder(history):
    shapes = [tuple(weight.shape) for weight in DenseAutoencoder(history).weights]
    assert shapes == [(11, 10), (10, 5), (5, 10), (10, 11)]


@pytest.mark.parametrize(
    ("dropout", "least", "most"), [(0.0, 1, 1), (0.5, 0.45, 0.55), (0.9, 0.07, 0.13)]
)
def test_a_part_of_the_entries_is_dropped(history, dropout, least, most):
    model = Autoencoder(history, dim=2, dropout=dropout)
    kept = [model._draw(torch.arange(5000))[0] for _ in range(2)]
    assert all(least <= each.double().mean() <= most for each in kept)
    assert int(model.steps) == 2
    assert torch.equal(*kept) == (dropout == 0)


def test_the_draws_of_ranks_and_entries(history):
    model = Autoencoder(history, dim=2, dropout=0.5, negatives=4)
    kept, drawn = model._draw(torch.arange(100))
    model.steps -= 1
    some, same = model._draw(torch.arange(100)[20:30])
    assert torch.equal(kept[20:30], some)
    assert torch.equal(drawn, same)
    assert drawn.tolist() == sorted(set(drawn.tolist()))
    assert 0 <= drawn.min() <= drawn.max() < len(history.items)
    model.steps.fill_(2**62)  # seeds stay in their range after any number of steps
    model._draw(torch.arange(3))


def test_a_batch_without_users_has_no_losses(history):
    assert Autoencoder(history, dim=2).losses(torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_a_rated_item_counts_once_in_the_loss_although_it_is_drawn(history):
    model, rows = Autoencoder(history, dim=2, dropout=0.0, negatives=1000), torch.arange(6)
    found = model.losses(rows)
    scores = model.score(model.encode(rows), model.vectors(0, 11))  # all items have been drawn
    entries, _, row = history(rows)
    weights = scores.new_zeros(6, 11)
    weights[row, history.columns[entries]] = history.weights()[entries]
    targets = weights / weights.sum(1, keepdim=True)
    expected = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
    torch.testing.assert_close(found, expected)


def test_a_drawn_item_stands_for_those_that_were_not_drawn(history):
    model, rows = Autoencoder(history, dim=2, dropout=0.0, negatives=3), torch.arange(6)
    drawn = model._draw(torch.arange(24))[1]
    model.steps.zero_()  # draws the same items again
    found = model.losses(rows)
    scores = model.score(model.encode(rows), model.vectors(0, 11))
    entries, _, row = history(rows)
    weights, times = scores.new_zeros(6, 11), scores.new_zeros(6, 11)
    weights[row, history.columns[entries]] = history.weights()[entries]
    times[:, drawn] = 1 / (1 - (10 / 11) ** 3)
    times[weights > 0] = 1
    total = (scores.exp() * times).sum(1).log()
    torch.testing.assert_close(found, total - (weights * scores).sum(1) / weights.sum(1))


@pytest.mark.parametrize("ranks", [None, 1, 3])
def test_the_capacity_of_a_rank(monkeypatch, ranks):
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    mean = 10_000 / (ranks or 1)
    assert autoencoder._share(10_000) == min(10_000, math.ceil(mean + 6 * math.sqrt(mean)))
    assert autoencoder._share(5) == 5


def test_scores_of_any_size_have_a_finite_loss():
    ragged, row = torch.tensor([1000.0, -1000, -1000]), torch.tensor([0, 0, 1])
    block = torch.tensor([[999.0, -torch.inf], [-1001, -torch.inf], [5, 5]])
    found = autoencoder._logsumexp(ragged, row, block)
    tail = math.log(1 + math.exp(-1))
    assert found.tolist() == pytest.approx([1000 + tail, -1000 + tail, 5 + math.log(2)])


def test_a_saved_model_goes_on_where_it_was(history, tmp_path):
    settings = {"dim": 3, "layers": 2, "dropout": 0.25, "negatives": 5, "seed": 4, "source": "x"}
    model = Autoencoder(history, **settings)
    for _ in range(3):
        model.losses(torch.arange(6))
    with torch.no_grad():
        model.bias.fill_(0.5)
    model.save(tmp_path / "model")
    loaded = Autoencoder.load(tmp_path / "model")
    assert loaded._settings == settings
    assert int(loaded.steps) == 3
    rows = torch.arange(6)
    for one, other in zip(loaded.history(rows), history(rows), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(loaded.encode(rows), model.encode(rows))
    assert torch.equal(loaded.losses(rows), model.losses(rows))


def test_the_original_is_drawn_from_the_seed_alone(history, tmp_path):
    def weights(seed):
        torch.manual_seed(seed + 9)
        return DenseAutoencoder(history, seed=seed)

    for one, other in zip(weights(1).parameters(), weights(1).parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == torch.float32
    assert not torch.equal(weights(1).biases[0], weights(2).biases[0])
    model = DenseAutoencoder(history, seed=1, source="x")
    model.save(tmp_path / "model")
    loaded = DenseAutoencoder.load(tmp_path / "model")
    assert loaded.source == "x"
    rows = torch.tensor([5, 0])
    assert torch.equal(loaded(rows), model(rows))
    assert torch.equal(loaded.losses(rows), model.losses(rows))
    assert loaded(rows).shape == (2, len(history.items))
