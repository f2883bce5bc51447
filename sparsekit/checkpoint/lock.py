"""Lock files, which show other processes that a folder is in use."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import socket
import weakref
from pathlib import Path

from ..errors import CheckpointError

_LOCK = ".lock"


class Lock:
    """A file that stays locked until `close`, or until this object is garbage-collected.

    A Python file object owns the descriptor, so the descriptor is closed exactly once, even after
    an interrupt. A forked child closes its copy, since the child may outlive this process.

    Args:
        path: path of the file.
        make: whether to create the file if it is missing.

    Raises:
        BlockingIOError: another process, or another object in this process, holds the lock.
        OSError: the file cannot be opened or locked.
    """

    def __init__(self, path: Path, make: bool = True) -> None:
        self._file = io.FileIO(path, "a+" if make else "r+")
        weakref.finalize(self, self._file.close)
        _held.add(self)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise

    def is_at(self, path: Path) -> bool:
        """Return whether the lock is held and its file is still at this path."""
        if self._file.closed:
            return False
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))
        except FileNotFoundError:
            return False

    def note(self, text: str) -> None:
        """Write a message for users to the file, such as who holds the lock."""
        self._file.truncate(0)
        self._file.write(text.encode())

    def close(self) -> None:
        """Unlock the file."""
        self._file.close()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
# Folder locks, shared by all objects in a process, since a process belongs to one job.
_of_folders: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def lock_folder(folder: Path) -> Lock:
    """Keep other jobs from writing to a folder until the returned lock is garbage-collected.

    Raises:
        CheckpointError: another job has the lock, or this process cannot write to the folder.
    """
    folder = folder.resolve()
    path = folder / _LOCK
    try:
        while (lock := _of_folders.get(folder)) is None or not lock.is_at(path):
            # The folder is not locked yet, or it was removed and created again.
            _of_folders[folder] = lock = Lock(path)
            lock.note(f"process {os.getpid()} on {socket.gethostname()}")
    except BlockingIOError:
        owner = ""
        with contextlib.suppress(OSError):
            owner = path.read_bytes()[:200].decode(errors="replace").strip()
        raise CheckpointError(
            f"{folder}: another job writes checkpoints there ({owner or 'unknown'}); give each "
            f"job a folder of its own"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    return lock
