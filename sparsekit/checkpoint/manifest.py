"""Defines the contents of ``manifest.json``, the description of a checkpoint."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from .files import FileRecord

FORMAT = "sparsekit checkpoint"
VERSION = 2
# Format version of checkpoints where no key has been removed since the base.
WITHOUT_REMOVALS = 1
MANIFEST = "manifest.json"
# Name of the file with the manifest's CRC-32 in hexadecimal, used to detect a damaged manifest.
CHECKSUM = "manifest.crc32"
DENSE = "dense.safetensors"


@dataclass(frozen=True)
class Shard:
    """One rank's part of a table in a checkpoint.

    Attributes:
        rank: the rank that wrote the part.
        file: name of the file in the folder. It contains ``keys`` int64 [rows], ``vectors`` [rows,
            dim], ``scores`` int64 [rows] if the table has scores, and each state. If keys have been
            removed or moved to other rows since the base, it also has ``removed`` int64 [removed],
            and perhaps ``rows`` int32 [rows], the row of each key. If the table counts keys that it
            has not admitted, it also has ``counts``: int64 [counts, 3], each entry a key, its count
            and the clock when the count last grew; or, for a sketch, int32 [4, counts].
        rows: number of rows in this file.
        size: number of rows in the rank's table when it was saved. The file of an incremental
            checkpoint may have fewer rows.
        removed: number of keys listed in the file that are in the base but no longer in this
            checkpoint.
        counts: number of keys with a count, or width of the sketch. Even an incremental checkpoint
            contains all counts.
    """

    rank: int
    file: str
    rows: int
    size: int
    removed: int = 0
    counts: int = 0


@dataclass(frozen=True)
class Scores:
    """The scores of a table's rows.

    Attributes:
        kind: what a score means: ``"lru"``, ``"lfu"`` or ``"user"``.
        clock: the table's clock.
        set_by_user: whether only `sparsekit.set_clock` moves the clock.
        counts: how keys that have not been admitted are counted: ``"exact"`` or ``"sketch"``; None
            if they are not counted.
    """

    kind: str
    clock: int
    set_by_user: bool
    counts: str | None = None


@dataclass(frozen=True)
class Lookups:
    """How lookups in evaluation read a table.

    Attributes:
        miss: what a key without a row gets: ``"initial"``, its initial vector; ``"zeros"``;
            ``"fallback"``, a row that such keys share; or, if there is no hash table, ``"error"``.
        fallbacks: number of rows that such keys share; these rows have the smallest int64 keys.
        combiner: ``"sum"``, ``"mean"``, ``"sqrtn"`` or ``"max"``; ``"none"`` for vectors that are
            not pooled, or if slots have several combiners.
        padding_key: key that is left out; None if there is none.
        limits_norms: whether lookups scale rows down to a maximum norm.
    """

    miss: str
    fallbacks: int
    combiner: str
    padding_key: int | None
    limits_norms: bool


@dataclass(frozen=True)
class State:
    """Description of a number or vector that an optimizer stores for each row.

    Attributes:
        dtype: name of the dtype.
        shape: shape of one row's state: ``[dim]``, or ``[]`` for one number.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """Description of an embedding table in a checkpoint.

    Attributes:
        layer: name of the layer.
        dim: number of elements in a vector.
        dtype: name of the vectors' dtype.
        key_dtype: dtype of the keys in the layer's input. In files, keys are always int64.
        capacity: the largest capacity of any rank's table, in rows.
        hash_table: true if any int64 can be a key, false if keys are row indices.
        placement: ``"hash"`` or ``"modulo"``.
        owners: CRC-32 of the map from virtual shards to ranks (65536 int16); None if there is no
            map.
        seed: seed of the initial vectors.
        initializer: the initializer as text.
        optimizer: index of the table's optimizer, or None.
        states: descriptions of the states that the optimizer stores for each row, by name.
        settings: numbers that the optimizer stores for the whole table, such as ``step``, by name.
        complete: true if the shards contain all rows, false if only those changed since the base.
        shards: the parts of all ranks, in rank order.
        scores: description of the rows' scores; None for a table without scores.
        lookups: how lookups read the table; None in an older checkpoint or an imported one.
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
    scores: Scores | None = None
    lookups: Lookups | None = None

    @property
    def size(self) -> int:
        """Return the total number of rows on all ranks."""
        return sum(shard.size for shard in self.shards)

    @property
    def score_kind(self) -> str | None:
        """Return the kind of the rows' scores, or None."""
        return None if self.scores is None else self.scores.kind

    @property
    def counts_kind(self) -> str | None:
        """Return how keys that have not been admitted are counted; None if they are not."""
        return None if self.scores is None else self.scores.counts


@dataclass(frozen=True)
class Base:
    """The checkpoint that an incremental one builds on: its folder's name and its id."""

    folder: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its tensors.

    Attributes:
        id: 32 random hexadecimal digits.
        step: the step passed to `save`, or None.
        base: the checkpoint that an incremental one builds on; None in a complete one.
        world_size: number of ranks that wrote the checkpoint.
        tables: descriptions of the tables, by the names of their layers in the module.
        files: size and CRC-32 of every file except the manifest, by the file's name.
        optimizers: each optimizer's class, group settings and dense states.
        ranks: the states of each rank: random generators, and the objects passed as ``state``.
        version: version of sparsekit that wrote the checkpoint.
        forgotten: whether `sparsekit.checkpoint.forget` has removed rows from the checkpoint.
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
    forgotten: bool = False


def new_id() -> str:
    """Return a random id for a checkpoint."""
    return secrets.token_hex(16)


def rank_file(rank: int) -> str:
    """Return the name of the file that holds a rank's own states."""
    return f"rank-{rank:04d}.safetensors"


def table_file(number: int, rank: int) -> str:
    """Return the name of the file that holds a rank's part of a table."""
    return f"table-{number:04d}-rank-{rank:04d}.safetensors"
