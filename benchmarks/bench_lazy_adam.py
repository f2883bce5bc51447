"""LazyAdam against torch's SparseAdam, on one coalesced gradient."""

from collections.abc import Iterator

import torch

import sparsekit

from .common import Result, compare
from .gpu import Comparison, Gpu


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


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """2M of the rows of a large table, in 7 passes: gradient, and weight and moments twice."""
    for dim in (16, 64, 128, 256):
        # Three tensors of the table's size, and SparseAdam's temporaries.
        num_rows = gpu.fit(gpu.size((1 << 30) // dim, 1_000), bytes_each=20 * dim)
        touched = min(gpu.size(2 << 20, 60), num_rows // 2)
        order = torch.randperm(num_rows, generator=gpu.generator, device=gpu.device)
        rows = order[:touched].sort().values
        values = gpu.randn(touched, dim)
        timings, results = [], []
        for optimizer_class in (sparsekit.optim.LazyAdam, torch.optim.SparseAdam):
            weight = torch.nn.Parameter(torch.zeros(num_rows, dim, device=gpu.device))
            weight.grad = torch.sparse_coo_tensor(
                rows[None], values, weight.shape, is_coalesced=True, check_invariants=False
            )
            timings.append(gpu.time(optimizer_class([weight]).step))
            results.append(weight.detach()[rows[:1000]])
            del weight
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        ours, theirs = timings
        case = f"LazyAdam {touched:,} of {num_rows:,} rows x {dim}"
        target = "LazyAdam, D >= 64" if dim >= 64 else ""
        yield gpu.against_r1(case, ours, 28 * dim * touched, target)
        yield from gpu.against(case, ours, "SparseAdam", theirs)
