"""Opens and writes plain files. Errors name the file, and an interrupt leaks no descriptor."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError

# Maximum number of bytes from a file or tensor to hold in memory at a time.
PIECE = 8 << 20
_TO_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class FileRecord:
    """A file's entry in the manifest: its size in bytes and its CRC-32."""

    bytes: int
    crc32: int


@contextlib.contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """Convert an OSError to a CheckpointError with the path, the failed action and the reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {what}: {error.strerror or error}") from error


def plain_file(path: Path) -> io.BufferedReader:
    """Open a plain file for reading. It is closed when the last reference to it is dropped.

    Raises:
        CheckpointError: the path is a link, is not a plain file, or cannot be read.
    """
    with naming(path, "cannot be read"):
        try:
            kind = os.lstat(path).st_mode
            if stat.S_ISLNK(kind):
                raise CheckpointError(f"{path}: cannot be read: it is a link")
            if not stat.S_ISREG(kind):
                raise CheckpointError(f"{path}: is no plain file")
            # Open in a single Python operation: an interrupt in between would leak the descriptor.
            opened = map(io.FileIO, map(os.open, [path], [_TO_READ]))
            return next(map(io.BufferedReader, opened))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: the file is missing") from None


def size_of(path: Path) -> int:
    """Return the size of a plain file in bytes. Raises the same errors as `plain_file`."""
    with naming(path, "cannot be read"), plain_file(path) as file:
        return os.fstat(file.fileno()).st_size


def check_sum(path: Path, expected: FileRecord) -> None:
    """Read a whole file, and compare its CRC-32 with its record.

    Raises:
        CheckpointError: the file is missing, is not a plain file, or its content has changed.
    """
    crc32 = record_of(path).crc32
    if crc32 != expected.crc32:
        raise CheckpointError(
            f"{path}: is damaged: its CRC-32 is {crc32:08x}, and {expected.crc32:08x} was written"
        )


def record_of(path: Path) -> FileRecord:
    """Read a whole file, piece by piece, and return its record."""
    size = crc = 0
    room = memoryview(bytearray(PIECE))
    with naming(path, "cannot be read"), plain_file(path) as file:
        while count := file.readinto(room):
            size, crc = size + count, zlib.crc32(room[:count], crc)
    return FileRecord(size, crc)


def write_small(path: Path, content: bytes) -> None:
    """Write a new file and sync it to disk."""
    with naming(path, "cannot be written"), open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
