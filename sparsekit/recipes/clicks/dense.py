"""Parts shared by the click models: tables for named features, and stacks of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ...nn import DistributedEmbedding, EmbeddingGroup, Uniform
from ..rows import rows_of_table


def tables(
    features: Sequence[str],
    rows: int | Mapping[str, int] | None,
    dim: int,
    seed: int,
    **options: Any,
) -> EmbeddingGroup:
    """Make a group of hash tables, one per feature; its output is ``[n, features * dim]``.

    Args:
        features: names of the features, in the order of the output.
        rows: number of rows of each table on each rank; or a dict from names to numbers of rows.
            With None, tables grow on the CPU, and have 100,000 rows on CUDA.
        dim: number of elements of a vector.
        seed: seed of the initial vectors. They are uniform in +-0.01, which is DLRM's
            +-(1 / rows) ** 0.5 for 10,000 rows.
        options: other options of each table, as for `DistributedEmbedding`.
    """
    # Make the generator on the CPU, even if torch's default device is another.
    generator = torch.Generator("cpu").manual_seed(seed)
    seeds = torch.randint(2**62, (len(features),), generator=generator, device="cpu").tolist()
    layers = {
        name: DistributedEmbedding(
            "sum",
            rows_of_table(rows[name] if isinstance(rows, Mapping) else rows, options),
            dim,
            1,
            embedding_initializer=Uniform(-0.01, 0.01),
            seed=of_table,
            name=name,
            **options,
        )
        for name, of_table in zip(features, seeds, strict=True)
    }
    return EmbeddingGroup(layers, {name: name for name in features}, output="concatenated")


def stack(widths: Sequence[int], generator: torch.Generator, *, last_relu: bool) -> torch.nn.Module:
    """Make a stack of linear layers of these widths, with ReLU between them.

    Weights are drawn from N(0, 2 / (inputs + outputs)); biases are zero.

    Raises:
        ValueError: a width is below 1.
    """
    if min(widths) < 1:
        raise ValueError(f"widths of linear layers must be >= 1, got {list(widths)}")
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        linear = torch.nn.Linear(before, after)
        draw(linear.weight, (2 / (before + after)) ** 0.5, generator)
        torch.nn.init.zeros_(linear.bias)
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[: None if last_relu else -1])


def draw(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Fill a weight with normal random numbers, drawn on the CPU to be equal on all devices."""
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * std)
