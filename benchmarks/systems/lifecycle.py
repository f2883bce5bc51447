"""Compares policies for full tables: model quality, and hit rates against a bucketed LRU.

    python -m benchmarks.systems.lifecycle [--seeds 3]

Trains a rating model on MovieLens-100K and a classifier on the Adult census data, with rows for
half of the ids. Then looks up a zipf stream with drifting popular keys in tables with 65,536 rows,
and in a table that evicts within buckets of 128 rows, like HierarchicalKV. Exits with 1 if LRU or
LFU has a lower hit rate than the bucketed table.
"""

import argparse
import io
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

import sparsekit
from sparsekit.datasets import adult, movielens_100k
from sparsekit.models import RatingModel, rmse
from sparsekit.nn.layer import EmbeddingLayer
from sparsekit.train import Trainer
from sparsekit.train.metrics import auc

POLICIES: dict[str, dict[str, Any]] = {
    "all rows": {},
    "LRU": {"on_full": "evict"},
    "LFU": {"on_full": "evict", "score": "lfu"},
    "LRU, admission at 2": {"on_full": "evict", "admission": sparsekit.MinCount(2)},
    "LFU, admission at 2": {
        "on_full": "evict",
        "score": "lfu",
        "admission": sparsekit.MinCount(2),
    },
    "first come": {"insert": False},
}
TO_95 = "LRU, sweeps to 95%"
BUCKETS, BUCKET_ROWS = 512, 128
# The stream: zipf ids; the popular ones change from step to step.
IDS, EXPONENT, BATCH, STEPS = 1_000_000, 1.05, 4096, 400


class FirstCome:
    """Gives rows to the first `most` distinct keys, and to no others."""

    def __init__(self, layer: EmbeddingLayer, most: int) -> None:
        self._layer, self._most = layer, most
        self._known: set[int] = set()

    def see(self, keys: torch.Tensor) -> None:
        """Insert a batch's keys, in order, as long as there is room."""
        new = [key for key in dict.fromkeys(keys.tolist()) if key not in self._known]
        if new := new[: self._most - len(self._known)]:
            self._known.update(new)
            taken = torch.tensor(new)
            self._layer.assign(taken, self._layer.vectors(taken))


def limit(layers: Mapping[EmbeddingLayer, int], policy: str) -> dict[EmbeddingLayer, FirstCome]:
    """Limit the layers' rows; return a `FirstCome` for each layer if the policy needs one."""
    for layer, most in layers.items():
        if layer.life is not None and layer.life.max_rows is not None:
            layer.life.max_rows = most
    if policy != "first come":
        return {}
    return {layer: FirstCome(layer, most) for layer, most in layers.items()}


def trained(
    model: torch.nn.Module,
    losses: Callable[..., Any],
    data: tuple[torch.Tensor, ...],
    batch: int,
    epochs: int,
    rates: tuple[float, float],
    seed: int,
) -> None:
    """Train a model with LazyAdam and Adam; their learning rates fall to zero."""
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    optimizers = [
        sparsekit.optim.LazyAdam(sparse, lr=rates[0]),
        torch.optim.Adam(dense, lr=rates[1]),
    ]
    steps = epochs * math.ceil(len(data[0]) / batch)
    falling = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, steps) for o in optimizers]
    trainer = Trainer(
        model, losses, optimizers, schedulers=falling, seed=seed, stream=io.StringIO()
    )
    trainer.fit(data, epochs=epochs, global_batch_size=batch)
    model.eval()


def ratings(policy: str, seed: int) -> tuple[float, int]:
    """Return the test RMSE of a rating model, and the number of dropped rows."""
    train, test = movielens_100k().split_by_time(0.2)
    model = RatingModel(train, dim=16, history_size=4, seed=seed, **POLICIES[policy])
    ids = {"user": train.users, "item": train.items, "rated": train.items}
    layers = {
        cast(EmbeddingLayer, model.embeddings.layers[name]): len(keys.unique()) // 2
        for name, keys in ids.items()
    }
    first_come = list(limit(layers, policy).values())

    def losses(_: Any, batch: tuple[torch.Tensor, ...]) -> Any:
        users, items, _ = batch
        if first_come:
            for one, keys in zip(
                first_come, (users, items, model.history(users, items)[0]), strict=True
            ):
                one.see(keys)
        return model.losses(*batch)

    data = train.users, train.items, train.ratings
    trained(model, losses, data, 128, 4, (0.01, 0.001), seed)
    with torch.no_grad():
        error = rmse(model(test.users, test.items), test.ratings)
    return error, dropped(layers)


