"""Compares one step of each optimizer with torch's, on coalesced gradients."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import sparsekit
from sparsekit import optim

from .common import Comparison
from .cpu import Call, Cpu
from .gpu import Gpu

# Our optimizer, torch's optimizer, and whether torch's accepts sparse gradients.
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool]] = {
    "LazyAdam": (optim.LazyAdam, torch.optim.SparseAdam, True),
    "SGD": (lambda p: optim.SGD(p, lr=0.01), lambda p: torch.optim.SGD(p, lr=0.01), True),
    "Adagrad": (optim.Adagrad, torch.optim.Adagrad, True),
    "Adam": (optim.Adam, torch.optim.Adam, False),
    "SGD momentum": (
        lambda p: optim.SGD(p, lr=0.01, momentum=0.9, mode="catch_up"),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        False,
    ),
}


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time steps, each on a different 6% of the rows, so that exact optimizers must catch up."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch's Adagrad would warn
    num_rows, touched = cpu.size(1_000_000, 1_000), cpu.size(63_819, 60)
    for name, (ours, theirs, takes_sparse) in PAIRS.items():
        for dim in (16, 64, 128) if name == "LazyAdam" else (64,):
            gradients = [_gradient(num_rows, touched, dim) for _ in range(4)]
            start = torch.randn(num_rows, dim)
            weight = sparsekit.nn.EmbeddingWeight(start.clone())
            other = torch.nn.Parameter(start)
            dense = gradients if takes_sparse else [grad.to_dense() for grad in gradients]
            our_optimizer, their_optimizer = ours([weight]), theirs([other])
            our_steps = _steps(our_optimizer, weight, gradients)
            their_steps = _steps(their_optimizer, other, dense)
            for one, another in zip(our_steps, their_steps, strict=True):
                one()
                another()
            weight.catch_up()
            torch.testing.assert_close(weight.detach(), other.detach(), rtol=1e-4, atol=1e-5)
            lazy = name == "LazyAdam"
            peer = "SparseAdam" if lazy else f"torch {name}{'' if takes_sparse else ', dense'}"
            yield from cpu.compare(
                f"{name}, {touched:,} of {num_rows:,} rows x {dim}",
                our_steps,
                {peer: their_steps},
                "LazyAdam, coalesced gradient" if lazy else "",
                num_bytes=28 * dim * touched if lazy else None,
            )


def _gradient(num_rows: int, touched: int, dim: int) -> torch.Tensor:
    rows = torch.randperm(num_rows)[:touched].sort().values
    return torch.sparse_coo_tensor(
        rows[None],
        torch.randn(touched, dim),
        (num_rows, dim),
        is_coalesced=True,
        check_invariants=False,
    )


def _steps(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradients: list[torch.Tensor]
) -> list[Call]:
    def step(gradient: torch.Tensor) -> None:
        weight.grad = gradient
        optimizer.step()

    return [partial(step, gradient) for gradient in gradients]


# Optimizers, and how many passes each makes over a row's elements: one to read the gradient, and
# two each (a read and a write) for the weight and every full-width state.
PASSES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "SGD": (lambda p: optim.SGD(p, lr=0.01), 3),
    "SGD momentum": (lambda p: optim.SGD(p, lr=0.01, momentum=0.9), 5),
    "Adagrad": (optim.Adagrad, 5),
    "RowWiseAdagrad": (optim.RowWiseAdagrad, 3),
    "RMSProp": (optim.RMSProp, 5),
    "Ftrl": (optim.Ftrl, 7),
    "LazyAdam per row": (lambda p: optim.LazyAdam(p, bias_correction="per_row"), 7),
}


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time steps that touch 2M rows of a large table."""
    for dim in (16, 64, 128, 256):
        yield from _against_sparse_adam(gpu, dim)
    for name, (make, passes) in PASSES.items():
        dim = 64
        num_rows = gpu.fit(gpu.size((1 << 30) // dim, 1_000), bytes_each=12 * dim)
        touched = min(gpu.size(2 << 20, 60), num_rows // 2)
        weight = torch.nn.Parameter(torch.zeros(num_rows, dim, device=gpu.device))
        weight.grad = _gradient_on(gpu, num_rows, touched, dim)
        timing = gpu.time(make([weight]).step)
        del weight
        case = f"{name} {touched:,} of {num_rows:,} rows x {dim}"
        yield gpu.against_r1(case, timing, 4 * passes * dim * touched)


def _against_sparse_adam(gpu: Gpu, dim: int) -> Iterator[Comparison]:
    # Leave memory for three tensors of the table's size, and for SparseAdam's temporaries.
    num_rows = gpu.fit(gpu.size((1 << 30) // dim, 1_000), bytes_each=20 * dim)
    touched = min(gpu.size(2 << 20, 60), num_rows // 2)
    grad = _gradient_on(gpu, num_rows, touched, dim)
    timings, results = [], []
    for optimizer_class in (optim.LazyAdam, torch.optim.SparseAdam):
        weight = torch.nn.Parameter(torch.zeros(num_rows, dim, device=gpu.device))
        weight.grad = grad
        timings.append(gpu.time(optimizer_class([weight]).step))
        results.append(weight.detach()[grad._indices()[0, :1000]])
        del weight
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    ours, theirs = timings
    case = f"LazyAdam {touched:,} of {num_rows:,} rows x {dim}"
    target = "LazyAdam, D >= 64" if dim >= 64 else ""
    yield gpu.against_r1(case, ours, 28 * dim * touched, target)
    yield from gpu.against(case, ours, "SparseAdam", theirs)


def _gradient_on(gpu: Gpu, num_rows: int, touched: int, dim: int) -> torch.Tensor:
    order = torch.randperm(num_rows, generator=gpu.generator, device=gpu.device)
    return torch.sparse_coo_tensor(
        order[:touched].sort().values[None],
        gpu.randn(touched, dim),
        (num_rows, dim),
        is_coalesced=True,
        check_invariants=False,
    )
