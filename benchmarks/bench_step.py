"""A whole training step, raw keys to updated rows, against EmbeddingBag(sparse) + SparseAdam.

The peer gets row numbers that are ready, and no hash table to look them up in.
"""

from collections.abc import Callable, Iterator

import torch

import sparsekit

from .common import Result, compare, zipf_keys


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
    layer = sparsekit.DistributedEmbedding("sum", ids, dim, slots, nnz)
    peer = torch.nn.EmbeddingBag(ids, dim, mode="sum", sparse=True, include_last_offset=True)
    offsets = torch.arange(0, batch * slots * nnz + 1, nnz)
    yield compare(
        f"step, {batch * slots * nnz:,} keys zipf 1.2 x {dim}",
        _steps(
            layer,
            sparsekit.optim.LazyAdam(layer.parameters()),
            [(k.view(batch, slots, nnz),) for k in keys],
        ),
        "EmbeddingBag(sparse) + SparseAdam",
        _steps(peer, torch.optim.SparseAdam(peer.parameters()), [(k, offsets) for k in keys]),
    )
