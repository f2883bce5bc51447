"""unsorted_segment_sum against zeros + index_add_."""

from collections.abc import Iterator

import torch

import sparsekit

from .common import Result, compare, zipf_keys


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
