"""bucketize against a stable argsort of the owners, with the counts."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Result, compare
from .gpu import Comparison, Gpu


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


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Read are the keys, written the keys by owner and the permutation: 24 bytes a key."""
    for n in gpu.size(1 << 20, 500), gpu.size(16 << 20, 1_000):
        keys = gpu.randint(2**62, n)
        for world_size in (8, 64):

            def theirs(keys: torch.Tensor = keys, world_size: int = world_size) -> torch.Tensor:
                return (keys % world_size).argsort(stable=True)

            assert torch.equal(sparsekit.ops.bucketize(keys, world_size)[2], theirs())
            timing = gpu.time(partial(sparsekit.ops.bucketize, keys, world_size))
            case = f"bucketize {n:,} to {world_size} ranks"
            yield gpu.against_r1(case, timing, 24 * n, "bucketize")
            yield from gpu.against(case, timing, "argsort(owner)", gpu.time(theirs), "bucketize")