class People(torch.nn.Module):
    """Classifies rows of ids; all columns share one table."""

    def __init__(self, columns: int, rows: int, seed: int, **options: Any) -> None:
        super().__init__()
        self.table = sparsekit.DistributedEmbedding(
            "sum", rows, 8, columns, 1, seed=seed, name="values", **options
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.top = torch.nn.Sequential(
                torch.nn.Linear(8 * columns, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
            )

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the scores ``[n]`` of int64 keys ``[n, columns]``."""
        return self.top(self.table(keys.unsqueeze(2)).flatten(1))[:, 0]


def people(policy: str, seed: int) -> tuple[float, int]:
    """Return the test AUC of a classifier on the Adult data, and the number of dropped rows."""
    everyone = adult()
    texts = [np.char.add(f"{name}=", values) for name, values in everyone.columns.items()]
    keys = sparsekit.hashing.xxh64(np.stack(texts, 1).ravel()).view(len(everyone), -1)
    order = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    ids = len(keys[train].unique())
    model = People(keys.shape[1], ids, seed, **POLICIES[policy])
    layers = {cast(EmbeddingLayer, model.table): ids // 2}
    first_come = limit(layers, policy)

    def losses(_: Any, batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, float]:
        for one in first_come.values():
            one.see(batch[0].flatten())
        each = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch[0]), batch[1], reduction="none"
        )
        return each, 0.0

    data = keys[train], everyone.labels[train]
    trained(model, losses, data, 256, 3, (0.005, 0.001), seed)
    with torch.no_grad():
        area = auc(model(keys[test]), everyone.labels[test])
    return area, dropped(layers)


def dropped(layers: Mapping[EmbeddingLayer, int]) -> int:
    """Return how many rows the layers have evicted."""
    return sum(layer.row_counts().evicted for layer in layers if layer.life is not None)


def stream() -> Iterator[torch.Tensor]:
    """Yield batches of keys."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        # The inverse of the distribution function of a continuous power law on [1, IDS].
        draws = ((IDS ** (1 - EXPONENT) - 1) * rng.random(BATCH) + 1) ** (1 / (1 - EXPONENT))
        yield torch.from_numpy(draws.astype(np.int64) + 5 * step)


class BucketedLRU:
    """A table that makes room for a new key by dropping its bucket's least recently used key."""

    def __init__(self) -> None:
        self._keys = np.full((BUCKETS, BUCKET_ROWS), -1)
        self._clocks = np.full((BUCKETS, BUCKET_ROWS), -1)

    def look_up(self, keys: np.ndarray, now: int) -> int:
        """Look up distinct keys, insert absent ones, and return how many were present."""
        buckets = self._hashed(keys) % np.uint64(BUCKETS)
        rows, places = (self._keys[buckets] == keys[:, None]).nonzero()
        self._clocks[buckets[rows], places] = now
        absent = np.ones(len(keys), bool)
        absent[rows] = False
        for key, bucket in zip(keys[absent], buckets[absent], strict=True):
            place = self._clocks[bucket].argmin()
            self._keys[bucket, place], self._clocks[bucket, place] = key, now
        return len(rows)

    @staticmethod
    def _hashed(keys: np.ndarray) -> np.ndarray:
        """Hash keys with MurmurHash3's finalizer, like HierarchicalKV."""
        words = keys.astype(np.uint64)
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            words = (words ^ (words >> np.uint64(33))) * np.uint64(factor)
        return words ^ (words >> np.uint64(33))


def hit_rates() -> dict[str, float]:
    """Return each table's hit rate in the second half of the stream, counting distinct keys."""
    rows = BUCKETS * BUCKET_ROWS
    bucketed = BucketedLRU()
    policies = {**POLICIES, TO_95: {"on_full": "evict", "low_watermark": 0.95}}
    layers = {
        name: sparsekit.Embedding(rows, 1, max_rows=rows, name=name, **options)
        for name, options in policies.items()
        if options.get("on_full") == "evict"
    }
    asked = found = 0
    begun = {}
    for step, keys in enumerate(stream()):
        if step == STEPS // 2:
            asked = found = 0
            begun = {name: layer.row_counts() for name, layer in layers.items()}
        distinct = np.unique(keys.numpy())
        asked, found = asked + len(distinct), found + bucketed.look_up(distinct, step)
        with torch.no_grad():
            for layer in layers.values():
                layer(keys)
    rates = {"bucketed LRU": found / asked}
    for name, layer in layers.items():
        now = layer.row_counts()
        rates[name] = (now.found - begun[name].found) / (now.asked - begun[name].asked)
    return rates


def main() -> int:
    """Print the tables; return 1 if a hit rate is too low."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    line = "{:22}{:>16}{:>12}{:>16}{:>12}"
    print(f"rows for half of the ids; means of {args.seeds} seeds")
    print(line.format("", "ML-100K RMSE", "dropped", "Adult AUC", "dropped"), flush=True)
    for policy in POLICIES:
        cells = []
        for measure in (ratings, people):
            scores, counts = zip(
                *(measure(policy, seed) for seed in range(args.seeds)), strict=True
            )
            spread = f" +-{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
            mean = f"{statistics.mean(scores):.4f}{spread}"
            cells += [mean, f"{round(statistics.mean(counts)):,}"]
        print(line.format(policy, *cells), flush=True)
    rates = hit_rates()
    print(f"\nhit rates, {BUCKETS * BUCKET_ROWS:,} rows, zipf {EXPONENT} with drift")
    for name, rate in rates.items():
        print(f"{name:22}{rate:14.4f}")
    held = {name: rates[name] >= rates["bucketed LRU"] for name in ("LRU", "LFU")}
    for name, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}: {name} has at least the hit rate of bucketed LRU")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
