"""Opens the files of a table in a chain of checkpoints, and checks their columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from ..errors import CheckpointError
from ..tables.admission import form_of
from ..tables.hash_table import HashTable
from .files import PIECE
from .manifest import Manifest, Shard, Table
from .tensor_file import Column, TensorFile, dtype_name

Chain = Sequence[tuple[Path, Manifest]]


class TensorStore(Protocol):
    """Provides the tensors of a checkpoint that is not stored in a folder."""

    def file(self, name: str) -> TensorFile:
        """Open the file with this name from the manifest."""


Folder = Path | TensorStore
Links = Sequence[tuple[Folder, Manifest]]
AnyFolder = TypeVar("AnyFolder", bound=Folder)


def parts_of(
    links: Sequence[tuple[AnyFolder, Manifest]], name: str
) -> list[tuple[AnyFolder, Table]]:
    """Return a table's manifest entries in a chain, starting at the last complete one.

    Raises:
        CheckpointError: the entries' columns differ.
    """
    parts = [(at, manifest.tables[name]) for at, manifest in links if name in manifest.tables]
    complete = [i for i, (_, table) in enumerate(parts) if table.complete]
    parts = parts[complete[-1] :]
    newest = _described(parts[-1][1])
    for at, table in parts:
        if (found := _described(table)) != newest:
            raise CheckpointError(f"{at}: {name} has {found}, and {newest} in what follows it")
    return parts


def _described(table: Table) -> str:
    """Return a string that describes everything that must be equal in all of a table's files."""
    return f"dim {table.dim}, {table.dtype}, states {table.states}, scores {table.score_kind}"


def file_in(folder: Folder, name: str) -> TensorFile:
    """Open a checkpoint's file by its name in the manifest."""
    return TensorFile(folder / name) if isinstance(folder, Path) else folder.file(name)


def columns_of(table: Table, rows: int) -> list[Column]:
    """Describe the columns common to all of a table's files."""
    scores = [] if table.scores is None else [Column("scores", torch.int64, (rows,))]
    return [
        Column("keys", torch.int64, (rows,)),
        Column("vectors", getattr(torch, table.dtype), (rows, table.dim)),
        *scores,
        *(
            Column(name, getattr(torch, state.dtype), (rows, *state.shape))
            for name, state in table.states.items()
        ),
    ]


def columns_of_shard(table: Table, shard: Shard, with_rows: bool) -> list[Column]:
    """Describe the extra columns in a shard's file."""
    counts, kind = [], table.counts_kind
    if kind is not None:
        counts = [Column("counts", *form_of(kind, shard.counts))]
    rows = [Column("rows", torch.int32, (shard.rows,))] if with_rows else []
    removed = [Column("removed", torch.int64, (shard.removed,))] if shard.removed else []
    return [*rows, *removed, *counts]


def opened(folder: Folder, table: Table, shard: Shard) -> TensorFile:
    """Open a shard's file; raise CheckpointError unless its columns match the manifest."""
    file = file_in(folder, shard.file)
    besides = columns_of_shard(table, shard, "rows" in file.places)
    for column in [*columns_of(table, shard.rows), *besides]:
        place = file.places.get(column.name)
        found = place and (dtype_name(place.dtype), place.shape)
        if found != (dtype_name(column.dtype), column.shape):
            file.close()
            raise CheckpointError(
                f"{file.path}: is damaged: {column.name} should be {dtype_name(column.dtype)} "
                f"{list(column.shape)}, and is {found}"
            )
    return file


def key_pieces(file: TensorFile, rows: int, row_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a file's keys in pieces, each with the index of its first row."""
    step = max(1, PIECE // row_bytes)
    for begin in range(0, rows, step):
        yield begin, file.read("keys", begin, min(step, rows - begin))


def removed_keys(folder: Folder, table: Table, shards: Sequence[Shard]) -> torch.Tensor:
    """Read the keys listed as removed in an incremental checkpoint's shards, int64 ``[n]``."""
    removed = [torch.empty(0, dtype=torch.int64)]
    for shard in shards:
        if shard.removed:
            with opened(folder, table, shard) as file:
                removed.append(file.read("removed"))
    return torch.cat(removed)


def keys_left_out(parts: Sequence[tuple[Folder, Table]], rank: int | None) -> HashTable | None:
    """Return the keys that have rows in a chain but are later removed for good.

    In each checkpoint, all removals are read before any rows.

    Args:
        parts: result of `parts_of`.
        rank: read only this rank's files; None for all ranks' files.

    Returns:
        The keys; None if there are none.
    """
    gone = np.empty(0, dtype=np.int64)
    for folder, table in parts[1:]:
        shards = table.shards if rank is None else table.shards[rank : rank + 1]
        gone = np.union1d(gone, removed_keys(folder, table, shards).numpy())
        for shard in shards if len(gone) else ():
            with opened(folder, table, shard) as file:
                gone = np.setdiff1d(gone, file.read("keys").numpy())
    if not len(gone):
        return None
    left_out = HashTable(len(gone), device="cpu")
    left_out.find_or_insert(torch.from_numpy(gone))
    return left_out
