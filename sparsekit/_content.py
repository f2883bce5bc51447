"""Opens plain files, compressed files and pipes; detects compression from the first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from .errors import DataFormatError

__all__ = ["Content", "lines_of", "open_content"]

_COMPRESSED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
# For each kind of non-text file: its first bytes, and its name in error messages.
_NAMES = {
    b"PK\3\4": "a zip archive; unpack it",
    b"7z\xbc\xaf'\x1c": "a 7z archive; unpack it",
    b"Rar!\x1a\7": "a rar archive; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
    b"\x04\x22\x4d\x18": "compressed by lz4; unpack it",
    b"\xff\xfe": "UTF-16; convert it, `iconv -f UTF-16 -t UTF-8` does",
    b"\xfe\xff": "UTF-16; convert it, `iconv -f UTF-16 -t UTF-8` does",
    b"PAR1": "Parquet",
    b"ARROW1": "a file of Arrow's",
    b"ORC": "ORC",
    b"\x89HDF\r\n": "HDF5",
    b"\x93NUMPY": "an array of NumPy's",
    b"SQLite format 3\0": "a database of SQLite's",
}
_TAR = slice(257, 262)
_HEAD = 512
_MOST_LINE = 16 << 20


class Content(io.RawIOBase):
    """Reads the bytes of a file, and decompresses gzip, bzip2 and xz.

    Attributes:
        plain: whether this is a regular, uncompressed file. If so, offsets in the content are
            offsets in the file.
        regular: whether the file can be opened again, unlike a pipe.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115  (closed by close)
        try:
            mode = os.fstat(self._file.fileno()).st_mode
            self.regular = stat.S_ISREG(mode)
            if not self.regular and not stat.S_ISFIFO(mode):
                raise DataFormatError(f"{self._path}: is a device, neither a file nor a pipe")
            self._stream: Any = self._file
            head = self._file.read(_HEAD)
            if self.regular:
                self._file.seek(0)
            else:
                self._stream = io.BufferedReader(_Behind(head, self._file))
            opener = next((o for mark, o in _COMPRESSED.items() if head.startswith(mark)), None)
            self.plain = self.regular and opener is None
            if opener is not None:
                self._stream = opener(self._stream)
                head = self._guarded(self._stream.peek, _HEAD)
            self._check(head)
        except BaseException:
            self._file.close()
            raise

    def _check(self, head: bytes) -> None:
        """Raise DataFormatError if the first bytes show that the file is not text."""
        name = next((name for mark, name in _NAMES.items() if head.startswith(mark)), None)
        if head[_TAR] == b"ustar":
            name = "a tar archive; unpack it"
        if name is not None:
            raise DataFormatError(f"{self._path}: not a text file in UTF-8: it is {name}")

    def _guarded(self, read: Any, argument: Any) -> Any:
        try:
            return read(argument)
        except EOFError as error:
            raise DataFormatError(f"{self._path}: the file is truncated: {error}") from error
        except (zlib.error, gzip.BadGzipFile) as error:
            raise DataFormatError(f"{self._path}: damaged gzip: {error}") from error
        except lzma.LZMAError as error:
            raise DataFormatError(f"{self._path}: damaged xz: {error}") from error
        except (OSError, ValueError) as error:
            if isinstance(self._stream, bz2.BZ2File) and getattr(error, "errno", None) is None:
                raise DataFormatError(f"{self._path}: damaged bzip2: {error}") from error
            raise

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into a buffer; return the number of bytes read, 0 at the end of the file.

        Raises:
            DataFormatError: a compressed file is truncated or damaged.
        """
        return self._guarded(self._stream.readinto, buffer)

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "_file"):  # missing if the file could not be opened
            self._file.close()
        super().close()


class _Behind(io.RawIOBase):
    """A stream that yields bytes already read from a file, then the rest of the file."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._head:
            return self._rest.readinto(buffer)  # type: ignore[attr-defined]
        size = min(len(buffer), len(self._head))
        buffer[:size], self._head = self._head[:size], self._head[size:]
        return size


def open_content(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file as buffered `Content`.

    Raises:
        OSError: the file cannot be opened.
        DataFormatError: the first bytes show that the file is not text, or the path is neither
            a file nor a pipe.
    """
    return io.BufferedReader(Content(path))


def lines_of(path: str | os.PathLike[str]) -> Iterator[str]:
    r"""Yield the lines of UTF-8 text, including their ends: ``"\n"``, ``"\r\n"`` or ``"\r"``.

    Raises:
        OSError: the file cannot be read.
        DataFormatError: the file is not UTF-8 text, is truncated or damaged, or has a line of
            more than 16 million characters.
    """
    with io.TextIOWrapper(open_content(path), encoding="utf-8-sig", newline="") as file:
        try:
            while line := file.readline(_MOST_LINE):
                if len(line) == _MOST_LINE:
                    raise DataFormatError(f"{os.fspath(path)}: a line of over {_MOST_LINE} letters")
                yield line
        except UnicodeDecodeError as error:
            raise DataFormatError(f"{os.fspath(path)}: not a text file in UTF-8: {error}") from None
