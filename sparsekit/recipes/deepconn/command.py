"""``sparsekit train deepconn``: predicts ratings from text, with layers on one rank or on two."""

from __future__ import annotations

import argparse
import io
import math
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...cli import ranks, training
from ...cli.common import UsageError, count, number, rank, sum_over_ranks, world_size
from ...datasets import Ratings, movielens_100k
from ...datasets.films import movielens_100k_films
from ...datasets.reviews import Corpus, read_reviews, reviews_of_films, split_reviews, words_of
from ...errors import DivergedError
from ...train import Progress
from ...train.feed import of_tensors
from ..ratings.baselines import fit_bias_baseline, rmse
from .model import PLACEMENTS, DeepCoNN

TEST_FRACTION = 0.2
EVALUATION_BATCH = 256


@dataclass(frozen=True, eq=False)
class Data:
    """Pairs of users and items for training and testing, with their documents."""

    train: Ratings
    test: Ratings
    corpus: Corpus


def add(models: argparse._SubParsersAction[training.TrainingParser]) -> None:
    """Add ``sparsekit train deepconn`` to the parser."""
    train = training.add(
        models,
        "deepconn",
        _train,
        help="train two towers on text and compare them with two baselines",
        description="Train DeepCoNN on reviews, or on MovieLens-100K, where the titles and genres "
        "of films stand for text: the latest fifth of each user's ratings is the test part, the "
        "others are trained on, and documents are made of those.",
        data="reviews of your own (default: MovieLens-100K): JSON lines with reviewerID, asin, "
        "overall, reviewText and perhaps unixReviewTime, as Amazon's",
    )
    train.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default=PLACEMENTS[0],
        help="single: all layers on each rank, which have a part of each batch; split: a tower on "
        "each of 2 ranks; alternating: every second layer of a tower is on the other rank",
    )
    train.add_argument("--epochs", type=count, default=3, help="passes over the data")
    training.add_batch_size(train, "ratings", default=32)
    train.add_argument(
        "--length",
        type=number(int, 4, 100_000),
        default=200,
        help="words of a document; DeepCoNN's is 800",
    )
    train.add_argument("--lr", type=number(float, 1e-12, 1e12), default=1e-4, help="Adam's")
    training.add_options(train, seed="of initial weights and the order of ratings", num_ranks=None)


def _train(args: argparse.Namespace) -> int:
    needed = 1 if args.placement == "single" else 2
    args.ranks = args.ranks or needed
    if needed == 2 and args.ranks != 2 and not dist.is_torchelastic_launched():
        raise UsageError(f"--placement {args.placement} needs --ranks 2, got {args.ranks}")
    if needed == 2 and args.log is not None:
        raise UsageError(f"--log-to {args.log}: only --placement single is logged")
    if needed == 2 and args.checkpoint is not None:
        raise UsageError(f"--checkpoint {args.checkpoint}: only --placement single is saved")
    return ranks.train(args, _load, _fit_and_report)


