"""Times steps of an EmbeddingGroup with many tables, and of a single layer with few keys.

Peers get row numbers and need no hash table. A constant gradient for the outputs stands in for a
model's dense part.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

import sparsekit
from sparsekit import optim
from sparsekit.data.criteo_sample import CARDINALITIES, KEYS_PER_BAG

from .common import Comparison, zipf_keys
from .cpu import Call, Cpu
from .peers import fbgemm

TABLES = 26
BAGS, TBE = "EmbeddingBag + SparseAdam", "FBGEMM TBE + row-wise Adagrad"
ONE_LAYER, ONE_TABLE = "one layer, same keys", "one table, same keys"

# Row counts of the tables in MLPerf's DLRM-DCNv2, limited to a million each.
MLPERF_ROWS = [min(rows, 1_000_000) for rows in CARDINALITIES]


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time 26 tables of two sizes, MLPerf's tables, 1 to 500 tables, and small layers."""
    yield from _twenty_six(cpu, cpu.size(2048, 8), cpu.size(16, 4))
    yield from _twenty_six(cpu, cpu.size(8192, 12), cpu.size(64, 8))
    yield from _mlperf(cpu)
    for dim in (cpu.size(16, 4), cpu.size(64, 8)):
        yield from _same_keys(cpu, dim)
    yield from _small_layer(cpu)


class Keyed:
    """Stand-in for a KeyedJaggedTensor: the bags of all features, feature by feature."""

    def __init__(self, names: list[str], values: torch.Tensor, offsets: torch.Tensor) -> None:
        self._parts = names, values, offsets

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._parts[0]

    def values(self) -> torch.Tensor:
        """Return all keys."""
        return self._parts[1]

    def offsets(self) -> torch.Tensor:
        """Return the offsets of the bags."""
        return self._parts[2]


class Tables:
    """Table sizes and batches of keys, with one slot per table; methods return steps to time."""

    def __init__(self, cpu: Cpu, rows: Sequence[int], nnz: Sequence[int], batch: int, dim: int):
        self.rows, self.nnz, self.batch, self.dim = rows, nnz, batch, dim
        self.names = [f"t{t}" for t in range(len(rows))]
        num_bytes = 8 * batch * sum(nnz)
        self.batches = [
            [
                zipf_keys(batch * keys, 1.2, ids, seed=1000 * i + t)
                for t, (ids, keys) in enumerate(zip(rows, nnz, strict=True))
            ]
            for i in range(cpu.copies(num_bytes, most=8))
        ]
        self.grad = torch.randn(batch, dim)

    def group(self, optimizer: Callable[..., optim.RowOptimizer], fused: bool) -> list[Call]:
        """Return steps of an EmbeddingGroup whose tables already contain all keys."""
        layers = self._layers()
        group = sparsekit.EmbeddingGroup(layers)
        made = optimizer(group.parameters(), lr=0.01)
        if fused:
            optim.fuse_in_backward(made, group)
        grads = [self.grad.unsqueeze(1)] * len(layers)

        def step(inputs: dict[str, torch.Tensor]) -> None:
            torch.autograd.backward(list(group(inputs).values()), grads)
            made.step()
            made.zero_grad()

        return [
            partial(
                step,
                {
                    name: keys.view(self.batch, 1, -1)
                    for name, keys in zip(self.names, batch, strict=True)
                },
            )
            for batch in self.batches
        ]

    def keyed_group(self) -> list[Call]:
        """Return steps of a group whose input is one `Keyed` and whose output is one tensor."""
        layers = self._layers()
        group = sparsekit.EmbeddingGroup(layers, output="concatenated")
        made = optim.LazyAdam(group.parameters(), lr=0.01)
        optim.fuse_in_backward(made, group)
        lengths = torch.tensor(self.nnz).repeat_interleave(self.batch)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        grad = self.grad.repeat(1, len(layers))

        def step(keys: Keyed) -> None:
            group(keys).backward(grad)
            made.step()
            made.zero_grad()

        return [partial(step, Keyed(self.names, torch.cat(keys), offsets)) for keys in self.batches]

    def _layers(self) -> dict[str, sparsekit.DistributedEmbedding]:
        """Return one layer per table, with all keys inserted."""
        layers = {
            name: sparsekit.DistributedEmbedding("sum", ids, self.dim, 1, keys)
            for name, ids, keys in zip(self.names, self.rows, self.nnz, strict=True)
        }
        for layer, ids in zip(layers.values(), self.rows, strict=True):
            _fill(layer, ids)
        return layers

    def one_layer(self) -> list[Call]:
        """Return steps of one layer with a slot per table; offsets separate the slots' keys."""
        (nnz,) = set(self.nnz)
        slots, ids = len(self.rows), sum(self.rows)
        layer = sparsekit.DistributedEmbedding("sum", ids, self.dim, slots, nnz)
        _fill(layer, ids)
        made = optim.LazyAdam(layer.parameters(), lr=0.01)
        grad = self.grad.unsqueeze(1).repeat(1, slots, 1)

        def step(keys: torch.Tensor) -> None:
            layer(keys).backward(grad)
            made.step()
            made.zero_grad()

        before = [sum(self.rows[:t]) for t in range(slots)]
        return [
            partial(
                step,
                torch.stack(
                    [
                        keys.view(self.batch, nnz) + first
                        for keys, first in zip(batch, before, strict=True)
                    ],
                    1,
                ),
            )
            for batch in self.batches
        ]

    def bags(self, optimizer: Callable[..., torch.optim.Optimizer]) -> list[Call]:
        """Return steps with one EmbeddingBag per table."""
        tables = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(ids, self.dim, mode="sum", sparse=True) for ids in self.rows
        )
        made = optimizer(list(tables.parameters()), lr=0.01)
        grads = [self.grad] * len(self.rows)

        def step(batch: list[torch.Tensor]) -> None:
            outputs = [table(keys) for table, keys in zip(tables, batch, strict=True)]
            torch.autograd.backward(outputs, grads)
            made.step()
            made.zero_grad()

        return [partial(step, [k.view(self.batch, -1) for k in batch]) for batch in self.batches]

    def tbe(self) -> list[Call]:
        """Return steps of FBGEMM's module, which stores all tables together."""
        module = fbgemm.tables([(ids, self.dim) for ids in self.rows])
        lengths = torch.tensor(self.nnz).repeat_interleave(self.batch)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        grad = self.grad.repeat(1, len(self.rows))

        def step(keys: torch.Tensor) -> None:
            module(keys, offsets).backward(grad)

        return [partial(step, torch.cat(batch)) for batch in self.batches]


