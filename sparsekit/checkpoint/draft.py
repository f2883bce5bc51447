"""Writes checkpoints to hidden folders, called drafts, that are then renamed in one step."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .files import naming
from .lock import Lock
from .manifest import new_id

# Name of the lock file in each draft; the draft's writer keeps it locked.
_WRITER = ".writer"
_DRAFT = re.compile(r"\..+\.part-[0-9a-f]{32}\Z", re.DOTALL)
# Matches a checkpoint that is being replaced, on systems where replacing takes two renames.
_OLD = re.compile(r"\.(.+)\.old-[0-9a-f]{16}\Z", re.DOTALL)
# Matches a checkpoint that is being removed.
_GONE = re.compile(r"\..+\.gone-[0-9a-f]{16}\Z", re.DOTALL)
# Number of attempts to create a draft, a millisecond apart: another job may remove the new folder.
_ATTEMPTS = 1000
_CURRENT_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE


def entries(folder: Path) -> list[Path]:
    """List the paths in a folder; return an empty list if the folder does not exist.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    with naming(folder, "cannot be read"), contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that the names of its files survive a crash."""
    opened: list[int] = []
    try:
        # Open and append in a single Python operation: an interrupt in between could leak the
        # descriptor, or close it twice.
        opened.extend(map(os.open, [path], [os.O_RDONLY | os.O_DIRECTORY]))
        os.fsync(opened[0])
    finally:
        for _ in map(os.close, map(list.pop, [opened] * len(opened))):
            pass


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync them to disk.

    Raises:
        CheckpointError: the folder cannot be created.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    with naming(path, "cannot be made"):
        path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync_folder(each.parent)


class Draft:
    """A hidden folder for writing a checkpoint, next to the path where it will appear.

    Args:
        target: path where the checkpoint will appear.
        id: the checkpoint's id.
        replace: whether it may replace a checkpoint at target.
    """

    def __init__(self, target: Path, id: str, replace: bool = False) -> None:
        self.target = target
        self.id = id
        self.folder = target.parent / f".{target.name}.part-{id}"
        self._replace = replace
        self._lock: Lock | None = None

    def begin(self) -> None:
        """Create the folder. The caller must call `end`, even after an error.

        Raises:
            CheckpointError: target exists and may not be replaced; or the folder cannot be created.
        """
        make_folder(self.target.parent)
        if not self._replace and os.path.lexists(self.target):
            raise self._taken()
        remove_abandoned(self.target.parent)
        with naming(self.folder, "cannot be made"):
            self._lock = self._locked()

    def _locked(self) -> Lock:
        # Until the draft is locked, another job may treat it as abandoned and remove it.
        for _ in range(_ATTEMPTS):
            self.folder.mkdir(exist_ok=True)
            try:
                lock = Lock(self.folder / _WRITER)
            except (BlockingIOError, FileNotFoundError):
                time.sleep(0.001)
                continue
            if lock.is_at(self.folder / _WRITER):
                return lock
        raise BlockingIOError(errno.EAGAIN, "another job removes it again and again")

    def _taken(self) -> CheckpointError:
        return CheckpointError(
            f"{self.target}: there is something already, and a checkpoint does not replace it; "
            f"name another folder, or let sparsekit.checkpoint.Checkpoints name them"
        )

    def publish(self) -> None:
        """Rename the draft to target: the checkpoint appears whole or not at all.

        Raises:
            CheckpointError: the rename fails, or target has appeared in the meantime.
        """
        try:
            for note in entries(self.folder):
                if note.suffix == ".part":  # a rank's note, which rank 0 has read
                    note.unlink(missing_ok=True)
            sync_folder(self.folder)
            if self._replace:
                _replace(self.folder, self.target)
            else:
                os.rename(self.folder, self.target)  # fails unless target is missing or empty
            # Remove the lock file last: other jobs would treat a draft without it as abandoned.
            (self.target / _WRITER).unlink(missing_ok=True)
            sync_folder(self.target.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise self._taken() from error
            raise CheckpointError(
                f"{self.target}: cannot be published: {error.strerror or error}"
            ) from error

    def end(self) -> None:
        """Remove the draft, or the old checkpoint if `publish` has swapped the two."""
        try:
            discard(self.folder)
        finally:
            if self._lock is not None:
                self._lock.close()


@contextlib.contextmanager
def published(target: str | os.PathLike[str], replace: bool = False) -> Iterator[Draft]:
    """Yield a draft to write to; publish it as target at the end, or remove it on an error.

    Raises:
        CheckpointError: target already exists and is not to be replaced, or cannot be created.
    """
    draft = Draft(Path(target).absolute(), new_id(), replace)
    try:
        draft.begin()
        yield draft
        draft.publish()
    finally:
        draft.end()


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False if the system cannot do this."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    rename.argtypes = [
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
    ]  # fmt: skip
    names = os.fsencode(one), os.fsencode(other)
    done: int = rename(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _EXCHANGE)
    return done == 0


def _replace(draft: Path, target: Path) -> None:
    """Move a draft to target, replacing any checkpoint there."""
    if not os.path.lexists(target):
        os.rename(draft, target)
    elif not exchange(draft, target):
        old = _beside(target, "old")
        try:
            while os.path.lexists(draft):
                os.rename(target, old)
                try:
                    os.rename(draft, target)
                except OSError as error:
                    # A process that looks for the latest checkpoint may have restored the old one.
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
        except BaseException:
            recover(target.parent)
            raise
        remove(old)


def discard(folder: Path) -> None:
    """Remove a folder and its files; ignore errors."""
    if folder.is_symlink():
        return
    # First try without rmtree, which can leak a descriptor when it is interrupted.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)
        return
    shutil.rmtree(folder, ignore_errors=True)  # removes subfolders, too, and ignores missing files


def recover(folder: Path) -> None:
    """Restore checkpoints left renamed by a process that was killed while replacing them."""
    for path in entries(folder):
        old = _OLD.match(path.name)
        if old and not os.path.lexists(folder / old[1]):
            with contextlib.suppress(OSError):
                os.rename(path, folder / old[1])


def _beside(path: Path, what: str) -> Path:
    return path.parent / f".{path.name}.{what}-{secrets.token_hex(8)}"


def remove(path: Path) -> None:
    """Remove a checkpoint: rename it, so that it disappears at once, then delete its files."""
    gone = _beside(path, "gone")
    with contextlib.suppress(OSError):
        os.rename(path, gone)
        discard(gone)


def remove_abandoned(folder: Path) -> None:
    """Remove drafts whose writer no longer exists."""
    recover(folder)
    for path in entries(folder):
        if _DRAFT.match(path.name):
            _remove_if_abandoned(path)
        elif _GONE.match(path.name) or _OLD.match(path.name):
            discard(path)


def refuse_writers(folder: Path) -> None:
    """Remove abandoned drafts from a folder; raise CheckpointError if one is being written."""
    remove_abandoned(folder)
    for path in entries(folder):
        if _DRAFT.match(path.name):
            raise CheckpointError(f"{path}: is being written; wait until the save has ended")


def _remove_if_abandoned(draft: Path) -> None:
    try:
        lock = Lock(draft / _WRITER, make=False)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            draft.rmdir()  # a writer that has just created it will create another
        names = {path.name for path in entries(draft)}
        if names and _WRITER not in names:  # replaced checkpoint or half-removed draft
            discard(draft)
        return
    except OSError:
        return  # a live process is writing the draft
    try:
        # The draft's writer may be about to lock it. In that case the writer notices that the draft
        # is gone, and creates another one.
        discard(draft)
    finally:
        lock.close()
