"""The table of contents of a checkpoint, ``manifest.json``: written last, checked first."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from .files import FileRecord

FORMAT = "sparsekit checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
# File of the CRC-32 of the manifest's bytes, in hexadecimal: it detects a changed number.
CHECKSUM = "manifest.crc32"
DENSE = "dense.safetensors"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a table.

    Attributes:
        rank: the one whose part this is.
        file: its name in the folder. It has ``keys`` int64 [rows], ``vectors`` [rows, dim] and
            each state, and may have ``removed`` int64 [n], keys that are gone since the base.
        rows: number of rows in this file.
        size: rows of the rank's table when it was saved: more than ``rows`` in a checkpoint of
            changes.
    """

    rank: int
    file: str
    rows: int
    size: int


@dataclass(frozen=True)
class State:
    """A number or vector that an optimizer keeps for each row.

    Attributes:
        dtype: name of its dtype.
        shape: that of one row's state: ``[dim]``, or ``[]`` for one number.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """An embedding table.

    Attributes:
        layer: the layer's name.
        dim: elements of a vector.
        dtype: name of the vectors' dtype.
        key_dtype: dtype of the layer's input; keys in files are int64.
        capacity: rows on each rank.
        hash_table: true if any int64 can be a key, false if keys are row numbers.
        placement: ``"hash"`` or ``"modulo"``.
        owners: None where no map places keys, else CRC-32 of the map from virtual shard to rank,
            as 65536 int16.
        seed: seed of the initial vectors.
        initializer: text of the initializer.
        optimizer: number of its optimizer, or None.
        states: name -> state that the optimizer keeps for each row.
        settings: numbers that the optimizer keeps for the whole table: ``step``.
        complete: true if all rows are here, false if only those changed since the base.
        shards: by rank.
    """

    layer: str
    dim: int
    dtype: str
    key_dtype: str
    capacity: int
    hash_table: bool
    placement: str
    owners: int | None
    seed: int
    initializer: str
    optimizer: int | None
    states: dict[str, State]
    settings: dict[str, Any]
    complete: bool
    shards: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """Return the rows of all ranks."""
        return sum(shard.size for shard in self.shards)


@dataclass(frozen=True)
class Base:
    """The checkpoint that a checkpoint of changes follows: a folder beside it, and its id."""

    folder: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its tensors.

    Attributes:
        id: random, 32 hexadecimal digits.
        step: the one that the user gave, or None.
        base: the checkpoint that a checkpoint of changes follows.
        world_size: ranks that wrote it.
        tables: by the name of the layer in the module.
        files: name -> size and CRC-32 of every file but the manifest.
        optimizers: kind, settings of groups and dense states of each.
        ranks: each rank's own states: random generators, and the objects given as state.
        version: version of sparsekit.
    """

    id: str
    step: int | None
    base: Base | None
    world_size: int
    tables: dict[str, Table]
    files: dict[str, FileRecord]
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    version: str = ""


def new_id() -> str:
    """Return a random id."""
    return secrets.token_hex(16)


def rank_file(rank: int) -> str:
    """Return the name of the file of a rank's own states."""
    return f"rank-{rank:04d}.safetensors"


def table_file(number: int, rank: int) -> str:
    """Return the name of the file of a rank's part of a table."""
    return f"table-{number:04d}-rank-{rank:04d}.safetensors"
