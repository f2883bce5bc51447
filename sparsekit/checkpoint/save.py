"""Saving: each rank writes its part, and the checkpoint appears at once."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import _pybind
from ..errors import CheckpointError, check_int
from .changes import Marks
from .draft import Draft
from .files import FileRecord, naming, write_small
from .folder import retain, whole_chain
from .manifest import (
    DENSE,
    Base,
    Manifest,
    Shard,
    State,
    Table,
    new_id,
    rank_file,
    table_file,
)
from .manifest_file import write_manifest
from .snapshot import Optimizers, Snapshot, Stateful, listed, unwrapped
from .tensor_file import column_of, write
from .together import Together


class CheckpointWriter:
    """A checkpoint that is being written: its draft, the draft's lock, and marks of its rows.

    Nothing is on disk before `begin`, after which the caller must call `end`, also on an error.
    Only the folder tells whether the checkpoint appeared: an interrupt may come just after.

    Args:
        target: folder of the checkpoint.
        keep: how many of the checkpoints beside it stay; it may then replace one. With None all
            stay, and it replaces nothing.
        marked: whether to keep `marks`.
        follows: marks of a checkpoint, whole on disk, that this one may be based on.
        others: as for `save`.

    Attributes:
        marks: the marks of this checkpoint, if ``marked``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        target: Path,
        optimizer: Optimizers,
        state: Mapping[str, Stateful] | None,
        step: int | None,
        group: dist.ProcessGroup | None,
        keep: int | None = None,
        marked: bool = False,
        follows: Marks | None = None,
    ) -> None:
        self._step = None if step is None else check_int("save", "step", step, 0, 2**63 - 1)
        module = unwrapped(module)
        self.together = Together(module, group)
        self._keep = keep
        self._notices: list[str] = []
        self._what = f"save {target}"
        id = self.together.text_of_first(self._what, new_id)
        self.draft = Draft(target, id, replace=keep is not None)
        self.snapshot = self.together.do(
            self._what, lambda: Snapshot(module, listed(optimizer), state or {})
        )
        shards = self.snapshot.shards
        self._complete = {shard.name for shard in shards}
        self._base: Base | None = None
        self.marks: Marks | None = None
        if not marked:
            return
        marks = Marks(Base(target.name, id))
        complete = marks.follow(shards, {} if follows is None else follows.tables)
        anywhere = self.together.union(complete)
        self._complete = {shard.name for shard in shards if anywhere(shard.name)}
        if follows is not None and len(self._complete) < len(shards):
            self._base = follows.base
            marks.links = follows.links + 1
        self.marks = marks

    def begin(self) -> None:
        """Make the draft; a collective."""
        self.together.on_first(self._what, self.draft.begin)

    def end(self) -> None:
        """Remove the rest of the draft, once it has appeared or never will; no collective."""
        if self.together.rank == 0:
            self.draft.end()

    def tell(self) -> None:
        """Warn of checkpoints that prevent removal of old ones."""
        while self._notices:
            warnings.warn(self._notices.pop(0), stacklevel=4)

    def now(self) -> None:
        """Write and publish; on an error remove the draft and raise on all ranks."""
        try:
            self.begin()
            self.together.do(self._what, self.write_own)
            self.together.on_first(self._what, self.publish)
        finally:
            self.end()
        self.tell()

    def write_own(self) -> None:
        """Write this rank's files, and a note about them for rank 0."""
        rank, folder = self.together.rank, self.draft.folder
        files: dict[str, FileRecord] = {}
        tables: dict[str, Any] = {}
        for number, shard in enumerate(self.snapshot.shards):
            # Taken before the rows are written: a row written meanwhile counts as changed once
            # more.
            changed = None if self.marks is None else self.marks.changed(shard)
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
        with naming(part_file, "cannot be written"):
            os.rename(part_file.with_suffix(".new"), part_file)

    def publish(self) -> None:
        """Write the manifest and make the checkpoint appear: on rank 0, once all have written."""
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
        whole_chain(folder)  # check what `load` will read: the base may be gone, or a name too long
        self.draft.publish()
        if self._keep is not None:
            self._notices += retain(self.draft.target.parent, self._keep, self.draft.target)


def manifest_of(
    notes: Sequence[Mapping[str, Any]],
    id: str,
    step: int | None,
    base: Base | None,
    optimizers: list[dict[str, Any]],
) -> Manifest:
    """Return the manifest that follows from each rank's notes on its part.

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
            name: FileRecord(*file)
            for note in notes
            for name, file in sorted(note["files"].items())
        },
        optimizers=optimizers,
        ranks=[note["rank_state"] for note in notes],
        version=_pybind.build_info()["version"],
    )


def _table(name: str, notes: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table from the notes of each rank."""
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
    is on a disk that all share. docs/checkpoint_format.md describes the files.

    Args:
        module: with sparsekit layers anywhere in it; wrapped by DistributedDataParallel or not.
        path: folder of the checkpoint, to be made; see `Checkpoints` for a folder of many.
        optimizer: one, or several, of the module's parameters.
        state: name -> other objects with ``state_dict`` and ``load_state_dict``: schedulers, a
            `Trainer`, a reader. Each rank's own are saved.
        step: number of the training step, for the manifest; 0 or more.
        process_group: whose ranks save; None is the default group.

    Returns:
        The folder.

    Raises:
        CheckpointError: on all ranks: path already exists, the disk is full, a folder is missing or
            read-only, or the state has something other than tensors, numbers and text. Nothing
            appears at path.
        TypeError, ValueError: step is not an integer >= 0.
        ValueError: a table of other ranks than those of process_group.
        RuntimeError: a layer is on meta; or another rank raised.
    """
    target = Path(path).absolute()
    CheckpointWriter(module, target, optimizer, state, step, process_group).now()
    return target
