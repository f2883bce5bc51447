"""Reads text files, plain or compressed, in units that can be read separately."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from .. import _pybind
from .._content import Content, open_content
from ..errors import DataFormatError
from .reader import Chunk, Unit

QUOTE, MAX_LINE_BYTES = '"', 1 << 20
_BOM = b"\xef\xbb\xbf"
# Number of bytes to read beyond a block, to find the end of its last line.
_PIECE = 4096
_INSIDE = 1  # the state that _pybind.skip_line returns inside a quoted field

# A function that makes a chunk from lines of text. The start of the text is given either as a byte
# offset in the file or as a line number, counted from 1; the other number is 0. The flag is true if
# the last line has a quote that is never closed.
MakeChunk = Callable[["TextFile", _pybind.TextLines, bytes, int, int, bool], Chunk]


class TextFile:
    """A text file, with or without a byte-order mark and a header.

    A newline within a quoted field does not end a line.

    Args:
        path: A file, plain or compressed (see `Content`); or a pipe, which can be read only once.
        delimiter: The byte that separates fields.
        quote: The byte that quotes fields, or None.
        max_line_bytes: Maximum length of a line in bytes; the rest of a longer line is dropped.
        columns: Names of the columns; None if the first line is a header with the names.

    Attributes:
        names: names of the columns.
        regular: whether the path is a regular file; false for a pipe.

    Raises:
        OSError: the file cannot be read.
        DataFormatError: the file is not text, or its first line cannot be read.
    """

    def __init__(
        self,
        path: Path,
        delimiter: str,
        quote: str | None = QUOTE,
        max_line_bytes: int = MAX_LINE_BYTES,
        columns: Sequence[str] | None = None,
    ) -> None:
        header = columns is None
        self.path = path
        self.max_line_bytes = max_line_bytes
        self.size = path.stat().st_size
        self._marks = delimiter, quote or ""
        self._pipe: tuple[io.BufferedReader, bytes] | None = None
        file = open_content(path)
        try:
            content = cast(Content, file.raw)
            self.regular, self._plain = content.regular, content.plain
            text, first = self._begin(file, header)
        except BaseException:
            file.close()
            raise
        self.names = self._names_in(first) if columns is None else list(columns)
        # Byte offset and line number where the rows begin.
        self.start = len(_BOM) * text.startswith(_BOM) + len(first) * header
        self.line = 1 + first.count(b"\n") * header
        if self.regular:
            file.close()
        else:
            self._pipe = file, text[self.start :]
        self._blocks: list[_Block] = []
        self._firsts = [self.start]  # see `first_of`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipe": None}

    def _begin(self, file: io.BufferedReader, header: bool) -> tuple[bytes, bytes]:
        """Return the file's first bytes, and its first line, cut off at the maximum length."""
        text, end, piece = b"", -1, b"-"
        while end < 0 and piece and len(text) <= self.max_line_bytes + len(_BOM) + 2:
            piece = file.read(_PIECE)
            text += piece
            end, _ = _pybind.skip_line(text.removeprefix(_BOM), 0, *self._marks, 0)
        line = text.removeprefix(_BOM)
        line = line if end < 0 else line[:end]
        if b"\r" in line.rstrip(b"\r\n").replace(b"\r\n", b"") and (header or end < 0):
            raise DataFormatError(
                f'{self.path}: lines end with "\\r" alone, not with "\\n"; convert them, '
                f"`tr '\\r' '\\n'` does"
            )
        return text, line

    def _names_in(self, line: bytes) -> list[str]:
        if len(line) > self.max_line_bytes + 2:
            raise DataFormatError(
                f"{self.path}, line 1: longer than max_line_bytes={self.max_line_bytes}"
            )
        delimiter, quote = self._marks
        try:
            text = line.decode().rstrip("\r\n")
            if not quote:
                return text.split(delimiter)
            rows = csv.reader([text], delimiter=delimiter, quotechar=quote, strict=True)
            return next(rows, [""])
        except UnicodeDecodeError as error:
            raise DataFormatError(f"{self.path}, line 1: not UTF-8: {error}") from None
        except csv.Error as error:
            raise DataFormatError(f"{self.path}, line 1: no names of columns: {error}") from None

    def rows(self) -> tuple[io.BufferedReader, bytes]:
        """Return the content as an open file, and any bytes of rows already read from it.

        Raises:
            DataFormatError: the file is a pipe that has already been read.
        """
        if self.regular:
            file = open_content(self.path)
            file.read(self.start)
            return file, b""
        pipe, self._pipe = self._pipe, None
        if pipe is None:
            raise DataFormatError(f"{self.path}: is a pipe, read once already; write it to a file")
        return pipe

    def units(self, block_bytes: int, skip_blank: bool, make: MakeChunk) -> list[Unit]:
        """Cut a plain file into blocks; a compressed file or a pipe is a single unit."""
        self._skip_blank, self.make = skip_blank, make
        if not self._plain:
            return [_Stream(self, block_bytes)]
        starts = range(self.start, self.size, block_bytes)
        self._blocks = [
            _Block(self, number, a, min(a + block_bytes, self.size))
            for number, a in enumerate(starts)
        ]
        return list(self._blocks)

    def lines(self, text: bytes, stop: int, complete: bool) -> _pybind.TextLines:
        """Return the lines that begin in text[:stop]; if `complete`, the last needs no newline."""
        return _pybind.TextLines(text, stop, *self._marks, self._skip_blank, complete)

    def skip_line(self, text: bytes, more: Callable[[], bytes]) -> tuple[bytes, int, bool]:
        """Find the end of a line that begins in `text` and may continue in further pieces.

        Returns:
            The rest of the last piece, the number of newlines in the line, and whether the file
            ends before the line's quote is closed.
        """
        begin = place = newlines = 0
        while True:
            end, place = _pybind.skip_line(text, begin, *self._marks, place)
            newlines += text.count(b"\n", begin, len(text) if end < 0 else end)
            if end >= 0:
                return text[end:], newlines, False
            piece = more()
            if not piece:
                return b"", newlines, place == _INSIDE
            text, begin = text[-1:] + piece, 1

    def first_of(self, block: int) -> int:
        """Return the offset of the first line that begins in a block or after it.

        If fields may contain newlines, not every newline ends a line, so all previous blocks are
        scanned once.
        """
        if not self._marks[1]:
            return self._blocks[block].guess()
        while len(self._firsts) <= block:
            last = self._blocks[len(self._firsts) - 1]
            self._firsts.append(last.scan(self._firsts[-1])[2])
        return self._firsts[block]

    def line_number(self, position: int) -> int:
        """Return the number of the line at byte `position` of a plain file, counted from 1."""
        number = 1
        with open(self.path, "rb") as file:
            while position > 0 and (text := file.read(min(position, 1 << 20))):
                number += text.count(b"\n")
                position -= len(text)
        return number


