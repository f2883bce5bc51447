"""bucketize against a stable argsort of the owners, with the counts."""

from collections.abc import Iterator

import torch

import sparsekit

from .common import Result, compare


def run(quick: bool) -> Iterator[Result]:
    """Distinct keys of one batch, for few and many ranks."""
    n = 1_000 if quick else 425_984
    keys = torch.randint(0, 2**62, (n,), generator=torch.Generator().manual_seed(0))
    for world_size in (8, 64, 1000):

        def ours(world_size: int = world_size) -> tuple[torch.Tensor, ...]:
            return sparsekit.ops.bucketize(keys, world_size)

        def theirs(world_size: int = world_size) -> tuple[torch.Tensor, ...]:
            owner = keys % world_size
            permutation = owner.argsort(stable=True)
            counts = torch.bincount(owner, minlength=world_size)
            return keys[permutation], counts, permutation

        for one, other in zip(ours(), theirs(), strict=True):
            assert torch.equal(one, other)
        yield compare(f"bucketize {n:,} to {world_size} ranks", ours, "argsort(owner)", theirs)
