"""Compares unique, with inverse and counts, to torch.unique, np.unique and pandas.factorize.

pandas.factorize is timed without counts, since it cannot return them.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

import sparsekit

from .common import Comparison, random_keys, zipf_keys
from .cpu import Call, Cpu
from .gpu import Gpu


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time uniform and zipf keys; numpy and pandas always use one thread."""
    for full in 425_984, 4_000_000, 16_000_000:
        n = cpu.size(full, full // 1_000)
        count = cpu.copies(8 * n)
        ids = cpu.size(1_000_000, 1_000)
        for name, make in (
            ("uniform", partial(random_keys, n)),
            ("zipf 1.05", partial(zipf_keys, n, 1.05, ids)),
        ):
            inputs = [make(seed=seed) for seed in range(count)]
            case = f"unique {n:,} {name}"
            yield from cpu.compare(
                case,
                [partial(sparsekit.ops.unique, k) for k in inputs],
                _peers(cpu, inputs),
                "unique",
            )


def _peers(cpu: Cpu, inputs: list[torch.Tensor]) -> dict[str, list[Call]]:
    arrays = [keys.numpy() for keys in inputs]
    both = {"return_inverse": True, "return_counts": True}
    peers: dict[str, list[Call]] = {
        "torch.unique": [partial(torch.unique, keys, **both) for keys in inputs],
        "np.unique": [partial(np.unique, keys, **both) for keys in arrays],
    }
    if cpu.has_module("pandas.factorize", "pandas"):
        import pandas

        peers["pandas.factorize"] = [partial(pandas.factorize, keys) for keys in arrays]
    for i, keys in enumerate(inputs):
        distinct, inverse, counts = sparsekit.ops.unique(keys)
        order = distinct.argsort()
        their_keys, their_inverse, their_counts = peers["torch.unique"][i]()
        assert torch.equal(their_keys, distinct[order])
        assert torch.equal(their_keys[their_inverse], distinct[inverse])
        assert torch.equal(their_counts, counts[order])
        assert torch.equal(distinct[inverse], keys)
    # Check the other peers on one input only, since they are slow.
    ours = [x.numpy() for x in sparsekit.ops.unique(inputs[0])]
    by_key = ours[0].argsort()
    sorted_keys, _, sorted_counts = peers["np.unique"][0]()
    assert np.array_equal(sorted_keys, ours[0][by_key])
    assert np.array_equal(sorted_counts, ours[2][by_key])
    if "pandas.factorize" in peers:  # keys are in order of first occurrence, as in our result
        codes, uniques = peers["pandas.factorize"][0]()
        assert np.array_equal(codes, ours[1])
        assert np.array_equal(uniques, ours[0])
    return peers


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time the public op, which waits for the number of distinct keys, and the padded op."""
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
