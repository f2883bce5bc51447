"""Files written under a hidden name and then renamed: they appear complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

_DRAFT = re.compile(r"\..+\.part-[0-9a-f]{16}\Z", re.DOTALL)
# Number of attempts to make a draft: another writer may remove a draft before it is locked.
_ATTEMPTS = 1000


class Draft:
    """A hidden file next to the path where it will appear.

    The file stays locked while this process writes it, so that other writers can tell it from the
    drafts of killed writers, which they remove when they make a draft.

    Args:
        target: path where the file will appear.

    Raises:
        OSError: the file cannot be created; the error names it.
    """

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.target = Path(os.path.abspath(target))
        self.path = self.target
        with self.naming():
            remove_abandoned(self.target.parent)
            self.file = self._made()

    def _made(self) -> io.FileIO:
        for _ in range(_ATTEMPTS):
            self.path = self.target.parent / f".{self.target.name}.part-{secrets.token_hex(8)}"
            file = io.FileIO(self.path, "x+")
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    return file
            file.close()
        raise OSError(f"another process removes {self.path} again and again")

    def write(self, data: bytes | memoryview) -> None:
        """Write all bytes at the file's position.

        Raises:
            OSError: the disk is full, for example; the error names the file.
        """
        rest = memoryview(data).cast("B")
        with self.naming():
            while rest:
                rest = rest[self.file.write(rest) :]

    def publish(self, sync: bool = True) -> None:
        """Sync the file to disk, and give it its name, replacing any file of that name.

        Args:
            sync: False lets the system decide when to write to the disk. After a power loss, the
                file may then have its name but lack its bytes.

        Raises:
            OSError: the file cannot be synced or renamed; the error names it.
        """
        with self.naming():
            if sync:
                os.fsync(self.file.fileno())
            os.replace(self.path, self.target)
            self.file.close()
            if sync:
                sync_folder(self.target.parent)

    def end(self) -> None:
        """Remove the draft, unless it has been published."""
        if not self.file.closed:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            self.file.close()

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Name the file in OSErrors raised by a block of code."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), os.fspath(self.target)) from error


def remove_abandoned(folder: Path) -> None:
    """Remove the drafts in a folder if their writers no longer exist.

    If the file system has no locks, drafts stay, since their writers may still exist.
    """
    for name in os.listdir(folder):
        if _DRAFT.match(name):
            with contextlib.suppress(OSError), io.FileIO(folder / name, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(folder / name)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that the names of its files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
