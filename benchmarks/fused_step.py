"""Trains one table with ops that keep every size on the device, so the host never waits.

This is a sketch of a fused mode for layers: the step pools the vectors of keys, and updates rows
with the gradient of the result. Each tensor has one row per key, since only the device knows the
number of distinct keys. Rows beyond that number are padding, and cost memory and time.
"""

import torch

import sparsekit
from sparsekit import ops

SETTINGS = (0.9, 0.999, 1e-8, 0.0, 0.0)  # Adam's settings except the learning rate


class FusedStep:
    """A step that sums bags and runs LazyAdam. A CUDA graph can capture it after the first call.

    Args:
        capacity: number of rows of the table.
        dim: size of a vector.
        offsets: bag offsets, int64 ``[bags + 1]``, the same in all calls.
        seed: seed for the initial vectors.
        lr: learning rate.
    """

    def __init__(
        self, capacity: int, dim: int, offsets: torch.Tensor, seed: int = 0, lr: float = 1e-3
    ) -> None:
        device = offsets.device
        self.table = sparsekit.HashTable(capacity, device=device)
        self.weight = torch.zeros(capacity, dim, device=device)
        # A row's states are adjacent in memory, as in the optimizer.
        self.states = torch.zeros(capacity, 2, dim, device=device).unbind(1)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.offsets = offsets
        self.seed = seed
        self.settings = [lr, *SETTINGS]

    def __call__(self, keys: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the keys' pooled vectors; update rows with `grad`, the gradient of the result."""
        unique, inverse, _, number = torch.ops.sparsekit.unique_padded(keys)
        rows, status = torch.ops.sparsekit.hash_table_find_or_insert_(
            self.table.buckets, self.table.hash_seed, self.table.size, unique,
            self.table.capacity, number,
        )  # fmt: skip
        ops.init_rows_(self.weight, unique, rows, status, seed=self.seed)
        pooled = ops.embedding_bag(self.weight, rows[inverse], self.offsets)
        grads = torch.ops.sparsekit.embedding_bag_backward(
            grad, inverse, self.offsets, 0, None, len(keys), False
        )
        torch.ops.sparsekit.update_rows_(
            [self.weight], self.states, [], [rows], [grads], [self.steps], "adam", self.settings,
            count_steps=True, num_grads=number,
        )  # fmt: skip
        return pooled


def captured(
    step: FusedStep, keys: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a step with these tensors; return the graph and its pooled vectors.

    The step runs once before the capture, as torch requires.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step(keys, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        pooled = step(keys, grad)
    return graph, pooled
