"""``sparsekit train ratings``: trains a rating model and compares it with two baselines."""

from __future__ import annotations

import argparse
import math

import torch

from ...cli import ranks, training
from ...cli.common import UsageError, count, number, rank, sum_over_ranks, world_size
from ...datasets import Ratings, movielens_100k
from ...distributed import init
from ...errors import DivergedError, TableFullError
from ...optim import LazyAdam, split_embedding_variable_from_others
from ...train import Trainer
from .baselines import fit_bias_baseline, rmse
from .model import RatingModel

# The number of epochs, the model's size and the learning rates were chosen using the latest fifth
# of each user's training ratings. The test part was not used.
DEFAULT_EPOCHS = 20
DENSE_LR = 1e-3
TEST_FRACTION = 0.2
EVALUATION_BATCH = 8192


def add(models: argparse._SubParsersAction[training.TrainingParser]) -> None:
    """Add ``sparsekit train ratings`` to the parser."""
    train = training.add(
        models,
        "ratings",
        _train,
        help="train a rating model and compare it with two baselines",
        description="Train a rating model on MovieLens-100K, or on a file of ratings: the latest "
        "fifth of each user's ratings is the test part, the others are trained on.",
        data="ratings of your own (default: MovieLens-100K): user, item, rating and timestamp, "
        "separated by commas (CSV), tabs or '::', in this order or with a header that names them; "
        "ids are integers or any text",
        save="where to write the trained model, for sparsekit.models.RatingModel.load",
    )
    train.add_argument("--epochs", type=count, default=DEFAULT_EPOCHS, help="passes over the data")
    training.add_batch_size(train, "ratings", default=1024)
    train.add_argument("--dim", type=count, default=32, help="elements of an embedding vector")
    train.add_argument(
        "--lr",
        type=number(float, 1e-12, 1e12),
        default=0.02,
        help="learning rate of the embeddings; it falls to zero over the epochs",
    )
    training.add_options(train, seed="of initial vectors and the order of ratings")
    train.add_argument(
        "--capacity",
        type=count,
        help="rows of each table, on each rank; tables grow without it, and have 100,000 on a GPU",
    )
    train.add_argument(
        "--wire-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of embedding vectors and their gradients between ranks",
    )


def _train(args: argparse.Namespace) -> int:
    return ranks.train(args, load_ratings, _fit_and_report)


def _fit_and_report(data: tuple[Ratings, Ratings], args: argparse.Namespace) -> int:
    train, test = data
    init(wire_dtype=torch.bfloat16 if args.wire_dtype == "bfloat16" else None)
    try:
        model = RatingModel(train, dim=args.dim, capacity=args.capacity, seed=args.seed)
    except RuntimeError as error:  # torch's allocator raises RuntimeError when memory runs out
        size = "" if args.capacity is None else f" of {args.capacity:,} rows"
        raise UsageError(
            f"no memory for tables{size} of dim {args.dim}: use a smaller --capacity or --dim"
        ) from error
    try:
        trainer = _fit(model, train, test, args)
    except TableFullError as error:
        raise UsageError(f"{error} Here that is --capacity.") from error
    except DivergedError as error:
        raise DivergedError(f"{error}; try a smaller --lr than {args.lr:g}") from error
    if trainer.interrupted:
        return 130
    training.save(args, model)
    of_rank = model.table_sizes()
    sizes = dict(zip(of_rank, map(int, sum_over_ranks(of_rank.values())), strict=True))
    if rank() == 0:
        _report(trainer, train, test, sizes)
    return 0


def load_ratings(args: argparse.Namespace) -> tuple[Ratings, Ratings]:
    """Read the ratings in ``--data``, and split them into a training part and a test part."""
    data = args.data
    with training.reading("--data", data):
        ratings = movielens_100k(data)
    train, test = ratings.split_by_time(TEST_FRACTION)
    if len(test) == 0:
        raise UsageError(f"--data {data}: no user has the 5 ratings of which one can be tested on")
    print(
        f"{data or 'MovieLens-100K'}: {len(ratings):,} ratings; {len(train):,} are trained on, "
        f"the latest fifth of each user's, {len(test):,}, are tested on",
        flush=True,
    )
    return train, test


def _fit(model: RatingModel, train: Ratings, test: Ratings, args: argparse.Namespace) -> Trainer:
    sparse, dense = split_embedding_variable_from_others(model)
    optimizers = [LazyAdam(sparse, lr=args.lr), torch.optim.Adam(dense, lr=DENSE_LR)]
    steps = args.epochs * math.ceil(len(train) / args.batch_size)
    trainer = training.make_trainer(
        args,
        model,
        lambda _, batch: model.losses(*batch),
        optimizers,
        schedulers=training.falling(optimizers, steps),
    )
    trainer.fit(
        (train.users, train.items, train.ratings),
        epochs=args.epochs,
        global_batch_size=args.batch_size,
        # Test metrics are only reported; no choice depends on them.
        evaluate=lambda model: {"test RMSE": _test_rmse(model, test)},
        resume=args.resume,
    )
    return trainer


def _test_rmse(model: torch.nn.Module, test: Ratings) -> float:
    """Compute the test RMSE. Ranks share the work, and all make the same number of lookups."""
    squares = 0.0
    columns = (test.users, test.items, test.ratings)
    for batch in zip(*(column.split(EVALUATION_BATCH) for column in columns), strict=True):
        users, items, ratings = (c.tensor_split(world_size())[rank()] for c in batch)
        squares += (model(users, items).double() - ratings.double()).square().sum().item()
    result = math.sqrt(sum_over_ranks([squares])[0] / len(test))
    if not math.isfinite(result):  # the last update may have diverged
        raise DivergedError(f"the test RMSE is {result}: training has diverged in its last step")
    return result


def _report(trainer: Trainer, train: Ratings, test: Ratings, sizes: dict[str, int]) -> None:
    baseline = fit_bias_baseline(train)
    mean = torch.full_like(test.ratings, baseline.mean)
    results = {
        "global mean": rmse(mean, test.ratings),
        "user + item bias": rmse(baseline.predict(test.users, test.items), test.ratings),
        "model": trainer.history[-1].metrics["test RMSE"],
    }
    print(f"\n{'':18}test RMSE")
    for name, value in results.items():
        print(f"{name:18}{value:9.4f}")
    rows = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
    seconds = sum(epoch.seconds for epoch in trainer.history)
    print(f"\n{len(trainer.history)} epochs in {seconds:.1f} s; rows in the tables: {rows}")
