"""Training commands make the right trainer, schedule, default model and profile."""

import argparse
import sys

import pytest
import torch

from sparsekit.cli import profile, training
from sparsekit.cli.common import UsageError
from sparsekit.cli.dispatch import make_parser
from sparsekit.cli.train import with_model
from sparsekit.recipes.ratings import command as ratings


def test_a_trainer_has_the_options_and_what_else_is_given(monkeypatch):
    made = []
    monkeypatch.setattr(training, "Trainer", lambda *a, **others: made.append((a, others)))
    args = argparse.Namespace(seed=3, log=None, checkpoint=None)
    training.make_trainer(args, "model", "losses", ["optimizer"], clip_norm=1)
    expected = {"stream": sys.stdout, "logs": [], "seed": 3, "clip_norm": 1}
    assert made.pop() == (("model", "losses", ["optimizer"]), expected)
    training.make_trainer(args, "model", "losses", [], stream="x", logs=["y"])
    assert made.pop()[1] == {"stream": "x", "logs": ["y"], "seed": 3}
    monkeypatch.setattr(training.checkpoints, "options", lambda args: {"checkpoints": "z"})
    training.make_trainer(args, "model", "losses", [])
    assert made.pop()[1]["checkpoints"] == "z"


def test_rates_fall_to_zero():
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=lr) for lr in (1.0, 0.5)]
    schedulers = training.falling(optimizers, 4)
    for left in (0.75, 0.5, 0.25, 0, 0):
        for optimizer, scheduler, lr in zip(optimizers, schedulers, (1.0, 0.5), strict=True):
            optimizer.step()
            scheduler.step()
            assert scheduler.get_last_lr() == pytest.approx([left * lr])


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["wide"], ["wide", "--epochs", "3"]])
def test_a_model_is_as_it_is_named(arguments):
    assert with_model(arguments) == arguments


@pytest.mark.parametrize("arguments", [[], ["--epochs", "3"], ["--set", "lr=1"]])
def test_without_a_name_ratings_are_trained_on(arguments):
    assert with_model(arguments) == ["ratings", *arguments]


def test_a_profile_has_the_options_of_training_and_its_own():
    args = make_parser().parse_args(["profile", "ratings", "--epochs", "3"])
    assert (args.epochs, args.steps, args.lines, args.trace) == (3, 10, 20, None)
    assert (args.run, args.train) == (profile._profile, ratings._train)
    args.train = lambda given: 7 if given is args else 0
    assert args.run(args) == 7
    args.trace = "/no/such/folder/x"
    with pytest.raises(UsageError, match=r"^--trace /no/such/folder/x: cannot write into"):
        args.run(args)
