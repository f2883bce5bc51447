"""Saving: each rank writes its part, and what all have written appears at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import _pybind
from ..errors import CheckpointError
from .changes import Fingerprints
from .folder import Draft
from .manifest import (
    DENSE,
    Base,
    Manifest,
    Shard,
    State,
    Table,
    new_id,
    rank_file,
    write_small,
)
from .manifest_file import write_manifest
from .snapshot import (
    Optimizers,
    Snapshot,
    Stateful,
    TableShard,
    listed,
    table_file,
    unwrapped,
)
from .tensor_file import Written, column_of, write
from .together import Together


class Changes:
    """What a process remembers of its last checkpoint, so that the next one can be of changes."""

    def __init__(self) -> None:
        self.base: Base | None = None
        self._of_tables: dict[str, tuple[tuple[Any, ...], Fingerprints]] = {}

    def prepare(self, shards: Sequence[TableShard]) -> set[str]:
        """Make room for fingerprints; returns tables of which all rows must be written."""
        complete = set()
        for shard in shards:
            identity = shard.identity()
            known = self._of_tables.get(shard.name)
            if known is None or known[0] != identity or self.base is None:
                complete.add(shard.name)
            if known is None or known[0] != identity:
                prints = Fingerprints(shard.layer.capacity)
                self._of_tables[shard.name] = identity, prints
        return complete

    def rows(self, shard: TableShard) -> np.ndarray:
        """Rows that have changed since the last call; this one's fingerprints are kept."""
        return self._of_tables[shard.name][1].update(list(shard.columns.values()), shard.size)

    def settle(self, base: Base | None) -> None:
        """After a save: what the next one may follow, or None if it failed."""
        self.base = base
        if base is None:
            self._of_tables.clear()


class Writing:
    """A checkpoint that is being written.

    Args:
        module: see `save`.
        target: folder of the checkpoint.
        optimizer: see `save`.
        state: see `save`.
        step: see `save`.
        group: see `save`.
        replace: whether a checkpoint that is there may go.
        changes: of the last checkpoint, if this one may be incremental.
        incremental: whether it is, where that is possible.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        target: Path,
        optimizer: Optimizers,
        state: Mapping[str, Stateful] | None,
        step: int | None,
        group: dist.ProcessGroup | None,
        replace: bool = False,
        changes: Changes | None = None,
        incremental: bool = False,
    ) -> None:
        module = unwrapped(module)
        self.together = Together(module, group)
        self._step = step
        self._changes = changes
        what = f"save {target}"
        self.draft = Draft(target, self.together.text_of_first(what, new_id))
        self.snapshot = self.together.do(
            what, lambda: Snapshot(module, listed(optimizer), state or {})
        )
        complete = {shard.name for shard in self.snapshot.shards}
        if changes is not None:
            needed = changes.prepare(self.snapshot.shards)
            complete = needed if incremental else complete
        self._complete = complete
        self._base = None if changes is None or not incremental else changes.base
        self.together.on_first(what, lambda: self.draft.begin(replace))

    @property
    def base_of_next(self) -> Base:
        """What the next checkpoint is to follow."""
        return Base(self.draft.target.name, self.draft.id)

    def now(self) -> None:
        """Write and publish; on an error the draft goes, and all ranks raise."""
        what = f"save {self.draft.target}"
        try:
            self.together.do(what, self.write_own)
            self.together.on_first(what, self.publish)
        except BaseException:
            if self.together.rank == 0:
                self.draft.abandon()
            raise
        finally:
            self.draft.close()

    def write_own(self) -> None:
        """Write this rank's files, and a note of them for rank 0."""
        rank, folder = self.together.rank, self.draft.folder
        files: dict[str, Written] = {}
        tables: dict[str, Any] = {}
        for number, shard in enumerate(self.snapshot.shards):
            changed = None if self._changes is None else self._changes.rows(shard)
            complete = shard.name in self._complete
            rows = None if complete else changed
            file = table_file(number, rank)
            columns = shard.columns_to_write(rows)
            files[file] = write(folder / file, columns, {"table": shard.name[:500]})
            tables[shard.name] = shard.note(rank, file, columns[0].shape[0], complete)
        own = rank_file(rank)
        columns = [column_of(name, tensor) for name, tensor in self.snapshot.own.items()]
        files[own] = write(folder / own, columns)
        if rank == 0:
            columns = [column_of(name, tensor) for name, tensor in self.snapshot.dense.items()]
            files[DENSE] = write(folder / DENSE, columns)
        note = {
            "tables": tables,
            "files": {name: [file.bytes, file.crc32] for name, file in files.items()},
            "rank_state": self.snapshot.rank_state,
        }
        part_file = folder / f"rank-{rank:04d}.part"
        write_small(part_file.with_suffix(".new"), json.dumps(note).encode())
        os.rename(part_file.with_suffix(".new"), part_file)

    def publish(self) -> None:
        """On rank 0, once all have written: make the manifest, and have the checkpoint appear."""
        folder = self.draft.folder
        try:
            notes = [
                json.loads((folder / f"rank-{rank:04d}.part").read_bytes())
                for rank in range(self.together.world_size)
            ]
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: what a rank has written is not to be seen here, or is gone: {error}; "
                f"checkpoints are written to a folder that all ranks share"
            ) from error
        manifest = manifest_of(
            notes, self.draft.id, self._step, self._base, self.snapshot.optimizers
        )
        write_manifest(folder, manifest)
        self.draft.publish()