def _load(args: argparse.Namespace) -> Data:
    begin = time.perf_counter()
    if args.data is None:
        ratings = movielens_100k()
        films = {
            item: words_of(f"{title} {genres}")
            for item, (title, _, genres) in movielens_100k_films().items()
        }
    else:
        with training.reading("--data", args.data):
            reviews = read_reviews(args.data)
        ratings = reviews.ratings
    of_train, of_test = split_reviews(ratings, TEST_FRACTION)
    if len(of_test) == 0:
        raise UsageError(
            f"--data {args.data}: no user has the 5 reviews of which one can be tested on"
        )
    train = ratings[of_train]
    written = reviews_of_films(train, films) if args.data is None else reviews[of_train]
    corpus = Corpus(written, args.length)
    print(
        f"{args.data or 'MovieLens-100K'}: {len(ratings):,} ratings; {len(train):,} are trained "
        f"on, the latest fifth of each user's, {len(of_test):,}, are tested on. "
        f"{len(corpus.vocabulary):,} words, documents of {args.length}: "
        f"{time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    return Data(train, ratings[of_test], corpus)


def _fit_and_report(data: Data, args: argparse.Namespace) -> int:
    if args.placement != "single" and world_size() != 2:
        raise UsageError(f"--placement {args.placement} needs 2 ranks, there are {world_size()}")
    model = DeepCoNN(
        len(data.corpus.vocabulary), args.length, placement=args.placement, seed=args.seed
    )
    fit = _fit if args.placement == "single" else _fit_placed
    begin = time.perf_counter()
    if not fit(model, data, args):
        return 130
    seconds = time.perf_counter() - begin
    mse = _test_mse(model, data)
    if rank() == 0:
        _report(data, mse)
        print(f"\n{args.epochs} epochs in {seconds:.1f} s, tests included")
    return 0


def _fit(model: DeepCoNN, data: Data, args: argparse.Namespace) -> bool:
    def losses(_: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
        users, items, ratings = batch
        return model.losses(*data.corpus(users, items), ratings), 0.0

    trainer = training.make_trainer(
        args,
        model,
        losses,
        [model.optimizer(args.lr)],
    )
    trainer.fit(
        (data.train.users, data.train.items, data.train.ratings),
        epochs=args.epochs,
        global_batch_size=args.batch_size,
        # Test metrics are only reported; no choice depends on them.
        evaluate=lambda _: {"test RMSE": math.sqrt(_test_mse(model, data))},
        resume=args.resume,
    )
    return not trainer.interrupted


def _fit_placed(model: DeepCoNN, data: Data, args: argparse.Namespace) -> bool:
    """Train a model whose layers are on two ranks, with the same batches as `Trainer`.

    `Trainer` requires the same layers on all ranks: it gives each rank a part of a batch, and
    averages gradients. Here each rank has different layers, and both get the whole batch.
    """
    optimizer = model.optimizer(args.lr)
    generator = torch.Generator("cpu").manual_seed(args.seed)
    columns = data.train.users, data.train.items, data.train.ratings
    for epoch in range(args.epochs):
        total = 0.0
        model.train()
        stream = sys.stdout if rank() == 0 else io.StringIO()
        with Progress(f"epoch {epoch + 1}/{args.epochs}", len(data.train), stream) as progress:
            for share in of_tensors(columns, args.batch_size, generator, 0, 1):
                users, items, ratings = share.batch
                losses = model.losses(*data.corpus(users, items), ratings)
                optimizer.zero_grad()
                losses.mean().backward()
                optimizer.step()
                total += losses.sum().item()
                mean = total / (progress.done + share.samples)
                progress.update(share.samples, lambda: mean)  # noqa: B023  (called at once)
                if not math.isfinite(total):  # both ranks raise, since both compute the loss
                    raise DivergedError(f"the loss of epoch {epoch + 1} is {total}")
            rate = progress.done / progress.seconds
            tested = math.sqrt(_test_mse(model, data))
            progress.finish(f" loss {mean:.4f}  test RMSE {tested:.4f}  {rate:,.0f} samples/s")
    return True


@torch.no_grad()
def _test_mse(model: DeepCoNN, data: Data) -> float:
    """Return the MSE on the test part; the ranks share the work if the placement is single."""
    model.eval()
    squares = 0.0
    parts = world_size() if model.placement == "single" else 1
    part = rank() % parts
    for index in torch.arange(len(data.test)).split(EVALUATION_BATCH):
        pairs = data.test[index.tensor_split(parts)[part]]
        losses = model.losses(*data.corpus(pairs.users, pairs.items), pairs.ratings)
        squares += losses.sum(dtype=torch.float64).item()
    model.train()
    mse = (sum_over_ranks([squares])[0] if parts > 1 else squares) / len(data.test)
    if not math.isfinite(mse):  # the last update may have diverged
        raise DivergedError(f"the test MSE is {mse}: training has diverged in its last step")
    return mse


def _report(data: Data, mse: float) -> None:
    test = data.test
    baseline = fit_bias_baseline(data.train)
    errors = {
        "constant mean": rmse(torch.full_like(test.ratings, baseline.mean), test.ratings) ** 2,
        "user + item bias": rmse(baseline.predict(test.users, test.items), test.ratings) ** 2,
        "model": mse,
    }
    print(f"\n{'':18}{'test MSE':>9}{'test RMSE':>11}")
    for name, error in errors.items():
        print(f"{name:18}{error:9.4f}{math.sqrt(error):11.4f}")
