"""The commands that train on ratings and on the census load and test the right data."""

import argparse
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparsekit.cli.common import UsageError
from sparsekit.datasets import Adult, Ratings
from sparsekit.datasets.adult import CATEGORIES, NUMBERS
from sparsekit.errors import DivergedError, TableFullError
from sparsekit.models import RatedItems, Recommendations, fit_bias_baseline
from sparsekit.recipes.autoencoder import command as autoencoder
from sparsekit.recipes.autoencoder import recommend
from sparsekit.recipes.ratings import command as ratings
from sparsekit.recipes.wide import command as wide

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")


def some_ratings(each):
    users, items = torch.arange(2).repeat_interleave(each), torch.arange(each).repeat(2)
    return Ratings(users, items, 1.0 + items % 5, items.double())


def test_a_fifth_of_the_ratings_is_tested_on(monkeypatch, capsys):
    monkeypatch.setattr(ratings, "movielens_100k", lambda data: some_ratings(5))
    for data, name in (("x", "x"), (None, "MovieLens-100K")):
        train, test = ratings.load_ratings(argparse.Namespace(data=data))
        assert (len(train), test.items.tolist()) == (8, [4, 4])
        assert capsys.readouterr().out == (
            f"{name}: 10 ratings; 8 are trained on, the latest fifth of each user's, 2, are tested "
            f"on\n"
        )
    monkeypatch.setattr(ratings, "movielens_100k", lambda data: some_ratings(4))
    with pytest.raises(UsageError, match=r"^--data x: no user has the 5 ratings of which one can"):
        ratings.load_ratings(argparse.Namespace(data="x"))


def test_the_report_of_ratings_has_all_models_and_tables(capsys):
    users, items = torch.tensor([7, 7, 8, 8, 9]), torch.tensor([1, 2, 1, 3, 2])
    train = Ratings(users, items, torch.tensor([5.0, 3.0, 4.0, 1.0, 2.0]), items.double())
    test = Ratings(users[:3] + 1, items[2:], torch.tensor([4.0, 3.0, 2.0]), items[2:].double())
    epochs = [SimpleNamespace(seconds=1.5, metrics={"test RMSE": e}) for e in (0.75, 0.625)]
    ratings._report(SimpleNamespace(history=epochs), train, test, {"user": 3, "item": 12_000})
    baseline = fit_bias_baseline(train)
    # The mean of train is 3; the errors of the mean in test are 1, 0 and -1.
    biases = (baseline.predict(test.users, test.items) - test.ratings).square().mean().sqrt()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "                  test RMSE",
        "global mean          0.8165",
        f"user + item bias  {biases:9.4f}",
        "model                0.6250",
        "",
        "2 epochs in 3.0 s; rows in the tables: user 3, item 12,000",
    ]


