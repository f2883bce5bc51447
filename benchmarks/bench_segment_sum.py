"""unsorted_segment_sum against zeros + index_add_."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Result, compare, zipf_keys
from .gpu import Comparison, Gpu, assert_same_sums


def run(quick: bool) -> Iterator[Result]:
    """Uniform, zipf and half-on-one-row segment ids."""
    n, segments = (1_000, 100) if quick else (425_984, 60_000)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.randint(0, segments, (n,), generator=generator)
    half = uniform.clone()
    half[torch.rand(n, generator=generator) < 0.5] = 0
    inputs = {"uniform": uniform, "zipf 1.05": zipf_keys(n, 1.05, segments), "half on one": half}
    for dim in (16,) if quick else (16, 64, 256):
        data = torch.randn(n, dim, generator=generator)
        for name, ids in inputs.items():

            def ours(data: torch.Tensor = data, ids: torch.Tensor = ids) -> torch.Tensor:
                return sparsekit.ops.unsorted_segment_sum(data, ids, segments)

            def theirs(data: torch.Tensor = data, ids: torch.Tensor = ids) -> torch.Tensor:
                return torch.zeros(segments, data.shape[1]).index_add_(0, ids, data)

            torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-2)
            yield compare(f"segment sum {n:,} x {dim} {name}", ours, "zeros + index_add_", theirs)


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Four rows a segment on average. The ids are read, all rows read once, all sums written."""
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

            def theirs(
                data: torch.Tensor = data, ids: torch.Tensor = ids, segments: int = segments
            ) -> torch.Tensor:
                zeros = torch.zeros(segments, data.shape[1], device=data.device)
                return zeros.index_add_(0, ids, data)

            assert_same_sums(ours(), theirs())
            timing = gpu.time(ours)
            case, target = f"segment sum {n:,} x {dim} {name}", f"segment_sum {name}"
            num_bytes = n * (4 * dim + 8) + segments * 4 * dim
            known = name in ("uniform", "sorted")
            yield gpu.against_r1(case, timing, num_bytes, target if known else "")
            target = "" if name == "sorted" else target
            yield from gpu.against(case, timing, "index_add_", gpu.time(theirs), target)
            torch.use_deterministic_algorithms(True)
            # Else torch fills every new tensor, which it does to any op.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            try:
                ordered = gpu.time(ours)
            finally:
                torch.use_deterministic_algorithms(False)
                torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
            case = f"{case}, deterministic"
            target = "segment_sum deterministic"
            yield from gpu.against(case, ordered, "its fastest mode", timing, target)
