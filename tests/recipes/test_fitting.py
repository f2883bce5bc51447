"""Commands train the right model on the right data, and then save and report."""

import argparse
import math

import numpy as np
import pytest
import torch
from fake_trainer import FakeTrainer

from sparsekit.cli.common import UsageError
from sparsekit.datasets import Adult, Ratings
from sparsekit.datasets.adult import CATEGORIES, NUMBERS
from sparsekit.distributed.world import settings
from sparsekit.errors import DivergedError
from sparsekit.models import DeepCoNN, RatingModel, WideModel
from sparsekit.nn.layer import EmbeddingLayer
from sparsekit.optim import LazyAdam
from sparsekit.recipes.deepconn import command as deepconn
from sparsekit.recipes.ratings import command as ratings
from sparsekit.recipes.wide import command as wide
from sparsekit.train.feed import of_tensors

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

COMMANDS = [ratings, wide, deepconn]


@pytest.fixture
def trainer(monkeypatch):
    made = FakeTrainer()
    for command in COMMANDS:
        monkeypatch.setattr(command.training, "make_trainer", made.make)
    return made


@pytest.fixture
def saves(monkeypatch):
    """Replace saving; return a list of the arguments of each save."""
    found = []
    monkeypatch.setattr(ratings.training, "save", lambda *args: found.append(args))
    return found


def on_rank(monkeypatch, number):
    for command in COMMANDS:
        monkeypatch.setattr(command, "rank", lambda: number)


def rated(users, items, first=0):
    user, item = torch.arange(users).repeat_interleave(items), torch.arange(items).repeat(users)
    return Ratings(user, item + first, 1.0 + (user + item) % 5, item.double())


def arguments(**others):
    given = {"epochs": 3, "batch_size": 4, "seed": 7, "lr": 0.25, "resume": "yes", "save": None}
    return argparse.Namespace(**given | others)


# Ratings


def of_ratings(**others):
    return arguments(**{"dim": 2, "capacity": 50, "wire_dtype": "float32", **others})


def test_ratings_are_fitted(trainer, monkeypatch):
    falls = []
    monkeypatch.setattr(ratings.training, "falling", lambda *args: falls.append(args) or "falls")
    train, test = rated(3, 3), rated(2, 2)
    model = RatingModel(train, dim=2, capacity=50)
    assert ratings._fit(model, train, test, of_ratings()) is trainer
    (call,) = trainer.calls
    users, items, values = call.pop("data")
    assert users is train.users
    assert items is train.items
    assert values is train.ratings
    assert call.pop("evaluate")(model) == {"test RMSE": ratings._test_rmse(model, test)}
    assert call == {"epochs": 3, "global_batch_size": 4, "resume": "yes"}
    sparse, dense = trainer.optimizers
    assert isinstance(sparse, LazyAdam)
    assert isinstance(dense, torch.optim.Adam)
    assert [group["lr"] for group in sparse.param_groups] == [0.25]
    assert [group["lr"] for group in dense.param_groups] == [1e-3]
    assert falls == [(trainer.optimizers, 3 * 3)]
    assert trainer.options == {"schedulers": "falls"}
    monkeypatch.setattr(model, "losses", lambda *batch: batch)
    assert trainer.loss(None, (1, 2, 3)) == (1, 2, 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_after_training_on_ratings(trainer, saves, monkeypatch, capsys, rank):
    on_rank(monkeypatch, rank)
    trainer.metrics = {"test RMSE": 0.5}
    monkeypatch.setattr(settings, "wire_dtype", None)
    args = of_ratings(wire_dtype="bfloat16")
    assert ratings._fit_and_report((rated(3, 3), rated(2, 2)), args) == 0
    ((saved_args, model),) = saves
    assert saved_args is args
    assert model is trainer.model
    layers = [layer for layer in model.modules() if isinstance(layer, EmbeddingLayer)]
    assert len(layers) > 0
    assert all(layer.wire_dtype == torch.bfloat16 for layer in layers)
    assert settings.wire_dtype == torch.bfloat16
    out = capsys.readouterr().out
    assert ("model                0.5000" in out) == (rank == 0)
    ratings._fit_and_report((rated(3, 3), rated(2, 2)), of_ratings())
    assert settings.wire_dtype is None


def test_the_rating_model_gets_its_options(trainer, monkeypatch):
    made = []

    def no_memory(train, **options):
        made.append(options)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ratings, "RatingModel", no_memory)
    with pytest.raises(UsageError, match="no memory for tables of 1,234 rows of dim 2: use a smal"):
        ratings._fit_and_report((rated(1, 1), rated(1, 1)), of_ratings(capacity=1234))
    assert made == [{"dim": 2, "capacity": 1234, "seed": 7}]


