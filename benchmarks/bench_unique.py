"""unique against torch.unique, both with inverse and counts."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Result, compare, zipf_keys
from .gpu import Comparison, Gpu


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


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """The public op, which reads back how many there are, and the padded form, which does not."""
    for full, quick in (1 << 20, 1_000), (4 << 20, 1_500), (16 << 20, 2_000):
        n = gpu.size(full, quick)
        for name, keys in (
            ("uniform", gpu.randint(2**62, n)),
            ("zipf 1.05", gpu.zipf(n, 1.05, gpu.size(16 << 20, 500))),
        ):
            distinct, inverse, counts = sparsekit.ops.unique(keys)
            assert torch.equal(distinct[inverse], keys)
            assert int(counts.sum()) == n

            target = "unique 1M" if full == 1 << 20 else "unique"
            ours = gpu.time(partial(sparsekit.ops.unique, keys))
            ours_padded = gpu.time(partial(torch.ops.sparsekit.unique_padded, keys))
            both = {"return_inverse": True, "return_counts": True}
            peers = {"torch.unique": gpu.time(partial(torch.unique, keys, **both))}
            arrays = gpu.array_module()
            if arrays is not None:
                theirs = partial(arrays.unique, arrays.asarray(keys), **both)
                peers["cupy.unique"] = gpu.time(theirs)
            case = f"unique {n:,} {name}"
            for peer, timing in peers.items():
                yield from gpu.against(case, ours, peer, timing, target, wall=True)
                yield from gpu.against(f"{case}, padded", ours_padded, peer, timing, target)