def manifest_of(
    notes: Sequence[Mapping[str, Any]],
    id: str,
    step: int | None,
    base: Base | None,
    optimizers: list[dict[str, Any]],
) -> Manifest:
    """A manifest from what each rank says of its part.

    Raises:
        CheckpointError: ranks have different tables.
    """
    return Manifest(
        id=id,
        step=step,
        base=base,
        world_size=len(notes),
        tables={name: _table(name, notes) for name in notes[0]["tables"]},
        files={
            name: Written(*file) for note in notes for name, file in sorted(note["files"].items())
        },
        optimizers=optimizers,
        ranks=[note["rank_state"] for note in notes],
        version=_pybind.build_info()["version"],
    )


def _table(name: str, notes: Sequence[Mapping[str, Any]]) -> Table:
    """A table from what each rank says of it."""
    facts = [dict(note["tables"].get(name, {})) for note in notes]
    shards = tuple(Shard(**each.pop("shard")) for each in facts if each)
    first = facts[0]
    for rank, each in enumerate(facts):
        differs = [key for key in first if key != "layer" and each.get(key) != first[key]]
        if differs or not each:
            what = differs[0] if each else "the table itself"
            raise CheckpointError(
                f"{name}: rank {rank} has other {what} than rank 0: {each.get(what)!r:.80} "
                f"instead of {first.get(what)!r:.80}"
            )
    states = {
        key: State(each["dtype"], tuple(each["shape"])) for key, each in first.pop("states").items()
    }
    return Table(states=states, shards=shards, **first)


def save(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizers = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a module, its tables and optimizers; `load` reads it on any number of ranks.

    Every rank writes its part of each table in pieces of a few MB; then the checkpoint appears at
    once, or, after an error or a crash, not at all. With several ranks it is a collective, and path
    is on a disk that all share. docs/checkpoint_format.md tells what is written.

    Args:
        module: with sparsekit layers anywhere in it; wrapped by DistributedDataParallel or not.
        path: folder of the checkpoint, which is made; see `Checkpoints` for a folder of many.
        optimizer: one, or several, of the module's parameters.
        state: name -> other objects with ``state_dict`` and ``load_state_dict``: schedulers, a
            `Trainer`, a reader. Each rank's own are saved.
        step: number of the training step, for the manifest.
        process_group: whose ranks save; None is the default group.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks: there is something at path already, the disk is full, a
            folder is missing or read-only, or the state has something that is no tensor, number or
            text. Nothing has appeared at path.
        ValueError: a table of other ranks than those of process_group.
        RuntimeError: on meta; or another rank's error.
    """
    target = Path(path).absolute()
    Writing(module, target, optimizer, state, step, process_group).now()
    return target
