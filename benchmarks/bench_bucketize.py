"""Compares bucketize with a stable argsort of the owners, followed by a count."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Comparison
from .cpu import Cpu
from .gpu import Gpu


def owners_sorted(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the permutation that sorts keys by owner; this takes most of `by_argsort`'s time."""
    return (keys % world_size).argsort(stable=True)


def by_argsort(keys: torch.Tensor, world_size: int) -> tuple[torch.Tensor, ...]:
    """Compute bucketize's result with torch: sorted keys, counts and the permutation."""
    owner = keys % world_size
    permutation = owner.argsort(stable=True)
    return keys[permutation], torch.bincount(owner, minlength=world_size), permutation


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time bucketize on a batch of distinct keys, for 8 to 1000 ranks."""
    n = cpu.size(425_984, 1_000)
    inputs = [torch.randint(0, 2**62, (n,)) for _ in range(cpu.copies(8 * n))]
    for world_size in (8, 64, 1000):
        ours = [partial(sparsekit.ops.bucketize, keys, world_size) for keys in inputs]
        theirs = [partial(by_argsort, keys, world_size) for keys in inputs]
        for one, other in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, one(), other()))
        case = f"bucketize {n:,} to {world_size} ranks"
        yield from cpu.compare(case, ours, {"argsort(owner)": theirs}, num_bytes=24 * n)


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time bucketize on a GPU, against just reading keys and writing them with a permutation."""
    for n in gpu.size(1 << 20, 500), gpu.size(16 << 20, 1_000):
        keys = gpu.randint(2**62, n)
        for world_size in (8, 64):
            theirs = partial(owners_sorted, keys, world_size)
            assert torch.equal(sparsekit.ops.bucketize(keys, world_size)[2], theirs())
            timing = gpu.time(partial(sparsekit.ops.bucketize, keys, world_size))
            case = f"bucketize {n:,} to {world_size} ranks"
            yield gpu.against_r1(case, timing, 24 * n, "bucketize")
            yield from gpu.against(case, timing, "argsort(owner)", gpu.time(theirs), "bucketize")
