"""DeepFM: a factorization machine and a stack of dense layers that use the same vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...data import Batch, KeyedJaggedTensor
from .dense import draw, stack, tables


class DeepFM(torch.nn.Module):
    r"""A model that predicts the probability of a click from numbers and bags of keys.

    .. math::
        y = b + w \cdot x + \sum_f w_f
            + \tfrac{1}{2} \sum_k \left[ (\sum_f v_{fk})^2 - \sum_f v_{fk}^2 \right]
            + \mathrm{deep}(x, v)

    x are the numbers; w_f and v_f are the weight and the vector of feature f, each summed over the
    keys of a bag. One lookup returns both: w_f is the first element of a row. Source: Guo et al.,
    "DeepFM", IJCAI 2017.

    Args:
        features: names of the categorical features; batches may contain others.
        dense: number of dense inputs per sample.
        rows: number of rows of each table on each rank; or a dict from names to numbers of rows.
            With None, tables grow on the CPU, and have 100,000 rows on CUDA.
        dim: number of elements of a vector v.
        deep: widths of the stack's layers, except the last, which is 1.
        seed: seed of the initial weights.
        options: other options of each table, as for `DistributedEmbedding`, such as
            ``on_full="evict"``.
    """

    def __init__(
        self,
        features: Sequence[str],
        dense: int,
        *,
        rows: int | Mapping[str, int] | None = None,
        dim: int = 16,
        deep: Sequence[int] = (400, 400, 400),
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.embeddings = tables(features, rows, 1 + dim, seed, **options)
        self._shape = len(features), 1 + dim
        self.linear = torch.nn.Linear(dense, 1)
        draw(self.linear.weight, 0.01, generator)
        torch.nn.init.zeros_(self.linear.bias)
        self.deep = stack((dense + len(features) * dim, *deep, 1), generator, last_relu=False)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return scores, float32 ``[n]``, whose sigmoid is the probability of label 1.

        Args:
            dense: float32 ``[n, dense]``.
            sparse: bags of keys for all features.
        """
        rows = self.embeddings(sparse).view(-1, *self._shape)
        weights, vectors = rows[:, :, 0], rows[:, :, 1:]
        squares = vectors.sum(1).square() - vectors.square().sum(1)
        first = self.linear(dense)[:, 0] + weights.sum(1)
        deep = self.deep(torch.cat([dense, vectors.flatten(1)], 1))[:, 0]
        return first + squares.sum(1) / 2 + deep

    def prefetch(self, batch: Batch) -> None:
        """Start sending the keys of the next batch; called by `Trainer`."""
        self.embeddings.prefetch(batch.sparse)
