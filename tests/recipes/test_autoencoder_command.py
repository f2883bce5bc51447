"""Tests of the autoencoder's command: defaults, the original's epochs, and work after training."""

import argparse
import itertools

import pytest
import torch
from fake_trainer import Epoch, FakeTrainer

from sparsekit.datasets import Ratings
from sparsekit.models import Autoencoder, DenseAutoencoder, RatedItems
from sparsekit.recipes.autoencoder import command


def ratings(users=3, items=12, first=0):
    """Return a rating of every item by every user; times follow the order of items."""
    user, item = torch.arange(users).repeat_interleave(items), torch.arange(items).repeat(users)
    return Ratings(user, item + first, 1.0 + item % 5, item.double())


def arguments(**others):
    given = {"original": False, "epochs": None, "batch_size": None, "dim": None, "seed": 3}
    given |= {"data": None, "save": None, "recs": None}
    return argparse.Namespace(**given | others)


@pytest.fixture
def trainer(monkeypatch):
    made = FakeTrainer()
    monkeypatch.setattr(command.training, "make_trainer", made.make)
    return made


@pytest.mark.parametrize(
    ("given", "epochs", "batch_size", "steps"),
    [
        ({}, 40, 64, 40),
        ({"epochs": 3, "batch_size": 2}, 3, 2, 6),
        ({"batch_size": 3}, 40, 3, 40),
    ],
)
def test_defaults_of_training(trainer, monkeypatch, given, epochs, batch_size, steps):
    falls = []
    monkeypatch.setattr(command.training, "falling", lambda *args: falls.append(args) or "falls")
    history = RatedItems(ratings())
    model = Autoencoder(history, dim=2)
    args = arguments(resume="yes", **given)
    assert command._fit(model, ratings(first=100), args) is trainer
    (call,) = trainer.calls
    evaluate, (rows,) = call.pop("evaluate"), call.pop("data")
    assert rows.tolist() == [0, 1, 2]
    assert call == {
        "epochs": epochs, "global_batch_size": batch_size, "resume": "yes"
    }  # fmt: skip
    assert evaluate(None) == {"test P@10": 0.0}
    monkeypatch.setattr(command, "_metrics", lambda best, test: (best.items.shape[1], 7, 8))
    assert evaluate(None) == {"test P@10": 10}
    assert falls == [(trainer.optimizers, steps)]
    assert trainer.options == {"schedulers": "falls"}
    losses, penalty = trainer.loss(None, (torch.tensor([1, 2]),))
    assert (losses.shape, penalty) == ((2,), 0.0)


@pytest.mark.parametrize(
    ("given", "epochs", "batch_size"),
    [
        ({}, [50] * 8, 3),
        ({"epochs": 70, "batch_size": 2}, [50, 20], 2),
        ({"epochs": 50}, [50], 3),
        ({"epochs": 1}, [1], 3),
    ],
)
def test_epochs_of_the_original(trainer, capsys, given, epochs, batch_size):
    model = DenseAutoencoder(RatedItems(ratings()))
    assert command._fit_original(model, arguments(resume=False, **given)) is trainer
    assert [call["epochs"] for call in trainer.calls] == epochs
    assert all(call["global_batch_size"] == batch_size for call in trainer.calls)
    assert trainer.calls[0]["data"][0].tolist() == [0, 1, 2]
    assert trainer.options.keys() == {"stream"}
    done = [*itertools.accumulate(epochs)]
    assert capsys.readouterr().out.splitlines() == [
        f"epoch {n}/{done[-1]}  loss {0.5 / e:.5f}" for n, e in zip(done, epochs, strict=True)
    ]


def test_the_original_goes_on_where_it_was(trainer, monkeypatch, capsys):
    monkeypatch.setattr(command, "rank", lambda: 1)
    model = DenseAutoencoder(RatedItems(ratings()))
    trainer.history = [Epoch(loss=1.0)] * 60
    command._fit_original(model, arguments(resume=True, epochs=100))
    first, *rest = trainer.calls
    assert (first["epochs"], first["resume"]) == (0, True)
    assert [call["epochs"] for call in rest] == [40]
    assert not any("resume" in call for call in rest)
    assert capsys.readouterr().out == ""  # rank 0 alone prints


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_after_training(trainer, monkeypatch, tmp_path, capsys, original, rank):
    monkeypatch.setattr(command, "rank", lambda: rank)
    saves = []
    monkeypatch.setattr(command.training, "save", lambda *args: saves.append(args))
    path = tmp_path / "recs.tsv"
    args = arguments(original=original, recs=str(path), data="mine.csv", epochs=2, resume=False)
    assert command._fit_and_report((ratings(items=20), ratings(first=10)), args) == 0
    ((saved_args, model),) = saves
    assert saved_args is args
    assert type(model) is (DenseAutoencoder if original else Autoencoder)
    assert model is trainer.model
    assert model.source == "mine.csv"
    assert path.exists() == (rank == 0)
    out = capsys.readouterr().out
    assert ("popularity" in out) == (rank == 0)
    if rank == 0:
        assert len(path.read_text().splitlines()) == 0  # each user has rated all items


def test_the_model_gets_dim_seed_and_source(trainer, monkeypatch):
    made = []

    def note(history, **options):
        made.append(options)
        raise KeyboardInterrupt

    for kind in ("Autoencoder", "DenseAutoencoder"):
        monkeypatch.setattr(command, kind, note)
    for given in ({}, {"dim": 5, "data": "x"}, {"original": True}):
        with pytest.raises(KeyboardInterrupt):
            command._fit_and_report((ratings(), ratings()), arguments(**given))
    usual = {"seed": 3, "source": "MovieLens-100K"}
    assert made == [{**usual, "dim": 64}, {**usual, "dim": 5, "source": "x"}, usual]


@pytest.mark.parametrize("original", [False, True])
def test_an_interrupted_run_saves_and_reports_nothing(trainer, monkeypatch, tmp_path, original):
    trainer.interrupted_after = 1
    monkeypatch.setattr(command.training, "save", None)
    monkeypatch.setattr(command, "recommend", None)
    args = arguments(original=original, recs=str(tmp_path / "x"), save="x", resume=False)
    assert command._fit_and_report((ratings(), ratings()), args) == 130
    assert not (tmp_path / "x").exists()


def test_the_report(capsys):
    trainer = FakeTrainer()
    trainer.history = [Epoch(loss=2.0, seconds=1.25), Epoch(loss=0.123456, seconds=1.25)]
    command._report(trainer, (0.5, 0.25, 0.125), (0.4, 0.3, 0.2))
    assert capsys.readouterr().out.splitlines() == [
        "",
        "               test P@10   recall@10     NDCG@10",
        "popularity        0.4000      0.3000      0.2000",
        "model             0.5000      0.2500      0.1250",
        "",
        "2 epochs in 2.5 s; loss 0.12346",
    ]
