"""Opens Parquet files repeatedly, but parses their footers only once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .._extras import needed
from ..errors import DataFormatError

__all__ = ["ParquetFiles", "Shape"]

# Limits on cached footers: their total size in bytes, as stored in the files, and their number. A
# parsed footer takes about 9 times its size in the file.
_KEPT_BYTES = 8 << 20
_KEPT_FILES = 64


class Shape(NamedTuple):
    """Number of rows and size of each row group in a file, and the file's schema."""

    rows: list[int]  # number of rows in each row group
    sizes: list[int]  # size of each row group in uncompressed bytes
    schema: Any  # a pyarrow.Schema


class ParquetFiles:
    """Opens files, and caches the parsed footers of the most recently used ones.

    Parsing a footer takes time proportional to the number of row groups. Parsing it again for each
    group would therefore take quadratic time. When a file has been rewritten, its footer is parsed
    again; an error is raised if the shape has changed.
    """

    def __init__(self) -> None:
        # Each file's identity and footer, by path. The most recently used entry is last.
        self._kept: dict[Path, tuple[tuple[int, ...], Any]] = {}
        self._shapes: dict[Path, Shape] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Do not send parsed footers to workers: each worker parses the footers that it needs.
        return {**self.__dict__, "_kept": {}}

    def shape(self, path: Path) -> Shape:
        """Return the file's shape. Raises the same errors as `open`."""
        with self.open(path):
            return self._shapes[path]

    @contextmanager
    def open(self, path: Path, place: str = "") -> Iterator[Any]:
        """Open a file as a pyarrow.parquet.ParquetFile, and close it at the end of the context.

        Args:
            path: path of the file.
            place: part of the file to mention in errors.

        Raises:
            DataFormatError: the file is not Parquet, is damaged, cannot be opened, or has changed
                since it was first opened; or Arrow raised an error inside the context.
        """
        user = "ParquetReader"
        pyarrow, parquet = needed("pyarrow", user), needed("pyarrow.parquet", user)
        try:
            with pyarrow.OSFile(os.fspath(path)) as source:
                about = os.fstat(source.fileno())
                which = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
                kept = self._kept.pop(path, None)
                footer = kept[1] if kept is not None and kept[0] == which else None
                # No string or list in a footer can be longer than the file. Without a limit, Arrow
                # would allocate any size that a damaged footer claims.
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
        # Reading a damaged page can also raise Python's built-in exceptions.
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            place = f", {place}" if place else ""
            raise DataFormatError(f"{path}{place}: {error}") from error

    def _check(self, path: Path, file: Any) -> None:
        """Raise DataFormatError if a newly parsed footer is invalid or the shape has changed."""
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
