"""LazyAdam against torch's SparseAdam, on one coalesced gradient."""

from collections.abc import Iterator

import torch

import sparsekit

from .common import Result, compare


def run(quick: bool) -> Iterator[Result]:
    """Some 6% of the rows are touched."""
    num_rows, touched = (1_000, 60) if quick else (1_000_000, 63_819)
    generator = torch.Generator().manual_seed(0)
    for dim in (16,) if quick else (16, 64, 128):
        rows = torch.randperm(num_rows, generator=generator)[:touched].sort().values
        values = torch.randn(touched, dim, generator=generator)
        start = torch.randn(num_rows, dim, generator=generator)
        steps = []
        for optimizer_class in (sparsekit.optim.LazyAdam, torch.optim.SparseAdam):
            weight = torch.nn.Parameter(start.clone())
            weight.grad = torch.sparse_coo_tensor(
                rows[None], values, weight.shape, is_coalesced=True, check_invariants=False
            )
            steps.append((weight, optimizer_class([weight])))
        (ours, our_optimizer), (theirs, their_optimizer) = steps
        yield compare(
            f"{touched:,} of {num_rows:,} rows x {dim}",
            our_optimizer.step,
            "torch.optim.SparseAdam",
            their_optimizer.step,
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
