"""Parts that models of clicks share: tables for named features, stacks of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from ...nn import DistributedEmbedding, EmbeddingGroup, Uniform


def tables(
    features: Sequence[str], rows: int | Mapping[str, int], dim: int, seed: int
) -> EmbeddingGroup:
    """Return a group of hash tables, one per feature; sums each bag to ``[n, features * dim]``.

    Args:
        features: names of the features, in the order of the output.
        rows: rows of each table on each rank; or name -> rows.
        dim: elements of a vector.
        seed: seed of the initial vectors, uniform in +-0.01: DLRM's +-(1 / rows) ** 0.5 for 10,000
            rows.
    """
    # Drawn on the CPU, where the generator is, whatever torch's default device is.
    generator = torch.Generator("cpu").manual_seed(seed)
    seeds = torch.randint(2**62, (len(features),), generator=generator, device="cpu").tolist()
    layers = {
        name: DistributedEmbedding(
            "sum",
            rows if isinstance(rows, int) else rows[name],
            dim,
            1,
            embedding_initializer=Uniform(-0.01, 0.01),
            seed=of_table,
            name=name,
        )
        for name, of_table in zip(features, seeds, strict=True)
    }
    return EmbeddingGroup(layers, {name: name for name in features}, output="concatenated")


def stack(widths: Sequence[int], generator: torch.Generator, *, last_relu: bool) -> torch.nn.Module:
    """Return linear layers from widths[0] to widths[-1] columns, with a ReLU between each two.

    Weights are drawn from N(0, 2 / (inputs + outputs)), biases are zero.

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
    """Fill with normal numbers, drawn on the CPU so that they are the same for each device."""
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") * std)
