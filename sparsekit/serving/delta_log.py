"""Writes the changes that training makes to the folder of a log, which readers follow."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..checkpoint.lock import Lock
from ..checkpoint.snapshot import named_tables, unwrapped
from ..checkpoint.together import Together
from ..errors import check_int
from .changed_rows import ChangedRows, Changes, facts_of, forget_marks
from .delta_file import Section, header_of, read_delta, write_delta
from .errors import LogError
from .export import Choice, Exported, chosen, of_layer, write_tables
from .format import FIRST_FALLBACK, ROW_FORMATS, base_name, delta_name
from .log_folder import LogFolder, compact
from .merge import BaseFile
from .rank_parts import encoded, joined, write_part
from .writer import SnapshotWriter

# Deltas up to this total size, and fewer than this number to list, are not worth compacting.
_FEW_BYTES, _MOST_DELTAS = 4 << 20, 4096


class DeltaLog:
    """Appends what training has changed to a log, so that servers see it within a second.

    ::

        log = DeltaLog("served/", model)
        for batch in batches:
            ...
            optimizer.step()
            log.step()

    Opening writes a base, a snapshot of all tables, since the model may have changed since the log
    was last written to. Then, whenever a delta is due, `step` writes one with the rows that have
    changed; from time to time it merges deltas into a new base, in another thread. Readers open the
    folder with `Snapshot(folder)` and call `follow`. The folder may be on any file system that all
    machines share.

    After an error, such as a full disk, the next delta includes the changes that were not written.
    On several ranks, each writes its part of a version; all ranks must open the log and call
    `step`, `flush` and `close`, and an error on one rank is raised on all.

    On the CPU, the rows that lookups and sparsekit's optimizers write to are marked. After other
    writes (by torch's optimizers, loading or eviction), all rows of the table are compared. Writes
    through ``weight.data`` are the exception: they go unnoticed until rows are compared for another
    reason, so call ``torch.autograd.graph.increment_version(weight)`` after them.

    Args:
        folder: folder of the log, created if missing. Only one job may write to it at a time.
        module: module with sparsekit layers.
        rows: format of rows, as for `export_module`.
        miss: how lookups treat a key without a row; None means the layers' setting.
        tables: names of the tables to write; None for all.
        every_steps: number of calls of `step` from one delta to the next. Required on several
            ranks, since their clocks differ.
        every_seconds: seconds from one delta to the next, if every_steps is None.
        compact_at: size of the deltas, as a fraction of the base, at which they are merged; None
            leaves that to `compact` or ``sparsekit serve compact``.
        dense_version: the trainer's number for the dense part that belongs to the first version.
        step: training step of the first version; None if unknown.
        group: process group of the layers; None for torch's default group.

    Attributes:
        version: the newest completely written version.
        compaction_error: error in the last compaction, also shown as a warning; None if there was
            none.

    Raises:
        LogError: another job writes to the folder, or it has a damaged base.
        ValueError: an argument is invalid, or a vector cannot be stored; the message names its key.
        OSError: the folder cannot be written to; the error names the file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        module: torch.nn.Module,
        *,
        rows: Choice | None = "int8",
        miss: Choice | None = None,
        tables: Sequence[str] | None = None,
        every_steps: int | None = None,
        every_seconds: float = 1.0,
        compact_at: float | None = 1.0,
        dense_version: int = 0,
        step: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = Path(folder)
        module = unwrapped(module)
        self._together = Together(module, group)
        if every_steps is None and self._together.world_size > 1:
            raise ValueError(f"{folder}: give every_steps, since clocks of ranks differ")
        for name, value in (("every_steps", every_steps), ("every_seconds", every_seconds)):
            if value is not None and not value > 0:
                raise ValueError(f"{folder}: {name} must be positive, got {value}")
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self.compact_at = compact_at
        self._rows, self._miss = rows, miss
        layers = named_tables(module)
        if not layers:
            raise ValueError(f"{folder}: the module has no layer of sparsekit")
        names = [e.name for e in chosen([of_layer(*each) for each in layers.items()], tables)]
        self._layers = {name: layers[name] for name in names}
        self._changed = {name: ChangedRows(layer) for name, layer in self._layers.items()}
        self._note_numbers(0 if step is None else step, dense_version)
        self._since_steps = 0
        self._compaction: threading.Thread | None = None
        self.compaction_error: Exception | None = None
        self._lock: Lock | None = None
        self._hook = register_optimizer_step_post_hook(forget_marks)
        try:
            told = self._together.text_of_first("open a delta log", self._open)
            self._log_id, self.version = map(int, told.split())
            self._write_base(self.version + 1, None if step is None else step)
        except BaseException:
            self.close()
            raise

    def step(self, step: int | None = None, dense_version: int | None = None) -> bool:
        """Write a delta if one is due; call it after each step of the optimizers.

        Args:
            step: number of the training step; None counts calls.
            dense_version: the trainer's number for the dense part that belongs to the tables as
                they are now; None means the same as before.

        Returns:
            True if a version has been written.

        Raises:
            TypeError, ValueError: a number is invalid, or a vector cannot be stored; the message
                names the table and the key.
            OSError: the disk is full, for example; the error names the file.
        """
        self._note_numbers(self._steps + 1 if step is None else step, dense_version)
        self._since_steps += 1
        if self.every_steps is not None:
            due = self._since_steps >= self.every_steps
        else:
            due = time.monotonic() - self._last_time >= self.every_seconds
        return due and self.flush()

    def flush(self, dense_version: int | None = None) -> bool:
        """Write a delta now, unless nothing has changed; see `step`."""
        written_at = time.time_ns()
        self._note_numbers(self._steps, dense_version)
        sections: list[Section] = []
        found: dict[str, Changes] = {}
        news = {"dense"} if self._dense_version != self._written_dense else set()

        def find() -> None:
            if self._facts() != self._facts_of_base:
                # Deltas cannot express every change, such as a new seed for initial vectors.
                news.add("base")
                return
            for number, (name, changed) in enumerate(self._changed.items()):
                changes = found[name] = changed.find()
                shared = FIRST_FALLBACK + self._shared[number]
                if self._keeps[number] and (changes.removed < shared).any():
                    news.add("base")  # to restore fallback rows, with their initial vectors
                sections.extend(self._sections(number, name, changes))

        self._together.do("find changed rows", find)
        something = self._together.union(news | {"rows"} if sections else news)
        if "base" in something:
            self._write_base(self.version + 1, self._steps)
            return True
        if something:
            self._append(self.version + 1, sections, written_at)
        for name, changes in found.items():
            self._changed[name].done(changes)
        self._note_time()
        if something:
            self._compact_if_due()
        return bool(something)

    def compact(self) -> None:
        """Merge the deltas into a new base now; rank 0 does so while the others wait.

        Raises:
            LogError, OSError: see `sparsekit.serving.compact`.
        """
        self._end_compaction()
        self._together.on_first("compact a log", lambda: self._note_base(compact(self.folder)))

    def close(self) -> None:
        """Let another job write to the folder. Changes since the last delta are not written."""
        try:
            self._end_compaction()
        finally:  # a warning may be turned into an error
            self._hook.remove()
            for changed in self._changed.values():
                changed.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> DeltaLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _open(self) -> str:
        """Lock the folder; return the log's ID and its newest version."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ".lock"
        try:
            self._lock = Lock(path)
        except BlockingIOError:
            owner = path.read_bytes()[:200].decode(errors="replace").strip()
            raise LogError(
                f"{self.folder}: another job writes to this log ({owner or 'unknown'}); give each "
                f"job a folder of its own"
            ) from None
        self._lock.note(f"process {os.getpid()} on {os.uname().nodename}")
        for part in self.folder.glob(".base-*.part"):  # left by a killed job
            part.unlink(missing_ok=True)
        log = LogFolder.read(self.folder)
        log_id = 0
        if log.bases:
            base = BaseFile.read(self.folder / base_name(max(log.bases)), whole=False)
            log_id = int(base.header["log_id"])
        # Incomplete versions count as well: readers may have seen parts of them.
        return f"{log_id or secrets.randbits(63) + 1} {log.last_version}"

    def _facts(self) -> list[tuple[Any, ...]]:
        """Return what a base records about tables besides rows; see `facts_of`."""
        return [facts_of(of_layer(*each), each[1]) for each in self._layers.items()]

    def _write_base(self, version: int, step: int | None) -> None:
        """Write all tables, and start to track their changes."""
        self._end_compaction()
        written_at = time.time_ns()
        found = [of_layer(name, layer) for name, layer in self._layers.items()]
        followed = {name: ChangedRows(layer) for name, layer in self._layers.items()}
        path = self.folder / base_name(version)

        def write(tables: Sequence[Exported]) -> None:
            with SnapshotWriter(
                path, log_id=self._log_id, version=version, dense_version=self._dense_version,
                step=step, written_at=written_at, note="delta log",
            ) as snapshot:  # fmt: skip
                write_tables(snapshot, tables, self._rows, self._miss)

        try:
            if self._together.world_size == 1:
                write(found)
            else:
                self._write_parts(found, version, write)
            self.version = version
        except BaseException:
            if os.path.lexists(path):  # a reader may have opened it
                self.version = version
            raise
        base = BaseFile.read(path, whole=False)
        self._formats = [ROW_FORMATS[record["row_format"]] for record in base.records]
        self._widths = [int(record["row_bytes"]) for record in base.records]
        self._keeps = [int(record["num_fallbacks"]) > 0 for record in base.records]
        self._shared = [0 if e.lookups is None else e.lookups.fallbacks for e in found]
        self._facts_of_base = [facts_of(e, self._layers[e.name]) for e in found]
        for changed in followed.values():
            changed.done(changed.find())
        self._changed = followed
        self._written_dense = self._dense_version
        self._note_base(version)
        self._note_time()
        self._together.on_first(
            "remove what a base replaces",
            lambda: LogFolder.read(self.folder).remove_before(version),
        )

    def _write_parts(
        self, found: Sequence[Exported], version: int, write: Callable[[Sequence[Exported]], None]
    ) -> None:
        """Let each rank write its part of a base, in float32, and rank 0 join the parts."""
        ranks = self._together.world_size
        paths = [self.folder / f".base-{version:020d}-{rank:05d}.part" for rank in range(ranks)]
        own = paths[self._together.rank]
        try:
            self._together.do("write a part of a base", lambda: write_part(own, found))

            def join() -> None:
                parts = [read_delta(path)[1] for path in paths]
                write([joined(each, number, parts) for number, each in enumerate(found)])

            self._together.on_first("write a base", join)
        finally:
            own.unlink(missing_ok=True)

    def _sections(self, number: int, name: str, changes: Changes) -> list[Section]:
        """Return a delta's sections for one table."""
        word, width = self._formats[number], self._widths[number]
        rows, keys, removed = changes.rows, changes.keys, changes.removed
        if self._shared[number] and not self._keeps[number]:
            own = keys >= FIRST_FALLBACK + self._shared[number]
            rows, keys = rows[own], keys[own]
        kind = ROW_FORMATS.index(word), width
        sections = [Section(number, *kind, removed, None)] if len(removed) else []
        if len(rows):
            vectors = self._changed[name].vectors(rows)
            sections.append(
                Section(number, *kind, keys, encoded(self.folder, name, keys, vectors, word))
            )
        return sections

    def _append(self, version: int, sections: Sequence[Section], written_at: int) -> None:
        """Write this rank's part of a delta; `version` is the log's version afterwards.

        If a part is missing after an error, the others are removed, and the next attempt uses the
        same version. If all parts exist despite an error, readers may have seen them, so the
        version counts as written. An interrupted version does, too, and the next one is a base.
        """
        rank, ranks = self._together.rank, self._together.world_size
        path = self.folder / delta_name(version, rank, ranks)
        header = header_of(
            log_id=self._log_id, version=version, dense_version=self._dense_version,
            step=self._steps, written_at=written_at, rank=rank, num_ranks=ranks,
        )  # fmt: skip
        try:
            size = self._together.do("write a delta", lambda: write_delta(path, header, sections))
            self.version, self._written_dense = version, self._dense_version
        except BaseException as error:
            missing = {"missing"} if not os.path.lexists(path) else set()
            if not isinstance(error, Exception):
                self.version, self._facts_of_base = version, []
            elif not self._together.union(missing):
                self.version = version
            else:
                path.unlink(missing_ok=True)
            raise
        self._deltas += 1
        self._delta_bytes += ranks * size

    def _note_numbers(self, step: int, dense_version: int | None) -> None:
        """Check and keep the numbers to record in the next version."""
        self._steps = check_int(f"{self.folder}", "step", step, -(2**63), 2**63 - 1)
        if dense_version is not None:
            where = f"{self.folder}", "dense_version"
            self._dense_version = check_int(*where, dense_version, 0, 2**64 - 1)

    def _note_time(self) -> None:
        self._since_steps, self._last_time = 0, time.monotonic()

    def _note_base(self, version: int) -> None:
        """Record the sizes of a base and of the deltas that follow it."""
        with contextlib.suppress(FileNotFoundError):
            self._base_bytes = (self.folder / base_name(version)).stat().st_size
        log = LogFolder.read(self.folder)
        self._deltas = sum(each > version for each in log.parts)
        self._delta_bytes = log.delta_bytes(version)

    def _compact_if_due(self) -> None:
        if self._together.rank or self.compact_at is None:
            return
        most = max(_FEW_BYTES, self.compact_at * self._base_bytes)
        if self._delta_bytes <= most and self._deltas < _MOST_DELTAS:
            return
        if self._compaction is not None and self._compaction.is_alive():
            return
        self._end_compaction()
        self._compaction = threading.Thread(target=self._compact, daemon=True)
        self._compaction.start()

    def _compact(self) -> None:
        try:
            self._note_base(compact(self.folder))
            self.compaction_error = None
        except Exception as error:
            self.compaction_error = error
            self._deltas = self._delta_bytes = 0  # retry only after as many more deltas

    def _end_compaction(self) -> None:
        """Wait for a compaction, and show its error, if any, as a warning."""
        if self._compaction is None:
            return
        self._compaction.join()
        self._compaction = None
        if (error := self.compaction_error) is not None:
            warnings.warn(f"{self.folder}: compaction failed: {error}", stacklevel=3)