# The wide model


def people(count):
    columns = {name: np.array(["a", "b"] * (count // 2), object) for name in CATEGORIES}
    columns |= {name: np.array([str(i % 9) for i in range(count)], object) for name in NUMBERS}
    return Adult(columns, torch.tensor([0.0, 1.0] * (count // 2)))


def of_people(**others):
    return arguments(**{"loss": "mse", "optimizer": "ftrl", **others})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("batch_size", [4, 100])
def test_the_wide_model_is_fitted(trainer, saves, monkeypatch, capsys, rank, batch_size):
    on_rank(monkeypatch, rank)
    made, steps = [], []
    of_model = WideModel.optimizer
    monkeypatch.setattr(wide, "WideModel", lambda *a, **o: made.append(o) or WideModel(*a, **o))
    monkeypatch.setattr(
        WideModel, "optimizer", lambda model, *args: steps.append(args) or of_model(model, *args)
    )
    monkeypatch.setattr(WideModel, "weights", lambda model: torch.tensor([[0.0, 1, 0], [0, 3, 4]]))
    trainer.metrics = {"test AUC": 0.75, "test log loss": 0.25}
    train, test = people(20), people(6)
    args = of_people(batch_size=batch_size)
    assert wide._fit_and_report((train, test), args) == 0
    assert made == [{"loss": "mse", "seed": 7}]
    assert steps == [("ftrl", min(batch_size, 20))]
    (call,) = trainer.calls
    rows, labels = call.pop("data")
    assert rows.tolist() == list(range(20))
    assert labels is train.labels
    evaluate = call.pop("evaluate")
    if rank == 0:  # of one rank
        assert evaluate(None).keys() == {"test AUC", "test log loss"}
    assert call == {"epochs": 3, "global_batch_size": batch_size, "resume": "yes"}
    losses, penalty = trainer.loss(None, (rows[3:5], labels[3:5]))
    matrix = trainer.model.encode({name: column[3:5] for name, column in train.columns.items()})
    torch.testing.assert_close(losses, trainer.model.losses(matrix, labels[3:5]))
    assert penalty == 0.0
    assert [saved[1] for saved in saves] == [trainer.model]
    lines = capsys.readouterr().out.splitlines()
    if rank != 0:
        assert lines == []
        return
    assert lines[0].startswith("14 columns of text are a sparse matrix of ")
    assert lines[3:5] == [
        f"constant rate    0.5000{math.log(2):15.4f}",
        "model            0.7500         0.2500",
    ]
    assert lines[6] == "3 epochs in 0.8 s; 6 weights of 2 columns, 50% of them exactly zero"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_interrupted_run_saves_and_reports_nothing(trainer, saves, monkeypatch, command, text):
    trainer.interrupted_after = 1
    monkeypatch.setattr(command, "_report", None)
    data, args = {
        ratings: ((rated(3, 3), rated(2, 2)), of_ratings()),
        wide: ((people(20), people(6)), of_people()),
        deepconn: (text, of_text()),
    }[command]
    assert command._fit_and_report(data, args) == 130
    assert saves == []


# DeepCoNN


def of_text(**others):
    return arguments(**{"length": 6, "placement": "single", "data": None, **others})


@pytest.fixture
def text(monkeypatch):
    monkeypatch.setattr(deepconn, "movielens_100k", lambda: rated(2, 10))
    films = {item: (f"Film{item}", "1999", "Drama") for item in range(10)}
    monkeypatch.setattr(deepconn, "movielens_100k_films", lambda: films)
    return deepconn._load(of_text())


def small(text, **options):
    return DeepCoNN(len(text.corpus.vocabulary), 6, dim=3, filters=2, hidden=4, **options)


def test_deepconn_is_fitted(trainer, text):
    model = small(text)
    assert deepconn._fit(model, text, of_text())
    (call,) = trainer.calls
    users, items, values = call.pop("data")
    assert users is text.train.users
    assert items is text.train.items
    assert values is text.train.ratings
    rmse = call.pop("evaluate")(model)
    assert rmse == {"test RMSE": pytest.approx(math.sqrt(deepconn._test_mse(model, text)))}
    assert call == {"epochs": 3, "global_batch_size": 4, "resume": "yes"}
    (optimizer,) = trainer.optimizers
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}
    model.eval()
    losses, penalty = trainer.loss(None, (users[:3], items[:3], values[:3]))
    expected = model.losses(*text.corpus(users[:3], items[:3]), values[:3])
    torch.testing.assert_close(losses, expected)
    assert penalty == 0.0


def test_a_placed_model_takes_the_steps_of_a_trainer(text, capsys, monkeypatch):
    model, plain = small(text, seed=1), small(text, seed=1)
    args = of_text(epochs=2, lr=0.01)
    modes = []
    of_model = DeepCoNN.losses
    monkeypatch.setattr(
        DeepCoNN, "losses", lambda self, *b: modes.append(self.training) or of_model(self, *b)
    )
    torch.manual_seed(0)
    assert deepconn._fit_placed(model, text, args)
    assert modes[:4] == [True] * 4
    optimizer = plain.optimizer(0.01)
    generator = torch.Generator().manual_seed(7)
    columns = text.train.users, text.train.items, text.train.ratings
    torch.manual_seed(0)
    means = []
    for _ in range(2):
        total = 0.0
        for share in of_tensors(columns, 4, generator, 0, 1):
            losses = of_model(plain, *text.corpus(*share.batch[:2]), share.batch[2])
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            total += losses.sum().item()
        means.append(total / 16)
        tested = math.sqrt(deepconn._test_mse(plain, text))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    lines = [line for line in capsys.readouterr().out.split("\n") if "test RMSE" in line]
    assert len(lines) == 2
    for number, (line, mean) in enumerate(zip(lines, means, strict=True), 1):
        assert f"epoch {number}/2" in line
        assert f"loss {mean:.4f}" in line
    assert f"test RMSE {tested:.4f}" in lines[-1]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("placement", ["single", "split"])
def test_after_training_deepconn(text, monkeypatch, capsys, rank, placement):
    on_rank(monkeypatch, rank)
    made, fits = [], []
    monkeypatch.setattr(deepconn, "world_size", lambda: 2)
    monkeypatch.setattr(deepconn, "DeepCoNN", lambda *a, **o: made.append((a, o)) or "model")
    for name in ("_fit", "_fit_placed"):
        monkeypatch.setattr(deepconn, name, lambda *args, name=name: fits.append((name, args)) or 1)
    monkeypatch.setattr(deepconn, "_test_mse", lambda model, data: 4.0)
    args = of_text(placement=placement)
    assert deepconn._fit_and_report(text, args) == 0
    words = len(text.corpus.vocabulary)
    assert made == [((words, 6), {"placement": placement, "seed": 7})]
    name = "_fit" if placement == "single" else "_fit_placed"
    assert fits == [(name, ("model", text, args))]
    out = capsys.readouterr().out
    assert ("model                4.0000     2.0000" in out) == (rank == 0)
    assert ("3 epochs in 0.0 s, tests included" in out) == (rank == 0)


def test_a_diverging_run_on_ratings_saves_nothing(trainer, saves, monkeypatch):
    def diverge(*args):
        raise DivergedError("why")

    monkeypatch.setattr(ratings, "_fit", diverge)
    with pytest.raises(DivergedError):
        ratings._fit_and_report((rated(3, 3), rated(2, 2)), of_ratings(save="x"))
    assert saves == []
