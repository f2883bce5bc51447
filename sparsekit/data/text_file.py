"""Files of lines, plain or gzip, as units that can be read by themselves."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ..errors import DataFormatError
from .reader import Chunk, Unit

_BOM = b"\xef\xbb\xbf"
# Read beyond a block, for the end of its last line.
_PIECE = 4096

# Makes a chunk of the whole lines in [first, last) of a text. The first begins at byte `start` of
# the file, or is line `line` of it, counted from 1; the other number is 0.
MakeChunk = Callable[["TextFile", bytes, int, int, int, int], Chunk]


class TextFile:
    """A file of lines, plain or gzip, with or without a byte-order mark and a line of names.

    Args:
        path: The file; one that begins with gzip's magic number is decompressed.
        header: Whether its first line names the columns.
        max_line_bytes: Of a longer line the rest is not read.

    Attributes:
        names: the first line, without its end, or None.
    """

    def __init__(self, path: Path, header: bool, max_line_bytes: int) -> None:
        self.path = path
        self.max_line_bytes = max_line_bytes
        self.size = path.stat().st_size
        with open(path, "rb") as file:
            self.compressed = file.read(2) == b"\x1f\x8b"
        with self._open() as file, self.errors():
            first = file.readline(max_line_bytes + len(_BOM) + 2)
        if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise DataFormatError(f"{path}: UTF-16; only UTF-8 is read")
        # Where the rows begin.
        self.start = len(_BOM) if first.startswith(_BOM) else 0
        self.names: str | None = None
        if header:
            self.names = self._decode(first[self.start :])
            self.start = len(first)

    def _decode(self, line: bytes) -> str:
        if len(line) > self.max_line_bytes + 2:
            raise DataFormatError(
                f"{self.path}, line 1: longer than max_line_bytes={self.max_line_bytes}"
            )
        try:
            return line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataFormatError(f"{self.path}, line 1: not UTF-8: {error}") from None

    def _open(self) -> IO[bytes] | gzip.GzipFile:
        if self.compressed:
            return gzip.open(self.path)
        return open(self.path, "rb")

    def errors(self) -> _GzipErrors:
        """A context that says of which file a failure to decompress is."""
        return _GzipErrors(self.path)

    def units(self, block_bytes: int, make: MakeChunk) -> list[Unit]:
        """Blocks of a plain file; a compressed one cannot be entered in the middle."""
        if self.compressed:
            return [_Compressed(self, block_bytes, make)]
        starts = range(self.start, self.size, block_bytes)
        return [_Block(self, a, min(a + block_bytes, self.size), make) for a in starts]

    def line_number(self, position: int) -> int:
        """Number, from 1, of the line at byte `position` of a plain file."""
        number = 1
        with self._open() as file:
            while position > 0 and (text := file.read(min(position, 1 << 20))):
                number += text.count(b"\n")
                position -= len(text)
        return number


class _GzipErrors:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if isinstance(error, EOFError):
            raise DataFormatError(f"{self._path}: the file is truncated: {error}") from error
        if isinstance(error, (zlib.error, gzip.BadGzipFile)):
            raise DataFormatError(f"{self._path}: damaged gzip: {error}") from error


class _Block(Unit):
    """The lines that begin in bytes [begin, end) of a plain file."""

    def __init__(self, file: TextFile, begin: int, end: int, make: MakeChunk) -> None:
        self._file, self._begin, self._end, self._make = file, begin, end, make

    def chunks(self) -> Iterator[Chunk]:
        # The byte before tells whether a line begins here; the last line ends in another block.
        begin = self._begin - min(1, self._begin - self._file.start)
        size = self._end - begin
        with open(self._file.path, "rb", buffering=0) as file:
            text = self._pread(file.fileno(), begin, size)
            first = text.find(b"\n", 0, size) + 1 if begin < self._begin else 0
            if first == 0 and begin < self._begin:
                return  # the middle of a line
            last = text.find(b"\n", size - 1) + 1
            if last == 0:
                text = self._with_rest_of_line(file.fileno(), begin, text)
                last = len(text)
        if first < last:
            yield self._make(self._file, text, first, last, begin + first, 0)

    def _pread(self, handle: int, begin: int, size: int) -> bytes:
        """At least `size` bytes from `begin` on, and some more if there are."""
        text = os.pread(handle, size + _PIECE, begin)
        while 0 < len(text) < size:
            more = os.pread(handle, size - len(text), begin + len(text))
            if not more:
                break
            text += more
        if len(text) < size:
            raise DataFormatError(
                f"{self._file.path}: it had {self._file.size} bytes, and now it ends before"
            )
        return text

    def _with_rest_of_line(self, handle: int, begin: int, text: bytes) -> bytes:
        """Up to its newline, the end of the file, or more than a line may have."""
        most = self._end - begin + self._file.max_line_bytes + 1
        while len(text) <= most and (piece := os.pread(handle, 1 << 20, begin + len(text))):
            end = piece.find(b"\n")
            text += piece if end < 0 else piece[: end + 1]
            if end >= 0:
                break
        return text


class _Compressed(Unit):
    """All of a gzip file, some lines at a time."""

    def __init__(self, file: TextFile, block_bytes: int, make: MakeChunk) -> None:
        self._file, self._block_bytes, self._make = file, block_bytes, make

    def chunks(self) -> Iterator[Chunk]:
        most = self._file.max_line_bytes + 2  # too long even if the last byte is a "\r"
        line = 1 if self._file.names is None else 2
        with gzip.open(self._file.path) as file, self._file.errors():
            file.read(self._file.start)
            rest = b""
            while piece := file.read(self._block_bytes):
                text = rest + piece
                end = text.rfind(b"\n") + 1
                rest = text[end:][:most]
                if end > 0:
                    yield self._make(self._file, text, 0, end, 0, line)
                    line += text.count(b"\n", 0, end)
            if rest:
                yield self._make(self._file, rest, 0, len(rest), 0, line)
