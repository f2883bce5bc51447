"""Measures the speed-up from training on several ranks, and predicts it for more ranks."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

from ..data import Batch, KeyedJaggedTensor
from ..models import DLRM
from ..optim import LazyAdam, split_embedding_variable_from_others
from .trainer import Trainer

STEPS = 8  # number of steps in an epoch; each step has a different batch
WARM_UP = 2  # number of untimed epochs before the timed ones: the first inserts new keys


@dataclass(frozen=True)
class Case:
    """The training job to measure: a DLRM on generated keys that follow Zipf's law.

    Attributes:
        tables: number of tables.
        rows: number of distinct keys in each table.
        dim: number of elements in a vector.
        batch: total number of samples per batch, whatever the number of ranks.
        epochs: number of timed epochs of 8 steps.
    """

    tables: int = 26
    rows: int = 100_000
    dim: int = 64
    batch: int = 8192
    epochs: int = 5


def samples_per_second(case: Case) -> float:
    """Train, and return the median speed of the timed epochs; all ranks must call this."""
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [f"C{i + 1}" for i in range(case.tables)]
    model = DLRM(
        names,
        13,
        rows=2 * case.rows // ranks + 1000,  # with a margin, as ranks get unequal numbers of keys
        dim=case.dim,
        bottom=[case.dim],
        top=[64],
        cross_layers=1,
        cross_rank=16,
    )
    sparse, dense = split_embedding_variable_from_others(model)
    trainer = Trainer(
        model,
        _losses,
        [LazyAdam(sparse, lr=0.001), torch.optim.Adam(dense, lr=0.001)],
        stream=io.StringIO(),
    )
    generator = torch.Generator("cpu").manual_seed(0)
    batches = [_batch(case, names, generator, rank, ranks) for _ in range(STEPS)]
    history = trainer.fit(batches, epochs=WARM_UP + case.epochs)
    return statistics.median(epoch.samples_per_second for epoch in history[WARM_UP:])


def _batch(
    case: Case, names: list[str], generator: torch.Generator, rank: int, ranks: int
) -> Batch:
    """Generate one rank's share of a batch that is the same for any number of ranks."""
    uniform = torch.rand(case.tables, case.batch, generator=generator, device="cpu")
    # Sample from the density 1 / x on [1, rows] by inverting its distribution function.
    keys = (case.rows**uniform).long()
    numbers = torch.rand(case.batch, 13, generator=generator, device="cpu")
    label = torch.randint(2, (case.batch,), generator=generator, device="cpu").float()
    mine = torch.arange(case.batch).tensor_split(ranks)[rank]
    offsets = torch.arange(case.tables * len(mine) + 1)
    bags = KeyedJaggedTensor(names, keys[:, mine].reshape(-1), offsets)
    return Batch(label[mine], numbers[mine], bags)


def _losses(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, float]:
    scores = model(batch.dense, batch.sparse)
    label = cast(torch.Tensor, batch.label)
    return binary_cross_entropy_with_logits(scores, label, reduction="none"), 0.0


def predicted(measured: Mapping[int, float], ranks: int) -> tuple[float, float]:
    """Predict the lowest and highest speed-up over one rank.

    Let T(N) be the time of a step on N ranks, where N is the largest measured number of ranks. The
    overhead is E = T(N) - T(1) / N. In the worst case, the overhead is nothing but waiting, and is
    E on M ranks too. In the best case, the overhead is proportional to the bytes that each rank
    sends: (M - 1) / M^2 of the bytes in a batch.

    Args:
        measured: samples per second, by number of ranks; all at the same batch size. It must
            contain 1 and a larger number of ranks.
        ranks: number of ranks to predict the speed-up for.

    Raises:
        ValueError: ``measured`` does not contain 1, or contains no larger number.
    """
    if 1 not in measured or len(measured) < 2:
        raise ValueError(f"predicted needs 1 rank and more, got {sorted(measured)}")
    largest = max(measured)
    one = 1 / measured[1]
    extra = max(1 / measured[largest] - one / largest, 0.0)
    sent = (ranks - 1) / ranks**2 / ((largest - 1) / largest**2)
    return one / (one / ranks + extra), one / (one / ranks + extra * sent)
