"""Files by which a process tells others that it is at work in a folder."""

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
    """A file that stays locked until `close`, or until nobody has this object any more.

    A Python file owns the descriptor: wherever an interrupt comes it is closed, and only once. A
    forked child closes its own, since it may outlive this process.

    Args:
        path: of the file.
        make: whether to make it if it is not there.

    Raises:
        BlockingIOError: another process has locked it, or another object of this one.
        OSError: it cannot be opened or locked.
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
        """Whether it is open, and the file that has this path now."""
        if self._file.closed:
            return False
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))
        except FileNotFoundError:
            return False

    def note(self, text: str) -> None:
        """Have the file say who holds it."""
        self._file.truncate(0)
        self._file.write(text.encode())

    def close(self) -> None:
        """Let others lock it."""
        self._file.close()


_held: weakref.WeakSet[Lock] = weakref.WeakSet()
# Locks of folders, one for all of a process, which is one job.
_of_folders: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_let_go_in_child)


def lock_folder(folder: Path) -> Lock:
    """Keep other jobs from writing into a folder, as long as this process has what is returned.

    Raises:
        CheckpointError: another job writes there, or the folder cannot be written.
    """
    folder = folder.resolve()
    path = folder / _LOCK
    try:
        while (lock := _of_folders.get(folder)) is None or not lock.is_at(path):
            # Nobody has asked yet, or the folder was removed and made again.
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
