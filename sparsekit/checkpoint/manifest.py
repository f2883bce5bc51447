"""The contents list of a checkpoint, ``manifest.json``: written last, checked first."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .tensor_file import FileRecord

FORMAT = "sparsekit checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
# CRC-32 of the manifest's bytes, in hexadecimal: without it a changed number would go unnoticed.
CHECKSUM = "manifest.crc32"
DENSE = "dense.safetensors"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a table.

    Attributes:
        rank: whose.
        file: its name in the folder. It has ``keys`` int64 [rows], ``vectors`` [rows, dim] and
            each state, and may have ``removed`` int64 [n], keys that are gone since the base.
        rows: in this file.
        size: of the rank's table then: more than rows in a checkpoint of changes.
    """

    rank: int
    file: str
    rows: int
    size: int


@dataclass(frozen=True)
class State:
    """A number, or vector, that an optimizer keeps for each row.

    Attributes:
        dtype: name of its dtype.
        shape: of one row's: ``[dim]``, or ``[]`` for one number.
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
        key_dtype: of the layer's input; keys in files are int64.
        capacity: rows on each rank.
        hash_table: whether keys are any int64, or row numbers.
        placement: ``"hash"`` or ``"modulo"``.
        owners: None where no map places keys, else CRC-32 of the map from virtual shard to rank,
            as 65536 int16.
        seed: of initial vectors.
        initializer: of initial vectors, as text.
        optimizer: number of its optimizer, or None.
        states: name -> what it keeps for each row.
        settings: what it keeps for the whole table: ``step``.
        complete: whether all rows are here, or those that changed since the base.
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
        """Rows of all ranks."""
        return sum(shard.size for shard in self.shards)


@dataclass(frozen=True)
class Base:
    """The checkpoint that one of changes follows: a folder beside it, and its id."""

    folder: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without its tensors.

    Attributes:
        id: random, 32 hexadecimal digits.
        step: that the user gave, or None.
        base: what a checkpoint of changes follows.
        world_size: ranks that wrote it.
        tables: by name, that of the layer in the module.
        files: name -> size and CRC-32 of every file but the manifest.
        optimizers: kind, settings of groups and dense states of each.
        ranks: what each rank has of its own: random numbers, and the objects given as state.
        version: of sparsekit.
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
    """A random id."""
    return secrets.token_hex(16)


def rank_file(rank: int) -> str:
    """File of what a rank has of its own."""
    return f"rank-{rank:04d}.safetensors"


def table_file(number: int, rank: int) -> str:
    """File of a rank's part of a table."""
    return f"table-{number:04d}-rank-{rank:04d}.safetensors"


def write_small(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, and have it reach the disk."""
    try:
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