def fit_arguments(**others):
    return argparse.Namespace(**{
        "dim": 2, "capacity": 9, "seed": 0, "lr": 0.5, "wire_dtype": "float32", "save": None,
        **others,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (TableFullError("user", 0, 5, 5, 1), UsageError, r"^user: .* Here that is --capacity\.$"),
        (DivergedError("why"), DivergedError, r"^why; try a smaller --lr than 0\.5$"),
    ],
)
def test_what_ends_training_on_ratings_names_an_option(monkeypatch, error, kind, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(ratings, "_fit", fail)
    with pytest.raises(kind, match=message):
        ratings._fit_and_report((some_ratings(5), some_ratings(5)), fit_arguments())


def test_an_interrupted_run_saves_nothing(monkeypatch):
    monkeypatch.setattr(ratings, "_fit", lambda *_: argparse.Namespace(interrupted=True))
    monkeypatch.setattr(ratings.training, "save", None)
    data = some_ratings(5), some_ratings(5)
    assert ratings._fit_and_report(data, fit_arguments(save="x")) == 130


def test_ranks_share_the_test_ratings(monkeypatch):
    test = some_ratings(7)
    monkeypatch.setattr(ratings, "EVALUATION_BATCH", 5)
    squares = [(rating - 3) ** 2 for rating in test.ratings.tolist()]

    def model(users, items):
        return torch.full((len(users),), 3.0)

    assert ratings._test_rmse(model, test) == pytest.approx(math.sqrt(sum(squares) / 14))
    shares = []
    monkeypatch.setattr(ratings, "sum_over_ranks", lambda values: shares.append(*values) or [14.0])
    monkeypatch.setattr(ratings, "world_size", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(ratings, "rank", lambda rank=rank: rank)
        assert ratings._test_rmse(model, test) == 1
    assert sum(shares) == pytest.approx(sum(squares))
    assert min(shares) > 0
    monkeypatch.setattr(ratings, "sum_over_ranks", lambda values: [math.nan])
    with pytest.raises(DivergedError, match=r"^the test RMSE is nan: training has diverged in its"):
        ratings._test_rmse(model, test)


def people(labels):
    columns = {name: np.array(["a"] * len(labels), object) for name in CATEGORIES}
    columns |= {name: np.array([str(i) for i in range(len(labels))], object) for name in NUMBERS}
    return Adult(columns, torch.tensor(labels))


def test_a_fifth_of_the_people_is_tested_on(monkeypatch, capsys):
    monkeypatch.setattr(wide, "adult", lambda data: people([0.0, 1.0] * 20))
    for data, name in (("x", "x"), (None, "The Adult census data")):
        train, test = wide.load_people(argparse.Namespace(data=data))
        assert (len(train), len(test)) == (32, 8)
        assert capsys.readouterr().out == (
            f"{name}: 40 people; 32 are trained on, a random fifth, 8, are tested on\n"
        )
    monkeypatch.setattr(wide, "adult", lambda data: people([1.0] * 10))
    message = "^--data x: the test part, 2 of 10 people, must have some of either income$"
    with pytest.raises(UsageError, match=message):
        wide.load_people(argparse.Namespace(data="x"))


class Wide:
    """A model whose probabilities are the matrix's first column."""

    def probabilities(self, matrix):
        return matrix.to_dense()[:, 0]


def test_ranks_share_the_tested_people(monkeypatch):
    labels = torch.tensor([0.0, 1, 0, 1, 1])
    values = torch.tensor([[0.1], [0.9], [0.4], [0.3], [0.6]])
    matrix = values.to_sparse_csr()
    monkeypatch.setattr(wide, "EVALUATION_BATCH", 2)
    found = wide._evaluate(Wide(), matrix, labels)
    losses = [-math.log(x) for x in (0.9, 0.9, 0.6, 0.3, 0.6)]
    assert found == {
        "test AUC": pytest.approx(5 / 6), "test log loss": pytest.approx(sum(losses) / 5)
    }  # fmt: skip
    monkeypatch.setattr(wide, "world_size", lambda: 2)
    monkeypatch.setattr(wide, "EVALUATION_BATCH", 4)
    gathered = []
    monkeypatch.setattr(wide, "gather", lambda tensor: gathered.append(tensor) or tensor)
    for rank in range(2):
        monkeypatch.setattr(wide, "rank", lambda rank=rank: rank)
        wide._evaluate(Wide(), matrix, labels)
    shares = [sorted(round(x, 1) for x in part.tolist()) for part in gathered[::2]]
    assert sorted(shares[0] + shares[1]) == [0.1, 0.3, 0.4, 0.6, 0.9]
    with pytest.raises(DivergedError, match="a probability is not finite"):
        wide._evaluate(Wide(), (values / 0).to_sparse_csr(), labels)


def test_the_original_ends_when_interrupted(monkeypatch):
    trainer = argparse.Namespace(history=[], interrupted=False)

    def fit(*_, **__):
        assert not trainer.interrupted
        trainer.history.append(argparse.Namespace(loss=1.0))
        trainer.interrupted = True

    trainer.fit = fit
    monkeypatch.setattr(autoencoder.training, "make_trainer", lambda *_, **__: trainer)
    history = RatedItems(some_ratings(2))
    model = argparse.Namespace(history=history, optimizers=list)
    args = argparse.Namespace(epochs=100, batch_size=None, resume=False)
    assert autoencoder._fit_original(model, args) is trainer
    assert len(trainer.history) == 1


def test_the_original_has_a_largest_size(monkeypatch):
    history = RatedItems(some_ratings(5))
    monkeypatch.setattr(autoencoder, "ORIGINAL_CELLS", 10)
    autoencoder._check_cells(history)
    monkeypatch.setattr(autoencoder, "ORIGINAL_CELLS", 9)
    with pytest.raises(UsageError, match="of 2 users and 5 items, which has more than 9 cells"):
        autoencoder._check_cells(history)


def test_options_of_recommendations_are_checked_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autoencoder.ranks, "train", lambda *_: 7)
    (tmp_path / "file").touch()

    def run(**others):
        args = {"recs": None, "data": None, "save": None, "original": False, "dim": None}
        return autoencoder._train(argparse.Namespace(**{**args, **others}))

    assert run() == run(original=True) == run(dim=3) == run(recs="new", save="x") == 7
    for options, message in (
        ({"recs": "no/x"}, "^--recs no/x: cannot write into"),
        ({"recs": "file", "data": "file"}, "^--recs file: is the file that is read"),
        ({"recs": "new", "save": "./new"}, "^--recs new: is the file of --save"),
        ({"original": True, "dim": 3}, "^--dim 3: --original has layers of its own$"),
    ):
        with pytest.raises(UsageError, match=message):
            run(**options)


def test_scores_that_are_no_numbers():
    scores = torch.tensor([[1.0, math.nan]])
    best = Recommendations(torch.tensor([0]), torch.tensor([[1, 2]]), scores)
    with pytest.raises(DivergedError, match="a score is not a number: training has diverged in i"):
        autoencoder._metrics(best, some_ratings(3))
    items = torch.tensor([[1, *range(90, 99)]])
    found = Recommendations(torch.tensor([0]), items, torch.ones(1, 10))
    precision, recall, gain = autoencoder._metrics(found, some_ratings(3))
    assert (precision, recall) == pytest.approx((1 / 10, 1 / 3))
    assert 0 < gain < 1


def test_titles_stand_in_a_column_of_their_own(capsys):
    items = torch.tensor([[7, 1234], [5, 0]])
    scores = torch.tensor([[10.0, 0.5], [2.0, -torch.inf]])
    best = Recommendations(torch.tensor([1, 22]), items, scores)
    recommend._show(best, 9, {7: "A (1)"})
    assert capsys.readouterr().out.splitlines() == [
        "user  item    score  title",
        "   1     7  10.0000  A (1)",
        "   1  1234   0.5000",
        "  22     5   2.0000",
    ]
    recommend._show(best, 1, {})
    assert capsys.readouterr().out == "user  item    score\n   1     7  10.0000\n"
