"""unique against torch.unique, both with inverse and counts."""

from collections.abc import Iterator

import torch

import sparsekit

from .common import Result, compare, zipf_keys


def run(quick: bool) -> Iterator[Result]:
    """Uniform and zipf keys."""
    for n in (1_000,) if quick else (425_984, 4_000_000):
        inputs = {
            "uniform": torch.randint(0, 2**62, (n,), generator=torch.Generator().manual_seed(0)),
            "zipf 1.05": zipf_keys(n, 1.05, 1_000 if quick else 1_000_000),
        }
        for name, keys in inputs.items():
            distinct, inverse, _ = sparsekit.ops.unique(keys)
            assert torch.equal(distinct[inverse], keys)

            def ours(keys: torch.Tensor = keys) -> object:
                return sparsekit.ops.unique(keys)

            def theirs(keys: torch.Tensor = keys) -> object:
                return torch.unique(keys, return_inverse=True, return_counts=True)

            yield compare(f"unique {n:,} {name}", ours, "torch.unique", theirs)
