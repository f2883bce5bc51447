"""DeepCoNN's command checks its options, chooses its data and computes the test error."""

import argparse
import math

import pytest
import torch
import torch.distributed as dist

from sparsekit.cli.common import UsageError
from sparsekit.datasets import Ratings
from sparsekit.errors import DivergedError
from sparsekit.models import DeepCoNN
from sparsekit.recipes.deepconn import command


def arguments(**others):
    return argparse.Namespace(**{
        "placement": "single", "ranks": None, "log": None, "checkpoint": None, "data": None,
        "length": 6, **others,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("options", "elastic", "expected"),
    [
        ({}, False, 1),
        ({"ranks": 3, "log": "x", "checkpoint": "y"}, False, 3),
        ({"placement": "split"}, False, 2),
        ({"placement": "alternating", "ranks": 2}, False, 2),
        ({"placement": "split", "ranks": 3}, True, 3),
        ({"placement": "split", "ranks": 1}, False, "^--placement split needs --ranks 2, got 1$"),
        ({"placement": "alternating", "ranks": 3}, False, "--ranks 2, got 3$"),
        ({"placement": "split", "log": "x"}, False, "^--log-to x: only --placement single is log"),
        ({"placement": "split", "checkpoint": "y"}, False, "^--checkpoint y: only --placement sin"),
    ],
)
def test_the_ranks_of_a_placement(monkeypatch, options, elastic, expected):
    monkeypatch.setattr(command.ranks, "train", lambda args, load, fit: args.ranks)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: elastic)
    if isinstance(expected, int):
        assert command._train(arguments(**options)) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            command._train(arguments(**options))


def ratings_of(each):
    """Return `each` ratings by each of two users, who rate the items in the order of their ids."""
    users, items = torch.arange(2).repeat_interleave(each), torch.arange(each).repeat(2)
    return Ratings(users, items, 1.0 + items % 5, items.double())


def films_of(count):
    return {item: (f"Film{item}", "1999", "Drama Horror") for item in range(count)}


def test_films_stand_for_reviews_where_there_is_no_file(monkeypatch, capsys):
    monkeypatch.setattr(command, "movielens_100k", lambda: ratings_of(5))
    monkeypatch.setattr(command, "movielens_100k_films", lambda: films_of(5))
    data = command._load(arguments())
    assert (len(data.train), len(data.test)) == (8, 2)
    assert data.test.items.tolist() == [4, 4]
    assert set(data.corpus.vocabulary.words) == {"drama", "horror", *(f"film{i}" for i in range(4))}
    users, items = data.corpus(data.test.users, data.test.items)
    assert users.shape == items.shape == (2, 6)
    assert capsys.readouterr().out.startswith(
        "MovieLens-100K: 10 ratings; 8 are trained on, the latest fifth of each user's, 2, are "
        "tested on. 8 words, documents of 6: "
    )


def test_too_few_reviews_to_test_on(monkeypatch):
    monkeypatch.setattr(command, "movielens_100k", lambda: ratings_of(4))
    monkeypatch.setattr(command, "movielens_100k_films", lambda: films_of(4))
    with pytest.raises(UsageError, match=r"^--data None: no user has the 5 reviews of which one"):
        command._load(arguments())


@pytest.fixture
def data(monkeypatch):
    monkeypatch.setattr(command, "movielens_100k", lambda: ratings_of(10))
    monkeypatch.setattr(command, "movielens_100k_films", lambda: films_of(10))
    return command._load(arguments())