class _Block(Unit):
    """The lines that begin in bytes [begin, end) of a plain file."""

    def __init__(self, file: TextFile, number: int, begin: int, end: int) -> None:
        self._file, self._number, self._begin, self._end = file, number, begin, end
        self._scanned = -1, 0, 0  # cached result of `scan`

    def chunks(self) -> Iterator[Chunk]:
        first = self._file.first_of(self._number)
        if first < self._end:
            lines, text, end, unclosed = self._read(first)
            self._scanned = first, len(lines), end
            if len(lines):
                yield self._file.make(self._file, lines, text, first, 0, unclosed)

    def look(self) -> None:
        # The guess is nearly always right, since few fields contain newlines. With it, blocks can
        # be scanned in parallel.
        self.scan(self.guess())

    def count(self) -> int:
        return self.scan(self._file.first_of(self._number))[1]

    def scan(self, first: int) -> tuple[int, int, int]:
        """Return a triple: `first`, the number of lines from there on, and the last line's end."""
        if self._scanned[0] != first:
            if first < self._end:
                lines, _, end, _ = self._read(first)
                self._scanned = first, len(lines), end
            else:
                self._scanned = first, 0, first
        return self._scanned

    def guess(self) -> int:
        """Return the first line's offset, or the block's end; assume no newlines within fields."""
        if self._begin == self._file.start:
            return self._begin
        # Include the previous byte, which shows whether a line begins here.
        place = self._begin - 1
        with open(self._file.path, "rb") as file:
            while place < self._end:
                text = self._text(file, place, min(_PIECE, self._end - place))
                if (newline := text.find(b"\n")) >= 0:
                    return place + newline + 1
                place += len(text)
        return self._end

    def _read(self, first: int) -> tuple[_pybind.TextLines, bytes, int, bool]:
        """Return the lines from byte `first`, their text, its end, and whether a quote is open."""
        stop = self._end - first
        with open(self._file.path, "rb") as file:
            text = self._text(file, first, stop)
            lines = self._file.lines(text, stop, False)
            if lines.end >= stop:
                return lines, text, first + lines.end, False
            most = self._file.max_line_bytes + 2  # a line this long is malformed, even with "\r"
            last = text[lines.end :]

            def more() -> bytes:
                nonlocal last
                piece = file.read(1 << 16)
                if len(last) < most:
                    last += piece
                return piece

            rest, _, unclosed = self._file.skip_line(last, more)
            end = file.tell() - len(rest)
        text = text[: lines.end] + last[: min(most, end - first - lines.end)]
        return self._file.lines(text, min(stop, len(text)), True), text, end, unclosed

    def _text(self, file: BinaryIO, begin: int, size: int) -> bytes:
        """Read at least `size` bytes, starting at byte `begin`."""
        file.seek(begin)
        text = file.read(size + _PIECE)
        if len(text) < size:
            raise DataFormatError(
                f"{self._file.path}: it had {self._file.size} bytes, and now it ends before"
            )
        return text


class _Stream(Unit):
    """A whole compressed file or pipe, read one block of lines at a time."""

    counts_fast = False

    def __init__(self, file: TextFile, block_bytes: int) -> None:
        self._file, self._block_bytes = file, block_bytes
        self._count: int | None = None

    def look(self) -> None:
        if not self._file.regular:
            raise DataFormatError(
                f"{self._file.path}: is a pipe, whose rows cannot be counted before they are read; "
                f"write it to a file"
            )
        if self._count is None:
            self._count = super().count()

    def count(self) -> int:
        self.look()
        return self._count or 0

    def chunks(self) -> Iterator[Chunk]:
        most = self._file.max_line_bytes + 2  # a line this long is malformed, even with "\r"
        line = self._file.line
        file, rest = self._file.rows()

        def more() -> bytes:
            return file.read(self._block_bytes)

        with file:
            piece = b"-"
            while piece:
                piece = more()
                text = rest + piece
                lines = self._file.lines(text, len(text), not piece)
                if len(lines):
                    yield self._file.make(self._file, lines, text, 0, line, lines.unclosed)
                line += text.count(b"\n", 0, lines.end)
                rest = text[lines.end :]
                if len(rest) > most:
                    text = rest[:most]
                    rest, newlines, unclosed = self._file.skip_line(rest, more)
                    lines = self._file.lines(text, most, True)
                    yield self._file.make(self._file, lines, text, 0, line, unclosed)
                    line += newlines
