"""``sparsekit train wide``: trains a wide network on hashed features of the Adult census data."""

from __future__ import annotations

import argparse
import time
import warnings

import torch

from ...cli import ranks, training
from ...cli.common import UsageError, count, rank, world_size
from ...datasets import Adult, adult
from ...datasets.adult import NUMBERS
from ...errors import DivergedError
from ...hashing import SplitHashEncoder
from ...train import Trainer
from ...train.metrics import auc, gather, log_loss
from ..buckets import QuantileBuckets
from .model import LOSSES, OPTIMIZERS, WideModel, select_rows

# A split that depended on --seed would test settings on data that was used to choose them.
TEST_FRACTION, SPLIT_SEED = 0.2, 0
# Loss, number of epochs, batch size, buckets and lengths were chosen using a fifth of the training
# part. The test part was not used.
DEFAULT_EPOCHS = 6
DEFAULT_BATCH = 256
NUMBER_BUCKETS = 32
# Number of matrix columns per feature: far more than its number of distinct values (at most 42), so
# that few values collide.
FEATURE_LENGTH = 1000
EVALUATION_BATCH = 8192


def add(models: argparse._SubParsersAction[training.TrainingParser]) -> None:
    """Add ``sparsekit train wide`` to the parser."""
    train = training.add(
        models,
        "wide",
        _train,
        help="train a wide network on hashed features and compare it with a constant",
        description="Train a wide network on the Adult census data, from raw text: who earns more "
        "than 50,000 dollars a year? A random fifth of the people is the test part, the others "
        "are trained on.",
        data="people of your own (default: the Adult data): CSV with the same columns, named by "
        "its first line or in the order of the UCI repository's adult.data",
        save="where to write the trained model, for sparsekit.models.WideModel.load",
    )
    train.add_argument("--epochs", type=count, default=DEFAULT_EPOCHS, help="passes over the data")
    training.add_batch_size(train, "people", default=DEFAULT_BATCH)
    train.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="adam with lr 0.002, or ftrl with lr 0.2 and l1 = l2 = 1.0, which has many weights "
        "exactly zero",
    )
    train.add_argument(
        "--loss", choices=LOSSES, default=LOSSES[0], help="cross entropy, or squared error"
    )
    training.add_options(train, seed="of initial weights and the order of people")


def _train(args: argparse.Namespace) -> int:
    return ranks.train(args, load_people, _fit_and_report)


def load_people(args: argparse.Namespace) -> tuple[Adult, Adult]:
    """Read ``--data`` or the Adult data, and split it into a training part and a test part."""
    with training.reading("--data", args.data):
        people = adult(args.data)
    train, test = people.split(TEST_FRACTION, SPLIT_SEED)
    if len(test.labels.unique()) < 2:
        raise UsageError(
            f"--data {args.data}: the test part, {len(test):,} of {len(people):,} people, must "
            f"have some of either income"
        )
    print(
        f"{args.data or 'The Adult census data'}: {len(people):,} people; {len(train):,} are "
        f"trained on, a random fifth, {len(test):,}, are tested on",
        flush=True,
    )
    return train, test


def _fit_and_report(data: tuple[Adult, Adult], args: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
    train, test = data
    begin = time.perf_counter()
    encoder = SplitHashEncoder(dict.fromkeys(train.columns, FEATURE_LENGTH))
    buckets = QuantileBuckets.fit(train.columns, NUMBERS, NUMBER_BUCKETS)
    model = WideModel(encoder, buckets, loss=args.loss, seed=args.seed)
    matrix, of_test = model.encode(train.columns), model.encode(test.columns)
    if rank() == 0:
        print(
            f"{len(train.columns)} columns of text are a sparse matrix of {encoder.width:,} "
            f"columns, {encoder.row_nnz} ones in a row: {time.perf_counter() - begin:.1f} s",
            flush=True,
        )
    trainer = training.make_trainer(
        args,
        model,
        lambda _, batch: (model.losses(select_rows(matrix, batch[0]), batch[1]), 0.0),
        [model.optimizer(args.optimizer, min(args.batch_size, len(train)))],
    )
    trainer.fit(
        (torch.arange(len(train)), train.labels),
        epochs=args.epochs,
        global_batch_size=args.batch_size,
        # Test metrics are only reported; no choice depends on them.
        evaluate=lambda _: _evaluate(model, of_test, test.labels),
        resume=args.resume,
    )
    if trainer.interrupted:
        return 130
    training.save(args, model)
    weights = model.weights()
    if rank() == 0:
        _report(trainer, train, test, weights)
    return 0


def _evaluate(model: WideModel, matrix: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Compute test metrics. Ranks share the work, and all make the same number of lookups."""
    parts = torch.arange(len(labels)).split(EVALUATION_BATCH)
    mine = [part.tensor_split(world_size())[rank()] for part in parts]
    found = [model.probabilities(select_rows(matrix, part)) for part in mine]
    probabilities, truth = gather(torch.cat(found)), gather(labels[torch.cat(mine)])
    if not probabilities.isfinite().all():  # the last update may have diverged
        raise DivergedError("a probability is not finite: training has diverged in its last step")
    return {
        "test AUC": auc(probabilities, truth),
        "test log loss": log_loss(probabilities, truth),
    }


def _report(trainer: Trainer, train: Adult, test: Adult, weights: torch.Tensor) -> None:
    rate = torch.full_like(test.labels, train.labels.double().mean().item())
    metrics = trainer.history[-1].metrics
    results = {
        "constant rate": (auc(rate, test.labels), log_loss(rate, test.labels)),
        "model": (metrics["test AUC"], metrics["test log loss"]),
    }
    print(f"\n{'':14}{'test AUC':>9}{'test log loss':>15}")
    for name, (area, loss) in results.items():
        print(f"{name:14}{area:9.4f}{loss:15.4f}")
    seconds = sum(epoch.seconds for epoch in trainer.history)
    print(
        f"\n{len(trainer.history)} epochs in {seconds:.1f} s; {weights.numel():,} weights of "
        f"{len(weights):,} columns, {(weights == 0).double().mean():.0%} of them exactly zero"
    )
