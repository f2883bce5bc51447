"""Compares the metrics of trained models with their metrics when served in each row format.

    python -m benchmarks.systems.serving_quality [--seeds 3]

Trains a rating model on MovieLens-100K and a classifier on the Adult census data, writes a snapshot
of the tables in each row format, and evaluates the models with vectors looked up in it. Exits with
1 if float32 rows change a metric.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sparsekit
from sparsekit.datasets import adult, movielens_100k
from sparsekit.models import RatingModel, rmse
from sparsekit.nn.wrappers import tables_of
from sparsekit.serving import Snapshot, export_module
from sparsekit.serving.format import ROW_FORMATS
from sparsekit.train.metrics import auc

from .lifecycle import People, trained

# A trained model, and a function that returns its metric.
Case = tuple[torch.nn.Module, Callable[[], float]]


def ratings(seed: int) -> Case:
    """Train a rating model; its metric is the test RMSE."""
    train, test = movielens_100k().split_by_time(0.2)
    model = RatingModel(train, dim=16, history_size=4, seed=seed)

    def losses(_: Any, batch: tuple[torch.Tensor, ...]) -> Any:
        return model.losses(*batch)

    data = train.users, train.items, train.ratings
    trained(model, losses, data, 128, 4, (0.01, 0.001), seed)
    return model, lambda: rmse(model(test.users, test.items), test.ratings)


def people(seed: int) -> Case:
    """Train a classifier on the Adult data; its metric is the test AUC."""
    everyone = adult()
    texts = [np.char.add(f"{name}=", values) for name, values in everyone.columns.items()]
    keys = sparsekit.hashing.xxh64(np.stack(texts, 1).ravel()).view(len(everyone), -1)
    order = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    model = People(keys.shape[1], len(keys[train].unique()), seed)

    def losses(_: Any, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
        each = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch[0]), batch[1], reduction="none"
        )
        return each, 0.0

    trained(model, losses, (keys[train], everyone.labels[train]), 256, 3, (0.005, 0.001), seed)
    return model, lambda: auc(model(keys[test]), everyone.labels[test])


@torch.no_grad()
def served(model: torch.nn.Module, metric: Callable[[], float]) -> Iterator[tuple[float, int]]:
    """Yield the metric for each row format, and the size of the rows in bytes."""
    layers = tables_of(model)
    rows = {name: next(layer.items(len(layer.weight))) for name, layer in layers.items()}
    with tempfile.TemporaryDirectory() as folder:
        for word in ROW_FORMATS:
            path = Path(folder) / f"{word}.sks"
            for name, layer in layers.items():
                layer.assign(rows[name].keys, rows[name].vectors)
            export_module(model, path, rows=word)
            with Snapshot(path, verify=True) as snapshot:
                for name, layer in layers.items():
                    vectors = snapshot.lookup(name, rows[name].keys, combiner="none")
                    layer.assign(rows[name].keys, vectors)
                size = sum(table.rows * table.row_bytes for table in snapshot.tables.values())
            yield metric(), size


def main() -> int:
    """Print the table; return 1 if float32 rows change a metric."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns, same = [], True
    for train in (ratings, people):
        by_seed = []
        for seed in range(args.seeds):
            model, metric = train(seed)
            with torch.no_grad():
                before = metric()
            by_seed.append(list(served(model, metric)))
            same &= by_seed[-1][0][0] == before
        columns.append(list(zip(*by_seed, strict=True)))
    line = "{:10}{:>14}{:>12}{:>12}{:>14}{:>12}{:>12}"
    print(f"means of {args.seeds} seeds; differences from float32, the largest of a seed")
    heads = ("ML-100K RMSE", "differs", "bytes", "Adult AUC", "differs", "bytes")
    print(line.format("rows", *heads))
    for number, word in enumerate(ROW_FORMATS):
        cells = []
        for column in columns:
            pairs = list(zip(column[number], column[0], strict=True))
            mean = statistics.mean(here for (here, _), _ in pairs)
            most = max((here - first for (here, _), (first, _) in pairs), key=abs)
            cells += [f"{mean:.5f}", f"{most:+.5f}", f"{pairs[0][0][1]:,}"]
        print(line.format(word, *cells))
    print(f"{'holds' if same else 'FAILS'}: float32 rows give the metrics of the models as trained")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