def _twenty_six(cpu: Cpu, batch: int, dim: int) -> Iterator[Comparison]:
    tables = Tables(cpu, [cpu.size(100_000, 50)] * TABLES, [1] * TABLES, batch, dim)
    peers = {ONE_LAYER: tables.one_layer(), BAGS: tables.bags(torch.optim.SparseAdam)}
    if cpu.has(TBE, fbgemm.missing()):
        peers[TBE] = tables.tbe()
    case = f"step of {TABLES} tables of {tables.rows[0]:,} x {dim}, batch {batch:,}"
    ours = {
        "LazyAdam": tables.group(optim.LazyAdam, False),
        "LazyAdam in backward": tables.group(optim.LazyAdam, True),
    }
    for name, steps in ours.items():
        yield from cpu.compare(f"{case}, {name}", steps, peers, "step of 26 tables")


def _mlperf(cpu: Cpu) -> Iterator[Comparison]:
    rows = MLPERF_ROWS if not cpu.quick else [min(ids, 50) for ids in MLPERF_ROWS]
    tables = Tables(cpu, rows, KEYS_PER_BAG, cpu.size(512, 4), cpu.size(128, 4))
    peers = {"EmbeddingBag + Adagrad": tables.bags(torch.optim.Adagrad)}
    if cpu.has(TBE, fbgemm.missing()):
        peers[TBE] = tables.tbe()
    yield from cpu.compare(
        f"step of MLPerf's {len(rows)} tables x {tables.dim}, batch {tables.batch}, "
        f"RowWiseAdagrad in backward",
        tables.group(optim.RowWiseAdagrad, True),
        peers,
    )


def _same_keys(cpu: Cpu, dim: int) -> Iterator[Comparison]:
    """Time steps with the same total numbers of keys and rows, divided among 1 to 500 tables.

    Inputs and outputs are one tensor each: with hundreds of outputs, autograd would take longer
    than the lookup.
    """
    keys, ids = cpu.size(2048 * TABLES, 1040), cpu.size(100_000 * TABLES, 2080)

    def steps(count: int) -> list[Call]:
        tables = Tables(cpu, [ids // count] * count, [1] * count, keys // count, dim)
        return tables.keyed_group()

    one = {ONE_TABLE: steps(1)}
    lines = {
        26: "",
        cpu.size(100, 52): "step of 100 tables",
        cpu.size(500, 104): "step of 500 tables",
    }
    for count, line in lines.items():
        yield from cpu.compare(
            f"step, {keys:,} keys over {count} tables x {dim}, LazyAdam in backward",
            steps(count),
            one,
            line,
        )


def _small_layer(cpu: Cpu) -> Iterator[Comparison]:
    ids, dim = cpu.size(100_000, 50), 16
    for batch in (1, 256, 2048):
        keys = [zipf_keys(batch, 1.2, ids, seed) for seed in range(cpu.copies(8 * batch))]
        layer = sparsekit.DistributedEmbedding("sum", ids, dim, 1, 1)
        _fill(layer, ids)
        bag = torch.nn.EmbeddingBag(ids, dim, mode="sum", sparse=True)
        # Create the views now, so that they are not timed; the two layers need different shapes.
        ours = [k.view(-1, 1, 1) for k in keys]
        theirs = [k.view(-1, 1) for k in keys]
        layer.eval()
        with torch.no_grad():
            yield from cpu.compare(
                f"evaluation of a layer, {batch} keys x {dim}",
                [partial(layer, k) for k in ours],
                {"EmbeddingBag": [partial(bag, k) for k in theirs]},
                f"evaluation, {batch} keys",
            )
        layer.train()
        lazy = optim.LazyAdam(layer.parameters())
        peer = torch.optim.SparseAdam(bag.parameters())
        yield from cpu.compare(
            f"step of a layer, {batch} keys x {dim}, LazyAdam",
            [partial(_step, layer, k, lazy) for k in ours],
            {BAGS: [partial(_step, bag, k, peer) for k in theirs]},
            "step of a small layer" if batch <= 256 else "",
        )


def _step(layer: torch.nn.Module, keys: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    layer(keys).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _fill(layer: sparsekit.DistributedEmbedding, ids: int) -> None:
    """Insert the keys 0 to ids - 1, so that the timed steps insert none."""
    assert layer.table is not None
    layer.table.find_or_insert(torch.arange(ids))
    layer.weight.data.uniform_(-0.05, 0.05)
