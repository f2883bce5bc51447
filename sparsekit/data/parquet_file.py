"""Parquet files that are opened often, but whose footers are parsed once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .._extras import needed
from ..errors import DataFormatError

__all__ = ["ParquetFiles", "Shape"]

# Footers that are kept: bytes of them in their files, of which parsed ones take about 9 times as
# many in memory; and of how many files.
_KEPT_BYTES = 8 << 20
_KEPT_FILES = 64


class Shape(NamedTuple):
    """Rows, sizes and schema of a file, from its footer."""

    rows: list[int]  # of each row group
    sizes: list[int]  # of each, bytes without compression
    schema: Any  # pyarrow.Schema


class ParquetFiles:
    """Opens files, and keeps the parsed footers of those last used.

    To parse a footer takes as long as its file has row groups, so doing that for each group takes
    the square of their number. A kept footer belongs to the file that it was read from: that of a
    file written anew is parsed again, and refused unless it has the shape that the first one had.
    """

    def __init__(self) -> None:
        # Path -> which file that was, and its footer; the last used at the end.
        self._kept: dict[Path, tuple[tuple[int, ...], Any]] = {}
        self._shapes: dict[Path, Shape] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Workers parse what they need, in place of being sent it.
        return {**self.__dict__, "_kept": {}}

    def shape(self, path: Path) -> Shape:
        """See `open`."""
        with self.open(path):
            return self._shapes[path]

    @contextmanager
    def open(self, path: Path, place: str = "") -> Iterator[Any]:
        """A pyarrow.parquet.ParquetFile, closed at the end.

        Args:
            path: of the file.
            place: of which part of the file an error is.

        Raises:
            DataFormatError: no Parquet file, a damaged one, or one that cannot be opened; one that
                has changed since it was opened first; or an error of Arrow's inside the context.
        """
        user = "ParquetReader"
        pyarrow, parquet = needed("pyarrow", user), needed("pyarrow.parquet", user)
        try:
            with pyarrow.OSFile(os.fspath(path)) as source:
                about = os.fstat(source.fileno())
                which = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
                kept = self._kept.pop(path, None)
                footer = kept[1] if kept is not None and kept[0] == which else None
                # No text or list of a footer is longer than its file. Arrow takes memory for as
                # many as a damaged one says.
                limit = min(max(about.st_size, 1), 2**31 - 1)
                with parquet.ParquetFile(
                    source,
                    metadata=footer,
                    thrift_string_size_limit=limit,
                    thrift_container_size_limit=limit,
                ) as file:
                    if footer is None:
                        self._check(path, file)
                    self._keep(path, which, file.metadata)
                    yield file
        # A damaged page may also lead to an error that is not one of Arrow's own.
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            place = f", {place}" if place else ""
            raise DataFormatError(f"{path}{place}: {error}") from error

    def _check(self, path: Path, file: Any) -> None:
        """Look at a footer that has just been parsed."""
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        rows = [group.num_rows for group in groups]
        if min(rows, default=0) < 0 or sum(rows) != file.metadata.num_rows:
            raise DataFormatError(
                f"{path}: damaged: {file.metadata.num_rows} rows, but its row groups have "
                f"{sum(rows)}"
            )
        shape = Shape(rows, [max(0, group.total_byte_size) for group in groups], file.schema_arrow)
        first = self._shapes.setdefault(path, shape)
        if first.rows != rows or first.schema != shape.schema:
            raise DataFormatError(
                f"{path}: written anew since the reader was made, with other rows or columns"
            )

    def _keep(self, path: Path, which: tuple[int, ...], footer: Any) -> None:
        self._kept[path] = which, footer
        kept = list(self._kept.items())
        size = sum(each.serialized_size for _, (_, each) in kept)
        for left, (other, (_, each)) in zip(range(len(kept), 1, -1), kept, strict=False):
            if size <= _KEPT_BYTES and left <= _KEPT_FILES:
                break
            self._kept.pop(other, None)
            size -= each.serialized_size
