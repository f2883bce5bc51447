"""Reports how much memory a module's tables take, and how much of it is for rows in use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._sizes import size_text
from ..device_rooms import rows_with_memory
from ..tables.admission import ExactCounts
from ..tables.embedding_table import EmbeddingTable
from ..tables.removal import states_of


class Bytes(NamedTuple):
    """Size of one part of a table, in bytes.

    Attributes:
        in_use: the part that belongs to rows in use.
        reserved: size of the tensors, including the part for free rows. For a table that grows on
            CUDA, only the memory allocated so far.
    """

    in_use: int
    reserved: int


@dataclass(frozen=True)
class TableMemory:
    """Memory taken by this rank's part of a table.

    Attributes:
        name: name of the layer.
        rows: number of rows in use.
        capacity: number of rows that the table has room for.
        vectors: size of the weight.
        states: sizes of optimizer states with an entry for each row, by the optimizer's class and
            the state's name, such as ``"LazyAdam.exp_avg"``.
        index: size of the hash table. Keys are spread all over it, so all of it is in use.
        scores: size of the rows' scores; 0 without eviction, ttl or admission.
        waiting: size of the counts for keys waiting for admission, including their index.
        resident: how many bytes of the file with vectors and states are in memory; None without
            a file.
    """

    name: str
    rows: int
    capacity: int
    vectors: Bytes
    states: dict[str, Bytes]
    index: Bytes
    scores: Bytes
    waiting: Bytes
    resident: int | None = None

    @property
    def total(self) -> Bytes:
        """The sum of all parts."""
        parts = self.vectors, *self.states.values(), self.index, self.scores, self.waiting
        return _sum(parts)


@dataclass(frozen=True)
class MemoryReport:
    """Memory of a module's tables on this rank; ``print`` shows the reserved size of each part.

    Attributes:
        tables: one entry for each table, in the order of the module's layers.
    """

    tables: tuple[TableMemory, ...]

    @property
    def total(self) -> Bytes:
        """The sum over all tables."""
        return _sum(table.total for table in self.tables)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]]
        rows = [("table", "rows", "of", *_PARTS, "in use", "reserved")]
        for table in self.tables:
            states = _sum(table.states.values())
            parts = table.vectors, states, table.index, table.scores, table.waiting
            sizes = [part.reserved for part in parts]
            sizes += [table.total.in_use, table.total.reserved]
            rows.append(
                (table.name, f"{table.rows:,}", f"{table.capacity:,}", *map(size_text, sizes))
            )
        rows.append(("all", *[""] * (2 + len(_PARTS)), *map(size_text, self.total)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


_PARTS = "vectors", "states", "index", "scores", "waiting"


@torch.no_grad()
def memory_report(module: torch.nn.Module) -> MemoryReport:
    """Report the memory of all tables in a module, excluding gradients and the dense part.

    Each rank reports its own part. Optimizer states exist from the first step on. On CUDA, reading
    the number of rows in use waits for the device.

    Args:
        module: a layer, a group, or a model with layers; without layers, the report has no tables.

    Example:
        >>> layer = sparsekit.Embedding(1000, 8, name="users")
        >>> layer(torch.arange(10)).sum().backward()
        >>> report = sparsekit.memory_report(layer)
        >>> report.tables[0].vectors
        Bytes(in_use=320, reserved=32000)
    """
    tables = (one for one in module.modules() if isinstance(one, EmbeddingTable))
    return MemoryReport(tuple(map(_of_table, tables)))


def _of_table(table: EmbeddingTable) -> TableMemory:
    weight = table.weight
    rows = table.capacity if table.table is None else 0 if weight.is_meta else len(table.table)

    def of_rows(tensor: torch.Tensor | None) -> Bytes:
        if tensor is None:
            return Bytes(0, 0)
        if tensor.is_sparse:  # for example momentum in torch's SGD
            size = tensor._indices().nbytes + tensor._values().nbytes
            return Bytes(size, size)
        of_row = tensor.nbytes // len(tensor)
        return Bytes(of_row * rows, of_row * rows_with_memory(tensor))

    index = [] if table.table is None else list(table.table.tensors())
    counts = None if table.life is None else table.life.counts
    waiting = [] if counts is None else [counts.words]
    if isinstance(counts, ExactCounts):
        waiting += counts.index.tensors()
    states: dict[str, Bytes] = {}
    for name, state, _ in () if weight.is_meta else states_of(weight):
        # Two optimizers of the same class may have states for a weight, for example if one has
        # replaced the other.
        states[name] = _sum((states.get(name, Bytes(0, 0)), of_rows(state)))
    return TableMemory(
        name=table.name,
        rows=rows,
        capacity=table.capacity,
        vectors=of_rows(weight.detach()),
        states=states,
        index=_whole(index),
        scores=of_rows(table.scores),
        waiting=_whole(waiting),
        resident=None if table.files is None else table.files.resident_bytes(),
    )


def _whole(tensors: Iterable[torch.Tensor]) -> Bytes:
    size = sum(tensor.nbytes for tensor in tensors)
    return Bytes(size, size)


def _sum(parts: Iterable[Bytes]) -> Bytes:
    listed = list(parts)
    return Bytes(sum(part.in_use for part in listed), sum(part.reserved for part in listed))
