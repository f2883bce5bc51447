"""DLRM, a click model, with the cross network of DCN-V2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...data import Batch, KeyedJaggedTensor
from ...errors import check_int
from .dense import draw, stack, tables


class LowRankCross(torch.nn.Module):
    r"""Cross network of low rank: :math:`x_{l+1} = x_0 \odot (U_l V_l x_l + b_l) + x_l`.

    Source: Wang et al., "DCN V2", WWW 2021, section 3.2, the low-rank version.

    Args:
        width: number of columns of x.
        layers: number of layers.
        rank: number of rows of V.
        generator: generator of the initial weights, which are drawn from N(0, 2 / (width + rank)).
    """

    def __init__(self, width: int, layers: int, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        check_int("DLRM", "cross_layers", layers, 0, 1000)
        check_int("DLRM", "cross_rank", rank, 1, 2**31 - 1)
        self.down = torch.nn.ModuleList(
            torch.nn.Linear(width, rank, bias=False) for _ in range(layers)
        )
        self.up = torch.nn.ModuleList(torch.nn.Linear(rank, width) for _ in range(layers))
        for parameter in self.parameters():
            if parameter.dim() == 2:
                draw(parameter, (2 / (width + rank)) ** 0.5, generator)
            else:
                torch.nn.init.zeros_(parameter)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        """Apply all layers to x_0, ``[n, width]``; the result has the same shape."""
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return x


class DLRM(torch.nn.Module):
    """DLRM-DCNv2 as in MLPerf: predicts the probability of a click from numbers and bags of keys.

    The bottom stack converts the numbers to a vector of dim elements. The cross network combines it
    with one vector per feature, and the top stack computes the score. A key's vector is created
    when the key first occurs in training, so no vocabulary of keys is needed.

    Args:
        features: names of the categorical features; batches may contain others.
        dense: number of dense inputs per sample.
        rows: number of rows of each table on each rank; or a dict from names to numbers of rows.
            With None, tables grow on the CPU, and have 100,000 rows on CUDA.
        dim: number of elements of a vector.
        bottom: widths of the bottom stack's layers, except the last, which is dim.
        top: widths of the top stack's layers, except the last, which is 1.
        cross_layers: number of layers of the cross network.
        cross_rank: rank of the cross network's matrices.
        seed: seed of the initial weights.
        options: other options of each table, as for `DistributedEmbedding`, such as
            ``on_full="evict"``.

    Example:
        >>> model = DLRM(["user", "item"], dense=1, rows=1000, bottom=[8], top=[8])
        >>> model(numbers, keyed_jagged_tensor).shape  # numbers: [n, 1]
        torch.Size([n])
    """

    def __init__(
        self,
        features: Sequence[str],
        dense: int,
        *,
        rows: int | Mapping[str, int] | None = None,
        dim: int = 16,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
        cross_layers: int = 3,
        cross_rank: int = 512,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.embeddings = tables(features, rows, dim, seed, **options)
        width = (len(features) + (dense > 0)) * dim
        self.bottom = stack((dense, *bottom, dim), generator, last_relu=True) if dense else None
        self.cross = LowRankCross(width, cross_layers, cross_rank, generator)
        self.top = stack((width, *top, 1), generator, last_relu=False)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return scores, float32 ``[n]``, whose sigmoid is the probability of label 1.

        Args:
            dense: float32 ``[n, dense]``.
            sparse: bags of keys for all features.
        """
        vectors = self.embeddings(sparse)
        if self.bottom is not None:
            vectors = torch.cat([self.bottom(dense), vectors], 1)
        return self.top(self.cross(vectors))[:, 0]

    def prefetch(self, batch: Batch) -> None:
        """Start sending the keys of the next batch; called by `Trainer`."""
        self.embeddings.prefetch(batch.sparse)
