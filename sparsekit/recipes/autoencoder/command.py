"""``sparsekit train autoencoder``: predicts which items users will rate next."""

from __future__ import annotations

import argparse
import io
import math

import torch

from ...cli import ranks, training
from ...cli.common import (
    UsageError,
    check_apart,
    check_folder,
    check_other_file,
    count,
    number,
    rank,
    writing,
)
from ...datasets import Ratings
from ...errors import DivergedError
from ...train import Trainer
from ...train.metrics import ndcg_at_k, precision_at_k, recall_at_k
from ..ratings.command import load_ratings
from .dense_model import DenseAutoencoder
from .model import Autoencoder
from .rated_items import RatedItems
from .recommend import MOVIELENS
from .recommendations import Recommendations, popular, recommend

K = 10
# The defaults of the command and the model were chosen using the latest fifth of each user's
# training ratings.
DEFAULT_EPOCHS = 40
DEFAULT_BATCH = 64
DEFAULT_DIM = 64
# Number of epochs as in the original, where an epoch is a single batch of all users.
ORIGINAL_EPOCHS = 400
ORIGINAL_SHOWN = 50
ORIGINAL_CELLS = 2**31


def add(models: argparse._SubParsersAction[training.TrainingParser]) -> None:
    """Add ``sparsekit train autoencoder`` to the parser."""
    train = training.add(
        models,
        "autoencoder",
        _train,
        help="train a recommender and compare it with what is popular",
        description="Train an autoencoder on MovieLens-100K, or on a file of ratings, to recommend "
        "items: the latest fifth of each user's ratings is the test part, the others are trained "
        "on.",
        data="ratings of your own (default: MovieLens-100K), as `sparsekit train ratings` takes "
        "them",
        save="where to write the trained model, for `sparsekit recommend`",
    )
    train.add_argument(
        "--recs",
        metavar="FILE",
        help=f"where to write the {K} best items of each user, as `sparsekit recommend` does",
    )
    train.add_argument(
        "--epochs",
        type=count,
        help=f"passes over the users (default: {DEFAULT_EPOCHS}; {ORIGINAL_EPOCHS} with "
        f"--original)",
    )
    shown = f" (default: {DEFAULT_BATCH}; all with --original)"
    training.add_batch_size(train, "users", default=None, shown=shown)
    train.add_argument(
        "--dim",
        type=number(int, 1, 2**16),
        help=f"elements of an item's vector (default: {DEFAULT_DIM}); not of --original",
    )
    train.add_argument(
        "--original",
        action="store_true",
        help="train on dense rows as tfautorec does: layers of 10, 5 and 10 units, all cells in "
        "the loss, TensorFlow's RMSProp",
    )
    training.add_options(train, seed="of initial weights, of what is drawn and the order of users")


def _train(args: argparse.Namespace) -> int:
    check_folder(args.recs, "--recs")
    check_other_file("--recs", args.recs, args.data)
    check_apart("--recs", args.recs, "--save", args.save)
    if args.original and args.dim is not None:
        raise UsageError(f"--dim {args.dim}: --original has layers of its own")
    return ranks.train(args, load_ratings, _fit_and_report)


def _fit_and_report(data: tuple[Ratings, Ratings], args: argparse.Namespace) -> int:
    train, test = data
    history = RatedItems(train)
    source = args.data or MOVIELENS
    model: Autoencoder | DenseAutoencoder
    if args.original:
        _check_cells(history)
        model = DenseAutoencoder(history, seed=args.seed, source=source)
        trainer = _fit_original(model, args)
    else:
        model = Autoencoder(history, dim=args.dim or DEFAULT_DIM, seed=args.seed, source=source)
        trainer = _fit(model, test, args)
    if trainer.interrupted:
        return 130
    best = recommend(model, K)
    found = _metrics(best, test)
    training.save(args, model)
    if rank() == 0:
        if args.recs is not None:
            with writing("--recs", args.recs):
                best.write(args.recs)
        _report(trainer, found, _metrics(popular(history, K), test))
    return 0


def _check_cells(history: RatedItems) -> None:
    users, items = len(history.users), len(history.items)
    if users * items > ORIGINAL_CELLS:
        raise UsageError(
            f"--original makes a dense matrix of {users:,} users and {items:,} items, which has "
            f"more than {ORIGINAL_CELLS:,} cells; leave it out"
        )


def _fit(model: Autoencoder, test: Ratings, args: argparse.Namespace) -> Trainer:
    users = len(model.history.users)
    epochs, batch_size = args.epochs or DEFAULT_EPOCHS, args.batch_size or DEFAULT_BATCH
    optimizers = model.optimizers()
    steps = epochs * math.ceil(users / batch_size)
    trainer = training.make_trainer(
        args,
        model,
        lambda _, batch: (model.losses(batch[0]), 0.0),
        optimizers,
        schedulers=training.falling(optimizers, steps),
    )
    trainer.fit(
        (torch.arange(users),),
        epochs=epochs,
        global_batch_size=batch_size,
        # Test metrics are only reported; no choice depends on them.
        evaluate=lambda _: {f"test P@{K}": _metrics(recommend(model, K), test)[0]},
        resume=args.resume,
    )
    return trainer


def _fit_original(model: DenseAutoencoder, args: argparse.Namespace) -> Trainer:
    users = len(model.history.users)
    trainer = training.make_trainer(
        args,
        model,
        lambda _, batch: (model.losses(batch[0]), 0.0),
        model.optimizers(),
        stream=io.StringIO(),  # hide the progress: there are too many epochs to print
    )
    epochs = args.epochs or ORIGINAL_EPOCHS
    data, batch_size = (torch.arange(users),), args.batch_size or users
    if args.resume:
        trainer.fit(data, epochs=0, global_batch_size=batch_size, resume=True)
    while len(trainer.history) < epochs and not trainer.interrupted:
        more = min(ORIGINAL_SHOWN, epochs - len(trainer.history))
        trainer.fit(data, epochs=more, global_batch_size=batch_size)
        if rank() == 0:
            done = len(trainer.history)
            print(f"epoch {done}/{epochs}  loss {trainer.history[-1].loss:.5f}", flush=True)
    return trainer


def _metrics(best: Recommendations, test: Ratings) -> tuple[float, float, float]:
    """Return the precision, recall and NDCG of recommendations at K."""
    if best.scores.isnan().any():  # the last update may have diverged
        raise DivergedError("a score is not a number: training has diverged in its last step")
    hits = best.hits(test)
    return precision_at_k(*hits, K), recall_at_k(*hits, K), ndcg_at_k(*hits, K)


def _report(trainer: Trainer, found: tuple[float, ...], baseline: tuple[float, ...]) -> None:
    names = (f"test P@{K}", f"recall@{K}", f"NDCG@{K}")
    print(f"\n{'':12}" + "".join(f"{name:>12}" for name in names))
    for name, values in {"popularity": baseline, "model": found}.items():
        print(f"{name:12}" + "".join(f"{value:12.4f}" for value in values))
    seconds = sum(epoch.seconds for epoch in trainer.history)
    loss = trainer.history[-1].loss
    print(f"\n{len(trainer.history)} epochs in {seconds:.1f} s; loss {loss:.5f}")
