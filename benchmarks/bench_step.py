"""Times a whole training step, from raw keys to updated rows.

The peers get row numbers and need no hash table. A constant gradient for the bags stands in for a
model's dense part.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

import sparsekit
from sparsekit import optim

from .common import Comparison, zipf_keys
from .cpu import Call, Cpu
from .fused_step import FusedStep, captured
from .gpu import Gpu, Timing
from .peers import fbgemm

OURS: dict[str, tuple[Callable[..., optim.RowOptimizer], bool]] = {
    "LazyAdam": (optim.LazyAdam, False),
    "LazyAdam in backward": (optim.LazyAdam, True),
    "RowWiseAdagrad in backward": (optim.RowWiseAdagrad, True),
}


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time 8192 samples with 26 slots of 2 keys each, zipf 1.2 over a million ids, dim 64."""
    batch, slots, nnz = cpu.size(8192, 8), cpu.size(26, 3), 2
    dim, ids = cpu.size(64, 8), cpu.size(1_000_000, 100)
    n = batch * slots * nnz
    batches = [zipf_keys(n, 1.2, ids, seed) for seed in range(cpu.copies(8 * n, most=8))]
    offsets = torch.arange(0, n + 1, nnz)
    grad = torch.randn(batch * slots, dim)
    weight = torch.randn(ids, dim)
    lr = 0.01

    bag = torch.nn.EmbeddingBag(ids, dim, mode="sum", sparse=True, include_last_offset=True)
    bag.weight.data.copy_(weight)
    peers = {
        "EmbeddingBag + SparseAdam": _steps(
            bag, [(k, offsets) for k in batches], grad, torch.optim.SparseAdam(bag.parameters(), lr)
        )
    }
    results = {"EmbeddingBag + SparseAdam": bag.weight.detach()}
    name = "FBGEMM TBE + row-wise Adagrad"
    if cpu.has(name, fbgemm.missing()):
        table = fbgemm.table(weight, lr)
        peers[name] = _steps(table, [(k, offsets) for k in batches], grad)
        results[name] = table.split_embedding_weights()[0]
    for steps in peers.values():
        for step in steps:
            step()
    # Save the results after one step per batch, since the timed steps change them.
    expected = {name: result.clone() for name, result in results.items()}

    for name, (make, in_backward) in OURS.items():
        layer = sparsekit.DistributedEmbedding("sum", ids, dim, slots, nnz)
        assert layer.table is not None
        rows = layer.table.find_or_insert(torch.arange(ids))
        layer.weight.data[rows] = weight
        optimizer = make(layer.parameters(), lr=lr)
        if in_backward:
            optim.fuse_in_backward(optimizer, layer)
        ours = _steps(
            layer,
            [(k.view(batch, slots, nnz),) for k in batches],
            grad.view(batch, slots, dim),
            optimizer,
        )
        for step in ours:
            step()
        same = (
            "EmbeddingBag + SparseAdam" if "LazyAdam" in name else "FBGEMM TBE + row-wise Adagrad"
        )
        if same in expected:
            torch.testing.assert_close(
                layer.weight.detach()[rows], expected[same], rtol=1e-3, atol=1e-4
            )
        yield from cpu.compare(
            f"step, {name}, {n:,} keys zipf 1.2 x {dim}",
            ours,
            peers,
            "step with LazyAdam" if "LazyAdam" in name else "",
        )


def _steps(
    layer: torch.nn.Module,
    inputs: list[tuple[object, ...]],
    grad: torch.Tensor,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Call]:
    """Return a step for each batch; without an optimizer, each step ends with backward."""

    def step(arguments: tuple[object, ...]) -> None:
        layer(*arguments).backward(grad)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return [partial(step, arguments) for arguments in inputs]


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time 65,536 samples with 26 slots of 2 keys; the table is 8 GiB at dim 128, 4 GiB at 64."""
    batch, slots, nnz = gpu.size(65536, 8), 26, 2
    n = batch * slots * nnz
    for dim in (128, 64):
        # Leave memory for the weight and its moments, and for both sides' temporaries.
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
            fused = FusedStep(ids, dim, offsets)
            run = partial(fused, keys, flat)
            case = f"step by ops without a wait, {case}"
            yield from gpu.against(case, gpu.time(run), "the layer's", ours[1], wall=True)
            if gpu.on_gpu:
                graph, _ = captured(fused, keys, flat)
                timing = gpu.time(graph.replay)
                yield from gpu.against(f"{case}, in a graph", timing, "the layer's", ours[1])
                del graph
            del fused, run


def _parts(
    gpu: Gpu,
    layer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: tuple[object, ...],
    grad: torch.Tensor,
) -> tuple[Timing, Timing]:
    """Time backward and optimizer together, without forward, and then the whole step."""
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
