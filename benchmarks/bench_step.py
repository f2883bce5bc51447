"""A whole training step, raw keys to updated rows, against EmbeddingBag(sparse) + SparseAdam.

Once with a step of the optimizer, and once with the update made in backward. The peer gets row
numbers that are ready, and no hash table to look them up in.
"""

from collections.abc import Callable, Iterator

import torch

import sparsekit

from .common import Result, compare, zipf_keys
from .gpu import Comparison, Gpu, Timing


def _steps(
    layer: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[object, ...]]
) -> Callable[[], None]:
    """A function that trains on the next batch each time, so that no batch stays in the cache."""
    count = 0

    def step() -> None:
        nonlocal count
        out = layer(*batches[count % len(batches)])
        out.backward(torch.ones_like(out))
        optimizer.step()
        optimizer.zero_grad()
        count += 1

    return step


def run(quick: bool) -> Iterator[Result]:
    """8192 samples of 26 slots with 2 keys each, zipf 1.2 over a million ids, dim 64."""
    batch, slots, nnz, dim, ids = (8, 3, 2, 8, 100) if quick else (8192, 26, 2, 64, 1_000_000)
    keys = [zipf_keys(batch * slots * nnz, 1.2, ids, seed) for seed in range(4)]
    offsets = torch.arange(0, batch * slots * nnz + 1, nnz)
    for fused in (False, True):
        layer = sparsekit.DistributedEmbedding("sum", ids, dim, slots, nnz)
        optimizer = sparsekit.optim.LazyAdam(layer.parameters())
        if fused:
            sparsekit.optim.fuse_in_backward(optimizer, layer)
        peer = torch.nn.EmbeddingBag(ids, dim, mode="sum", sparse=True, include_last_offset=True)
        ours = _steps(layer, optimizer, [(k.view(batch, slots, nnz),) for k in keys])
        their_optimizer = torch.optim.SparseAdam(peer.parameters())
        theirs = _steps(peer, their_optimizer, [(k, offsets) for k in keys])
        for _ in keys:  # states get their memory as rows are touched for the first time
            ours()
            theirs()
        yield compare(
            f"step{' in backward' if fused else ''}, {batch * slots * nnz:,} keys zipf 1.2 x {dim}",
            ours,
            "EmbeddingBag(sparse) + SparseAdam",
            theirs,
        )


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """65,536 samples of 26 slots with 2 keys each; a table of 8 GiB with dim 128, of 4 with 64."""
    batch, slots, nnz = gpu.size(65536, 8), 26, 2
    n = batch * slots * nnz
    for dim in (128, 64):
        # Weight and moments, and the two sides' temporaries.
        ids = gpu.fit(gpu.size(16 << 20, 1_000), bytes_each=20 * dim)
        for name, keys in (
            ("uniform", gpu.randint(ids, n)),
            ("zipf 1.2", gpu.zipf(n, 1.2, ids)),
        ):
            grad = gpu.randn(batch, slots, dim)
            layer = sparsekit.DistributedEmbedding("sum", ids, dim, slots, nnz, device=gpu.device)
            optimizer: torch.optim.Optimizer = sparsekit.optim.LazyAdam(layer.parameters())
            ours = _parts(gpu, layer, optimizer, (keys.view(batch, slots, nnz),), grad)
            del layer, optimizer
            peer = torch.nn.EmbeddingBag(
                ids, dim, mode="sum", sparse=True, include_last_offset=True, device=gpu.device
            )
            offsets = torch.arange(0, n + 1, nnz, device=gpu.device)
            optimizer = torch.optim.SparseAdam(peer.parameters())
            flat = grad.view(batch * slots, dim)
            theirs = _parts(gpu, peer, optimizer, (keys, offsets), flat)
            del peer, optimizer

            peer_name = "EmbeddingBag + SparseAdam"
            distinct = len(sparsekit.ops.unique(keys)[0])
            case = f"{n:,} keys ({distinct:,} distinct of {ids:,}) {name} x {dim}"
            target = f"backward + LazyAdam, {name.split()[0]}"
            num_bytes = 4 * dim * n + 24 * dim * distinct
            backward = f"backward + LazyAdam, {case}"
            yield gpu.against_r1(backward, ours[0], num_bytes, target)
            yield from gpu.against(backward, ours[0], peer_name, theirs[0], target)
            yield from gpu.against(f"step, {case}", ours[1], peer_name, theirs[1], wall=True)


def _parts(
    gpu: Gpu,
    layer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[object, ...],
    grad: torch.Tensor,
) -> tuple[Timing, Timing]:
    """Times of backward and optimizer, and of the whole step."""
    outputs = []

    def forward() -> None:
        outputs.append(layer(*inputs))

    def backward() -> None:
        outputs.pop().backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        forward()
        backward()

    return gpu.time(backward, forward), gpu.time(step)
