"""Defines many tables shared by ranks, and steps that use them via a group, one layer, or TorchRec.

sparsekit looks up raw keys in hash tables that already contain all keys; TorchRec gets row numbers.
The input of both is one KeyedJaggedTensor, or a stand-in for it. A group returns the vectors of
each table by name, which saves a copy. All sides get the same constant gradients for the outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import sparsekit
from sparsekit import optim

from .bench_group import Keyed
from .common import assert_same_sums, zipf_keys
from .on_ranks import Step
from .peers import torchrec

BATCHES = 4


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; `batch` is the batch size of one rank."""

    tables: int
    ids: int
    batch: int
    dim: int

    def text(self) -> str:
        """Format the sizes for a case's name."""
        return f"{self.tables} tables of {self.ids:,} x {self.dim}, batch {self.batch:,}"


class Tables:
    """Tables with one slot each, sharded over a process group; batches have one key per bag.

    Args:
        shape: number and sizes of the tables.
        ranks: ranks whose batches this process looks up, one after another.
        over: ranks that share the tables; None for all.
        output: the `output` option for a group.
    """

    def __init__(
        self,
        shape: Shape,
        ranks: Sequence[int],
        over: dist.ProcessGroup | None = None,
        output: str = "dict",
    ) -> None:
        self.shape, self.over, self.output = shape, over, output
        self.names = [f"t{t}" for t in range(shape.tables)]
        self.batches = [
            [
                torch.cat(
                    [
                        zipf_keys(shape.batch, 1.2, shape.ids, 10_000 * rank + 1_000 * i + t)
                        for rank in ranks
                    ]
                )
                for t in range(shape.tables)
            ]
            for i in range(BATCHES)
        ]
        self.bags = shape.batch * len(ranks)
        self.inputs = [self._keyed(batch) for batch in self.batches]
        of_table = torch.randn(self.bags, shape.dim)
        self.grad = of_table.repeat(1, shape.tables)  # all vectors in one tensor
        self.grads = [of_table] * shape.tables if output == "dict" else [self.grad]

    def _keyed(self, keys: Sequence[torch.Tensor]) -> Keyed:
        values = torch.cat(list(keys))
        return Keyed(self.names, values, torch.arange(len(values) + 1))

    def _capacity(self, ids: int) -> int:
        """Return the capacity per rank: its expected share of the ids, plus a margin."""
        world = dist.get_world_size(self.over)
        return ids if world == 1 else ids * 6 // 5 // world + 50

    def group(self) -> sparsekit.EmbeddingGroup:
        """Return a group whose tables contain all keys."""
        layers = {
            name: sparsekit.DistributedEmbedding(
                "sum",
                self._capacity(self.shape.ids),
                self.shape.dim,
                1,
                1,
                name=name,
                process_group=self.over,
            )
            for name in self.names
        }
        group = sparsekit.EmbeddingGroup(layers, output=self.output)
        for _ in self.vectors(group):
            pass
        return group

    @torch.no_grad()
    def vectors(self, group: sparsekit.EmbeddingGroup) -> Iterator[torch.Tensor]:
        """Yield vectors ``[n, tables, dim]`` of all ids, n at a time; inserts missing ids."""
        for ids in torch.arange(self.shape.ids).split(4096):
            outputs = self.look_up(group, self._keyed([ids] * self.shape.tables))
            yield torch.cat(outputs, 1).view(-1, self.shape.tables, self.shape.dim)

    def look_up(self, group: sparsekit.EmbeddingGroup, keys: Keyed) -> list[torch.Tensor]:
        """Return a group's outputs in the order of `grads`."""
        outputs = group(keys)
        return list(outputs.values()) if self.output == "dict" else [outputs]

    def step(
        self, group: sparsekit.EmbeddingGroup, optimizer: torch.optim.Optimizer | None = None
    ) -> Step:
        """Return a step of a group; without an optimizer, gradients are sent but not applied."""

        def step(i: int) -> None:
            torch.autograd.backward(self.look_up(group, self.inputs[i % BATCHES]), self.grads)
            if optimizer is not None:
                optimizer.step()
            group.zero_grad()

        return step

    def training(self, in_backward: bool) -> Step:
        """Return a training step for a new group, using LazyAdam."""
        group = self.group()
        optimizer = optim.LazyAdam(group.parameters(), lr=0.01)
        if in_backward:
            optim.fuse_in_backward(optimizer, group)
        return self.step(group, optimizer)

    def one_layer(self) -> Step:
        """Return a step of one layer with a slot per table; offsets separate the slots' keys."""
        tables, ids, dim = self.shape.tables, self.shape.ids, self.shape.dim
        layer = sparsekit.DistributedEmbedding(
            "sum", self._capacity(tables * ids), dim, tables, 1, name="one", process_group=self.over
        )
        with torch.no_grad():
            for keys in torch.arange(tables * ids).split(4096 * tables):
                layer(keys.view(-1, tables, 1))
        optimizer = optim.LazyAdam(layer.parameters(), lr=0.01)
        moved = [
            torch.stack([keys + t * ids for t, keys in enumerate(batch)], 1).unsqueeze(2)
            for batch in self.batches
        ]
        grad = self.grad.view(-1, tables, dim)

        def step(i: int) -> None:
            layer(moved[i % BATCHES]).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def torchrec(self) -> Step:
        """Return a step of TorchRec with a group's initial vectors; backward runs the optimizer."""
        group = self.group()
        model = torchrec.model(
            {name: [name] for name in self.names}, self.shape.ids, self.shape.dim
        )
        own = torchrec.own_weights(model)
        first = 0
        for vectors in self.vectors(group):
            for name, weight in own.items():
                part = vectors[:, self.names.index(name)]
                weight[first : first + len(part)].copy_(part)
            first += len(vectors)
        lengths = torch.ones(self.shape.tables * self.bags, dtype=torch.int64)
        inputs = [torchrec.keyed(self.names, torch.cat(batch), lengths) for batch in self.batches]
        with torch.no_grad():
            for ours, theirs in zip(self.inputs, inputs, strict=True):
                outputs = torch.cat(self.look_up(group, ours), 1)
                assert_same_sums(outputs, model(theirs).values())

        def step(i: int) -> None:
            model(inputs[i % BATCHES]).values().backward(self.grad)

        return step
