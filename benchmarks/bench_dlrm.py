"""Times a recommendation model of typical size: 26 tables, dim 128, zipf keys, batch 65,536.

sparsekit and the peer use the same dense part. The peer gets row numbers instead of keys.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

import sparsekit

from . import waits
from .common import Comparison
from .gpu import Gpu

TABLES, DENSE = 26, 13


class Dense(torch.nn.Module):
    """The model without its tables: two stacks of layers, and pairwise dot products of vectors."""

    pairs: torch.Tensor  # int64: indices of the distinct pairs in the flattened products

    def __init__(self, dim: int, widths: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.bottom = _stack((DENSE, *widths, dim), device)
        row, column = torch.triu_indices(TABLES + 1, TABLES + 1, 1, device=device)
        self.register_buffer("pairs", row * (TABLES + 1) + column)
        self.top = _stack((dim + len(row), *widths, 1), device)

    def forward(self, dense: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return a logit per sample from dense values ``[n, 13]`` and vectors ``[n, 26, dim]``."""
        first = self.bottom(dense)
        every = torch.cat([first.unsqueeze(1), vectors], 1)
        products = (every @ every.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([first, products], 1)).squeeze(1)


def _stack(widths: tuple[int, ...], device: torch.device) -> torch.nn.Sequential:
    layers: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        layers += [torch.nn.Linear(before, after, device=device), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time steps with one key per bag. Uses 1M ids per table (40 GB), halved until they fit."""
    dim, batch = gpu.size(128, 8), gpu.size(65536, 16)
    widths = gpu.size(512, 8), gpu.size(256, 8)
    ids = gpu.fit(gpu.size(1 << 20, 100), bytes_each=TABLES * (12 * dim + 32))
    keys = [gpu.zipf(batch, 1.05, ids) for _ in range(TABLES)]
    dense = gpu.randn(batch, DENSE)
    labels = gpu.randint(2, batch).float()

    def step_of(
        lookup: Callable[[], torch.Tensor],
        tables: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> Callable[[], None]:
        torch.manual_seed(0)
        model = Dense(dim, widths, gpu.device)
        of_dense = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            logits = model(dense, lookup())
            F.binary_cross_entropy_with_logits(logits, labels).backward()
            for each in (optimizer, of_dense):
                each.step()
                each.zero_grad()

        return step

    timings = {}
    counted: dict[str, str] = {}
    for name, in_backward in (("LazyAdam", False), ("LazyAdam in backward", True)):
        layers = {
            f"t{i}": sparsekit.DistributedEmbedding("sum", ids, dim, 1, 1, device=gpu.device)
            for i in range(TABLES)
        }
        group = sparsekit.EmbeddingGroup(layers)
        optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=0.01)
        if in_backward:
            sparsekit.optim.fuse_in_backward(optimizer, group)
        inputs = {f"t{i}": of_table.view(batch, 1, 1) for i, of_table in enumerate(keys)}

        def ours(group: sparsekit.EmbeddingGroup = group, inputs: dict = inputs) -> torch.Tensor:
            return torch.cat(list(group(inputs).values()), 1)

        step = step_of(ours, group, optimizer)
        timings[name] = gpu.time(step)
        if gpu.on_gpu:
            counted[name] = f", {waits.count(step).all} waits"
        del group, layers, optimizer, step, ours

    bags = torch.nn.ModuleList(
        torch.nn.EmbeddingBag(ids, dim, mode="sum", sparse=True, device=gpu.device)
        for _ in range(TABLES)
    )
    columns = [of_table.view(batch, 1) for of_table in keys]

    def theirs() -> torch.Tensor:
        return torch.stack([bag(c) for bag, c in zip(bags, columns, strict=True)], 1)

    peer = gpu.time(step_of(theirs, bags, torch.optim.SparseAdam(list(bags.parameters()))))
    # Each key's vector and gradient are read once; each row's weight and two states are read and
    # written.
    distinct = sum(len(of_table.unique()) for of_table in keys)
    num_bytes = 4 * dim * (2 * batch * TABLES + 6 * distinct)
    for name, timing in timings.items():
        case = f"step of {TABLES} tables of {ids:,} x {dim}, batch {batch:,}, {name}"
        case += counted.get(name, "")
        yield from gpu.against(case, timing, "EmbeddingBag + SparseAdam", peer, wall=True)
        yield gpu.against_r1(case, timing, num_bytes)
