"""Reads delimited text: CSV, TSV and Criteo's format."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsekit import _pybind

from ..errors import DataFormatError, check_int
from .batch import Batch, KeyedJaggedTensor
from .columns import Columns, Keys, Kind
from .reader import Chunk, Fault, OnError, Reader, list_files
from .text_file import MAX_LINE_BYTES, QUOTE, TextFile

__all__ = ["CriteoReader", "CsvReader"]

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_HEX = Keys("hex")
# Maximum number of characters of a line to show in an error message.
_SHOWN = 60


class CsvReader(Reader):
    r"""Stream delimited text in batches, in bounded memory.

    Lines end with ``"\n"`` or ``"\r\n"``; blank lines are skipped. A quoted field may contain
    delimiters, newlines and doubled quotes. A byte-order mark is skipped. Text is hashed as bytes,
    so it need not be UTF-8 and may contain NUL bytes. Content compressed by gzip, bzip2 or xz is
    decompressed, whatever the file's name is. A pipe can be read once, on a single rank and without
    workers.

    Args:
        files: One path or several, to be read in the given order.
        batch_size: Number of rows in each batch on this rank, as with a DataLoader.
        sparse: Names of categorical columns, whose values are hashed; or a dict from names to
            `Keys` or to a kind of keys. In a batch, the features are in file order.
        dense: Names of numeric columns.
        label: Name of the label column, whose fields must not be empty.
        columns: Names of all columns, for files without a header. With None, the first line of
            each file is its header, and all files must have the same header.
        delimiter: The byte that separates fields, such as ``"\t"``.
        quote: The byte that quotes fields; with None, no byte has this meaning.
        missing: The number that replaces an empty dense field.
        on_error: ``"raise"``, or ``"skip"`` to skip malformed lines; `skipped` counts them.
        shuffle: Whether to shuffle the blocks of the files (a compressed file is one block), and
            the rows within each block, in every epoch. Unless quote is None, each plain file is
            first scanned once to find the starts of lines.
        seed: Seed of the shuffle.
        rank: Index of the share of rows to read; None means the rank in torch.distributed, if any.
        world_size: Number of shares; None means the number of ranks in torch.distributed.
        block_bytes: Size in bytes of a block, the part of a file that is held in memory at a time.
        max_line_bytes: Maximum length of a line in bytes; longer lines are malformed.

    Raises:
        TypeError, ValueError: an argument is out of range, or a column is missing.
        OSError: a file cannot be read.
        DataFormatError: the first bytes of a file are not text. While iterating: a line is
            malformed (the message gives file, line and column); a quote is never closed (raised
            even with ``on_error="skip"``); a compressed file is truncated or damaged; or a file
            has become shorter.

    Example:
        >>> sparse = {"user": "int", "tags": Keys("hash", separator="|")}
        >>> reader = CsvReader("clicks.csv", 4096, sparse=sparse, dense=["price"], label="click")
        >>> for label, dense, sparse in reader:
        ...     logits = model(dense, group(sparse))

    """

    def __init__(
        self,
        files: Files | TextFile,
        batch_size: int,
        *,
        sparse: Sequence[str] | Mapping[str, Keys | Kind] = (),
        dense: Sequence[str] = (),
        label: str | None = None,
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        quote: str | None = QUOTE,
        missing: float = 0.0,
        on_error: OnError = "raise",
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        block_bytes: int = 8 << 20,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        name = type(self).__name__
        self.columns = Columns.of(name, label, dense, sparse)
        _check_marks(name, delimiter, quote, self.columns)
        check_int(name, "block_bytes", block_bytes, 1, 2**40)
        check_int(name, "max_line_bytes", max_line_bytes, 1, 2**40)
        if isinstance(files, TextFile):
            texts = [files]
        else:
            texts = [
                TextFile(path, delimiter, quote, max_line_bytes, columns)
                for path in list_files(name, files, pipes=True)
            ]
        paths = [text.path for text in texts]
        names = texts[0].names
        self.columns.check_there(name, str(paths[0]), names)
        for text in texts:
            if text.names != names:
                raise ValueError(
                    f"{name}: {text.path} has the columns {text.names[:50]}, but {paths[0]} has "
                    f"{names[:50]}"
                )
        lines = _Lines(self.columns, names, delimiter, quote, missing, max_line_bytes)
        self._features = lines.features
        make = functools.partial(_TextChunk, lines)
        super().__init__(
            [
                unit
                for text in texts
                # If there is only one column, a blank line is a row with an empty field.
                for unit in text.units(block_bytes, len(names) > 1, make)
            ],
            paths,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            on_error=on_error,
            rank=rank,
            world_size=world_size,
        )
        self._block_bytes, self._quote = block_bytes, quote

    def _plan(self) -> dict[str, Any]:
        # Without shuffling, block_bytes does not change the order of rows.
        block_bytes = self._block_bytes if self.shuffle else None
        return {**super()._plan(), "block_bytes": block_bytes, "quote": self._quote}


class CriteoReader(CsvReader):
    r"""Stream files in Criteo's format in batches.

    A line has a label, 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs.
    All fields except the label may be empty. This is the format of Criteo's display advertising
    challenge and of the Criteo 1TB click logs. Files may be compressed. The features are named C1
    to C26, and the key of a category is its hexadecimal number. `dense` has the columns I1 to I13.

    Args:
        files: One path or several, to be read in the given order.
        batch_size: Number of rows in each batch on this rank, as with a DataLoader.
        keys: How categories are converted to keys: ``Keys("hex", separator=",")`` if a field has
            several categories, ``Keys("hash")`` if categories are arbitrary text.
        others: ``missing``, ``on_error``, ``shuffle``, ``seed``, ``rank``, ``world_size``,
            ``block_bytes`` and ``max_line_bytes``, as for `CsvReader`.

    Raises:
        See `CsvReader`.

    Example:
        >>> reader = CriteoReader("day_0.gz", 8192)
        >>> for label, dense, sparse in Prefetcher(reader):
        ...     logits = model(torch.log1p(dense.clamp(min=0)), group(sparse))

    """

    def __init__(self, files: Files, batch_size: int, *, keys: Keys = _HEX, **others: Any) -> None:
        dense = [f"I{i}" for i in range(1, 14)]
        sparse = {f"C{i}": keys for i in range(1, 27)}
        super().__init__(
            files,
            batch_size,
            label="label",
            dense=dense,
            sparse=sparse,
            columns=["label", *dense, *sparse],
            delimiter="\t",
            quote=None,
            **others,
        )


class _Lines:
    """Settings for converting lines to batches."""

    def __init__(
        self,
        columns: Columns,
        names: Sequence[str],
        delimiter: str,
        quote: str | None,
        missing: float,
        max_line_bytes: int,
    ) -> None:
        self.columns = columns
        self.names = list(names)
        self._settings = columns, names, delimiter, quote, missing, max_line_bytes
        # Features in file order, like the keys of a parsed line.
        self.features = [name for name in names if name in columns.sparse]
        fields = []
        for name in names:
            if name == columns.label:
                field = _pybind.TextField("float", column=-1, required=True)
            elif name in columns.dense:
                column = columns.dense.index(name)
                field = _pybind.TextField("float", column=column, missing=missing)
            elif name in columns.sparse:
                keys = columns.sparse[name]
                field = _pybind.TextField(
                    keys.kind,
                    separator=keys.separator or "",
                    missing_key=keys.missing,
                    seed=keys.seed,
                )
            else:
                field = _pybind.TextField("skip")
            fields.append(field)
        self.format = _pybind.TextFormat(delimiter, quote or "", max_line_bytes, fields)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return _Lines, self._settings  # the parser cannot be pickled, so each worker makes its own


@dataclass(frozen=True)
class _TextChunk(Chunk):
    """Lines of text in memory; see `MakeChunk` for the arguments."""

    _how: _Lines
    _file: TextFile
    _lines: _pybind.TextLines
    _text: bytes
    _start: int
    _line: int
    _unclosed: bool

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, rows: np.ndarray) -> tuple[Batch | None, list[Fault]]:
        how = self._how
        faults, *arrays = self._lines.parse(how.format, rows, torch.get_num_threads())
        if not faults:
            label, dense, values, offsets = map(torch.from_numpy, arrays)
            keys = KeyedJaggedTensor(how.features, values, offsets)
            return Batch(None if how.columns.label is None else label, dense, keys), []
        if self._unclosed:
            faults = self._check_last(rows, faults)
        # Describe only the first fault: finding the line numbers of all faults would take too long.
        row, field, reason = faults[0]
        described = self._describe(int(rows[row]), field, reason)
        return None, [(row, described) for row, _, _ in faults]

    def label_fault(self, row: int, reason: str) -> str:
        return self._describe(row, self._how.names.index(self._how.columns.label or ""), reason)

    def _check_last(self, rows: np.ndarray, faults: list[Any]) -> list[Any]:
        """Raise DataFormatError if the only fault left is a last line with an unclosed quote.

        Such a line may contain any number of rows, so it cannot be skipped like a single row.
        """
        last = len(self) - 1
        others = [fault for fault in faults if rows[fault[0]] != last]
        if not others:
            raise DataFormatError(
                self._describe(
                    last, faults[0][1], "a quote that is not closed before the file ends"
                )
                + "; quote=None takes quotes for text"
            )
        return others

    def _describe(self, row: int, field: int, reason: str) -> str:
        begin = self._lines.begin_of(row)
        if self._line:  # the number of the text's first line is known
            line = self._line + self._text.count(b"\n", 0, begin)
        else:
            line = self._file.line_number(self._start + begin)
        names = self._how.names
        column = f"column {field + 1}"
        if field < len(names):
            column += f" ({names[field]!r})"
        text = self._lines.line(row)
        shown = text[:_SHOWN].decode(errors="backslashreplace")
        more = "..." if len(text) > _SHOWN else ""
        return f"{self._file.path}, line {line}, {column}: {reason}: {shown!r}{more}"


def _check_marks(name: str, delimiter: str, quote: str | None, columns: Columns) -> None:
    """Raise ValueError if a mark is invalid, or the delimiter equals the quote or a separator."""
    marks = {"delimiter": delimiter, **({} if quote is None else {"quote": quote})}
    for argument, mark in marks.items():
        if len(mark.encode()) != 1 or mark in "\r\n\0":
            raise ValueError(f"{name}: {argument} must be one byte within a line, got {mark!r}")
    if delimiter == quote:
        raise ValueError(f"{name}: delimiter and quote are both {quote!r}")
    for feature, keys in columns.sparse.items():
        if keys.separator is not None and (
            keys.separator in "\r\n\0" or keys.separator == delimiter
        ):
            raise ValueError(f"{name}: sparse[{feature!r}]: separator is {keys.separator!r}")