def test_the_error_of_the_test_part(data, monkeypatch):
    model = DeepCoNN(len(data.corpus.vocabulary), 6, dim=3, filters=2, hidden=4)
    test = data.test
    with torch.no_grad():
        losses = model.losses(*data.corpus(test.users, test.items), test.ratings)
    expected = losses.double().mean().item()
    monkeypatch.setattr(command, "EVALUATION_BATCH", 3)
    assert command._test_mse(model, data) == pytest.approx(expected)
    assert model.training
    assert model.words.weight.grad is None
    # Ranks share the pairs, unless a model is spread over them.
    monkeypatch.setattr(command, "world_size", lambda: 2)
    sums = []
    monkeypatch.setattr(command, "sum_over_ranks", lambda values: sums.append(values) or [8.0])
    for rank in range(2):
        monkeypatch.setattr(command, "rank", lambda rank=rank: rank)
        assert command._test_mse(model, data) == 8 / len(test)
    assert sum(value for values in sums for value in values) == pytest.approx(losses.sum().item())
    model.placement = "split"
    modes = set()

    def constant(users, items):
        modes.add((torch.is_grad_enabled(), model.training))
        return torch.ones(len(users))

    monkeypatch.setattr(model, "forward", constant)
    assert command._test_mse(model, data) == pytest.approx(
        (test.ratings - 1).square().mean().item()
    )
    assert modes == {(False, False)}
    monkeypatch.setattr(model, "forward", lambda users, items: torch.full((len(users),), math.nan))
    with pytest.raises(DivergedError, match="the test MSE is nan: training has diverged in its l"):
        command._test_mse(model, data)


def test_training_of_a_spread_model_that_diverges(data, monkeypatch):
    model = DeepCoNN(len(data.corpus.vocabulary), 6, dim=3, filters=2, hidden=4)
    args = arguments(lr=1e-3, seed=0, epochs=2, batch_size=4)
    monkeypatch.setattr(
        model, "losses", lambda *batch: model.words.weight.sum() * math.nan + batch[2]
    )
    with pytest.raises(DivergedError, match=r"^the loss of epoch 1 is nan$"):
        command._fit_placed(model, data, args)


def test_a_placement_needs_two_ranks(data):
    with pytest.raises(UsageError, match=r"--placement split needs 2 ranks, there are 1$"):
        command._fit_and_report(data, arguments(placement="split", threads=1))


def test_documents_of_another_shape_are_refused():
    model = DeepCoNN(9, 6)
    documents = torch.ones(2, 6, dtype=torch.int64)
    for users, items, message in (
        (documents[:, :5], documents, r"documents of users must be \[2, 6\], got \[2, 5\]"),
        (documents, documents[:1], r"documents of items must be \[2, 6\], got \[1, 6\]"),
        (documents, documents[0], r"documents of items must be \[2, 6\], got \[6\]"),
    ):
        with pytest.raises(ValueError, match=f"DeepCoNN: {message}"):
            model(users, items)


def test_the_process_group_may_be_gone():
    model = DeepCoNN(9, 6)
    with pytest.raises(RuntimeError, match="the process group that it was made for is gone"):
        model._swap(torch.ones(1), "words")


def test_torchs_random_state_is_left_alone():
    before = torch.get_rng_state()
    one, other = DeepCoNN(9, 6, seed=1), DeepCoNN(9, 6, seed=2)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(one.dense["user"].weight, other.dense["user"].weight)
    words = torch.arange(1, 9)
    assert not torch.equal(one.words.vectors(words), other.words.vectors(words))
    assert one.words.vectors(words).abs().max() <= 0.5
    assert one.words.vectors(words).abs().max() > 0.3


def test_errors_of_baselines_and_model_are_reported(monkeypatch, capsys):
    ids = torch.arange(2)
    train, test = (
        Ratings(ids + first, ids + first + 5, torch.tensor([1.0, 5]), ids.double())
        for first in (100, 0)
    )

    def predict(users, items):
        assert (users.tolist(), items.tolist()) == ([0, 1], [5, 6])
        return torch.tensor([1.0, 2])

    def fit(data):
        assert data is train
        return argparse.Namespace(mean=3.0, predict=predict)

    monkeypatch.setattr(command, "fit_bias_baseline", fit)
    command._report(command.Data(train, test, None), 9.0)
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[2:]] == [
        ["4.0000", "2.0000"], ["4.5000", "2.1213"], ["9.0000", "3.0000"]
    ]  # fmt: skip
