"""Compares unsorted_segment_sum with torch.zeros followed by index_add_."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Comparison, assert_same_sums, zipf_keys
from .cpu import Cpu
from .gpu import Gpu


def index_add(data: torch.Tensor, ids: torch.Tensor, segments: int) -> torch.Tensor:
    """Compute segment sums ``[segments, dim]`` of rows ``[n, dim]`` with torch."""
    return torch.zeros(segments, data.shape[1], device=data.device).index_add_(0, ids, data)


def inputs_of(kind: str, n: int, segments: int, seed: int) -> torch.Tensor:
    """Return ids ``[n]``: uniform, zipf 1.05, or uniform with half of them 0."""
    if kind == "zipf 1.05":
        return zipf_keys(n, 1.05, segments, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, segments, (n,), generator=generator)
    if kind == "half on one":
        ids[torch.rand(n, generator=generator) < 0.5] = 0
    return ids


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time uniform ids, zipf ids, and uniform ids with half of them set to 0."""
    n, segments = cpu.size(425_984, 1_000), cpu.size(60_000, 100)
    for dim in (16, 64, 256):
        count = cpu.copies(4 * n * dim)
        datas = [torch.randn(n, dim) for _ in range(count)]
        for kind in ("uniform", "zipf 1.05", "half on one"):
            idss = [inputs_of(kind, n, segments, seed) for seed in range(count)]
            pairs = list(zip(datas, idss, strict=True))
            ours = [
                partial(sparsekit.ops.unsorted_segment_sum, data, ids, segments)
                for data, ids in pairs
            ]
            theirs = [partial(index_add, data, ids, segments) for data, ids in pairs]
            for one, other in zip(ours, theirs, strict=True):
                assert_same_sums(one(), other())
            half = kind == "half on one"
            yield from cpu.compare(
                f"segment sum {n:,} x {dim} {kind}",
                ours,
                {"zeros + index_add_": theirs},
                "segment_sum, half on one row" if half else "segment_sum, uniform and zipf",
                num_bytes=n * (4 * dim + 8) + segments * 4 * dim,
            )


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time four rows per segment on average, against just reading ids and rows and writing sums."""
    for dim in (16, 32, 64, 128, 256):
        n = gpu.fit(gpu.size(min(4 << 20, (1 << 29) // dim), 1_000), bytes_each=16 * dim)
        segments = n // 4
        data = gpu.randn(n, dim)
        uniform = gpu.randint(segments, n)
        half = uniform.clone()
        half[gpu.randint(2, n) == 0] = 0
        inputs = {
            "uniform": uniform,
            "sorted": uniform.sort().values,
            "zipf": gpu.zipf(n, 1.05, segments),
            "half on one": half,
        }
        for name, ids in inputs.items():
            ours = partial(sparsekit.ops.unsorted_segment_sum, data, ids, segments)
            theirs = partial(index_add, data, ids, segments)
            assert_same_sums(ours(), theirs())
            timing = gpu.time(ours)
            case, target = f"segment sum {n:,} x {dim} {name}", f"segment_sum {name}"
            num_bytes = n * (4 * dim + 8) + segments * 4 * dim
            known = name in ("uniform", "sorted")
            yield gpu.against_r1(case, timing, num_bytes, target if known else "")
            target = "" if name == "sorted" else target
            yield from gpu.against(case, timing, "index_add_", gpu.time(theirs), target)
            torch.use_deterministic_algorithms(True)
            # By default, deterministic mode also fills all new tensors, which takes extra time.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            try:
                ordered = gpu.time(ours)
            finally:
                torch.use_deterministic_algorithms(False)
                torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
            case = f"{case}, deterministic"
            target = "segment_sum deterministic"
            yield from gpu.against(case, ordered, "its fastest mode", timing, target)
