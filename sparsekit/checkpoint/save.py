"""Saves a checkpoint: each rank writes its part, then rank 0 publishes everything in one step."""

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
    Lookups,
    Manifest,
    Scores,
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
    """A checkpoint that is being written, and the marks that the next save needs.

    Nothing is on disk before `begin`. After `begin`, the caller must call `end`, even after an
    error. To learn whether the checkpoint was published, look for its folder: an interrupt may
    occur just after publishing.

    Args:
        target: folder of the checkpoint.
        keep: number of checkpoints to keep in the folder that contains target; the new checkpoint
            may also replace an old one with the same name. If None, no checkpoint is removed or
            replaced.
        marked: whether to record `marks`.
        follows: marks of a checkpoint that is whole and on disk, and that this one may build on.
        others: as for `save`.

    Attributes:
        marks: the marks of this checkpoint; None unless ``marked``.
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
        self._complete = self.together.union(complete)
        if follows is not None and len(self._complete) < len(shards):
            self._base = follows.base
            marks.links = follows.links + 1
        self.marks = marks

    def begin(self) -> None:
        """Create the draft (a collective call)."""
        self.together.on_first(self._what, self.draft.begin)

    def end(self) -> None:
        """Remove the draft, or its remains after publishing; not a collective."""
        if self.together.rank == 0:
            self.draft.end()

    def tell(self) -> None:
        """Issue warnings about checkpoints that prevent the removal of old ones."""
        while self._notices:
            warnings.warn(self._notices.pop(0), stacklevel=4)

    def now(self) -> None:
        """Write and publish the checkpoint; on an error remove the draft and raise on all ranks."""
        try:
            self.begin()
            self.together.do(self._what, self.write_own)
            self.together.on_first(self._what, self.publish)
        finally:
            self.end()
        self.tell()

    def write_own(self) -> None:
        """Write this rank's files, and a note that tells rank 0 about them."""
        rank, folder = self.together.rank, self.draft.folder
        files: dict[str, FileRecord] = {}
        tables: dict[str, Any] = {}
        for number, shard in enumerate(self.snapshot.shards):
            # Update the marks before writing the rows. A row that changes in between then differs
            # from its mark, so the next save writes it again.
            changes = None if self.marks is None else self.marks.changed(shard)
            if shard.name in self._complete:
                changes = None
            rows = None if changes is None else changes.rows
            file = table_file(number, rank)
            columns = shard.columns_to_write(rows)
            removed = 0
            if changes is not None:
                columns += changes.columns()
                removed = len(changes.removed)
            files[file] = write(folder / file, columns, {"table": shard.name[:500]})
            tables[shard.name] = shard.note(
                rank, file, columns[0].shape[0], changes is None, removed
            )
        others = {rank_file(rank): self.snapshot.own}
        if rank == 0:
            others[DENSE] = self.snapshot.dense
        for file, tensors in others.items():
            files[file] = write(folder / file, [column_of(*each) for each in tensors.items()])
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
        """Write the manifest and publish the checkpoint, on rank 0, once all ranks have written."""
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
        whole_chain(folder)  # make the same checks as `load`: for instance, the base may be missing
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
    """Combine the notes from all ranks into the manifest.

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
    """Combine all ranks' notes about a table into its entry in the manifest."""
    facts = [dict(note["tables"].get(name, {})) for note in notes]
    shards = tuple(Shard(**each.pop("shard")) for each in facts if each)
    first = facts[0]
    for rank, each in enumerate(facts):
        # The names of layers may differ between ranks, and so may the capacities of growing tables.
        alike = first.keys() - {"layer", "capacity"}
        differs = [key for key in first if key in alike and each.get(key) != first[key]]
        if differs or not each:
            what = differs[0] if each else "the table itself"
            raise CheckpointError(
                f"{name}: rank {rank} has other {what} than rank 0: {each.get(what)!r:.80} "
                f"instead of {first.get(what)!r:.80}"
            )
    first["capacity"] = max(each["capacity"] for each in facts)
    states = {
        key: State(each["dtype"], tuple(each["shape"])) for key, each in first.pop("states").items()
    }
    scores = first.pop("scores")
    scores = None if scores is None else Scores(**scores)
    lookups = first.pop("lookups", None)  # an older version may have saved it via DcpState
    lookups = None if lookups is None else Lookups(**lookups)
    return Table(states=states, shards=shards, scores=scores, lookups=lookups, **first)


def save(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizers = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a module with its tables and optimizers, so that any number of ranks can load it.

    Every rank writes its part of each table in pieces of a few MB. Then the checkpoint appears in
    one step. After an error or a crash, it does not appear at all. With several ranks, this is a
    collective, and path must be on a disk that all ranks share. See docs/checkpoint_format.md for
    the files.

    Args:
        module: a module that contains sparsekit layers; may be wrapped by DistributedDataParallel.
        path: folder to create for the checkpoint. To keep several checkpoints, see `Checkpoints`.
        optimizer: the optimizer or optimizers of the module's parameters.
        state: other objects with ``state_dict`` and ``load_state_dict``, by name: a scheduler, a
            `Trainer`, a reader. Each rank saves its own objects.
        step: training step to record in the manifest, >= 0.
        process_group: process group of the ranks that save; None is the default group.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: (on all ranks) path already exists, the disk is full, a folder is missing
            or read-only, or the state contains something other than tensors, numbers and strings.
            Nothing appears at path.
        TypeError, ValueError: step is not an integer >= 0.
        ValueError: a table is distributed over a different set of ranks than process_group.
        RuntimeError: a layer is on the meta device, or another rank has raised an error.
    """
    target = Path(path).absolute()
    CheckpointWriter(module, target, optimizer, state, step, process_group).now()
    return target
