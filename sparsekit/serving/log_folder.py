"""Finds the files in a delta log's folder, and compacts them."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .delta_file import read_delta
from .draft import remove_abandoned
from .errors import LogError
from .format import base_name, base_version, delta_name, delta_part
from .merge import BaseFile, add_tables_of, merge_table
from .writer import SnapshotWriter

_COMPACTING = ".compacting"


@dataclass
class LogFolder:
    """The files of a log.

    Attributes:
        path: the folder.
        bases: versions of the bases.
        parts: for each version with a delta, the rank and number of ranks of each existing part.
    """

    path: Path
    bases: list[int] = field(default_factory=list)
    parts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def read(path: str | os.PathLike[str]) -> LogFolder:
        """List a folder.

        Raises:
            OSError: the folder does not exist.
        """
        log = LogFolder(Path(path))
        for name in sorted(os.listdir(path)):
            if (version := base_version(name)) is not None:
                log.bases.append(version)
            elif (part := delta_part(name)) is not None:
                log.parts.setdefault(part[0], []).append(part[1:])
        return log

    @property
    def last_version(self) -> int:
        """The newest version that has any file, complete or not; -1 if there is none."""
        return max([-1, *self.bases, *self.parts])

    def is_complete(self, version: int) -> bool:
        """Return whether all parts of a delta exist."""
        parts = self.parts.get(version, [])
        return bool(parts) and len(parts) == parts[0][1]

    def files_of(self, version: int) -> list[Path]:
        """Return the paths of a delta's existing parts."""
        return [self.path / delta_name(version, *part) for part in self.parts.get(version, [])]

    def delta_bytes(self, after: int) -> int:
        """Return the size in bytes of all deltas after a version."""
        total = 0
        for version in self.parts:
            for path in self.files_of(version) if version > after else ():
                with contextlib.suppress(FileNotFoundError):
                    total += path.stat().st_size
        return total

    def remove_before(self, base: int) -> None:
        """Remove everything that a base replaces: older bases, and deltas up to its version.

        Bases are removed last. In whatever order a file system lists files, readers then find
        either an older base together with the deltas that follow it, or the newer base.
        """
        for version in self.parts:
            for path in self.files_of(version) if version <= base else ():
                path.unlink(missing_ok=True)
        for version in self.bases:
            if version < base:
                (self.path / base_name(version)).unlink(missing_ok=True)


@contextlib.contextmanager
def compacting(folder: Path) -> Iterator[None]:
    """Keep other processes and threads from compacting a log.

    Raises:
        LogError: another process or thread is compacting it.
    """
    with io.FileIO(folder / _COMPACTING, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogError(f"{folder}: is being compacted already") from None
        try:
            yield
        finally:
            # Unlock explicitly: closing has no effect while a forked process has a copy open.
            fcntl.flock(file, fcntl.LOCK_UN)


def compact(folder: str | os.PathLike[str]) -> int:
    """Merge a log's base and the deltas that follow it into a new base, and remove the old files.

    The trainer and readers can continue. Needs memory for keys, and disk space for another base.

    Args:
        folder: the folder of the log.

    Returns:
        Version of the newest base.

    Raises:
        LogError: a file is damaged or missing, there is no base, or another process is compacting
            the log. Nothing has changed in this case.
        OSError: the disk is full, for example.
    """
    path = Path(folder)
    # Look for the base first, so that nothing is written to a folder that is not a log.
    _check_base(path, LogFolder.read(path))
    with compacting(path):
        remove_abandoned(path)
        log = LogFolder.read(path)
        _check_base(path, log)
        base = last = max(log.bases)
        while log.is_complete(last + 1):
            last += 1
        later = [version for version in log.parts if version > last and log.is_complete(version)]
        if later:
            raise LogError(
                f"{path}: a part of version {last + 1} is missing, but version {min(later)} is "
                f"there"
            )
        if last > base:
            _merge(log, base, last)
        # In the meantime, a trainer may have written a newer base, which replaces this one.
        log = LogFolder.read(path)
        newest = max(log.bases)
        log.remove_before(newest)
    return newest


def _check_base(path: Path, log: LogFolder) -> None:
    if not log.bases:
        raise LogError(f"{path}: there is no base, base-*.sks, so this is no delta log")


def _merge(log: LogFolder, base: int, last: int) -> None:
    old = BaseFile.read(log.path / base_name(base))
    log_id = int(old.header["log_id"])
    versions = [
        [read_delta(path, log_id) for path in log.files_of(version)]
        for version in range(base + 1, last + 1)
    ]
    for version, parts in enumerate(versions, base + 1):
        for path, (header, sections) in zip(log.files_of(version), parts, strict=True):
            if header["version"] != version:
                raise LogError(f"{path}: holds version {header['version']}, not what it is named")
            for section in sections:
                _check_section(old, path, section.table, section.row_format, section.row_bytes)
    head = versions[-1][0][0]
    with SnapshotWriter(
        log.path / base_name(last),
        log_id=log_id,
        version=last,
        dense_version=int(head["dense_version"]),
        step=None if head["step"] < 0 else int(head["step"]),
        written_at=max(int(header["written_at"]) for header, _ in versions[-1]),
        note=old.note,
    ) as snapshot:
        for table, writer in enumerate(add_tables_of(old, snapshot)):
            changes = [
                [s for _, sections in parts for s in sections if s.table == table]
                for parts in versions
            ]
            merge_table(writer, old.keys(table), old.rows(table), changes)


def _check_section(base: BaseFile, path: Path, table: int, row_format: int, row_bytes: int) -> None:
    if table >= len(base.records):
        raise LogError(f"{path}: is of table {table}, but the base has {len(base.records)}")
    record = base.records[table]
    if (row_format, row_bytes) != (record["row_format"], record["row_bytes"]):
        raise LogError(
            f"{path}: has rows of format {row_format} and {row_bytes} bytes, but table "
            f"{base.names[table]} of format {record['row_format']} and {record['row_bytes']} bytes"
        )
