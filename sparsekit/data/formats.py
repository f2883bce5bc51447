"""Defines the file formats that all commands can read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import DataFormatError
from .parquet import ParquetReader
from .parquet_file import ParquetFiles
from .reader import Reader
from .text import CriteoReader, CsvReader
from .text_file import TextFile

# An opened file, the names of its columns, and the names of columns that hold lists.
Opened = tuple[Any, Sequence[str], Collection[str]]


@dataclass(frozen=True)
class Format:
    """A file format: the functions that read its files.

    Attributes:
        reader: class or function that makes a reader, such as `CsvReader`.
        open: function that opens a file to find its columns. None if all files in the format have
            the same columns, so that users can choose only ``keys``.
        suffix: file name extension that identifies the format, or None.
        keys: kind of `Keys` for categories, unless another kind is chosen.
    """

    reader: Callable[..., Reader]
    open: Callable[[str], Opened] | None
    suffix: str | None = None
    keys: Literal["hash", "hex"] = "hash"


def _open_parquet(file: str) -> Opened:
    path = Path(file)
    if path.exists() and not path.is_file():
        raise DataFormatError(f"{file}: is no regular file, from which alone Parquet is read")
    schema = ParquetFiles().shape(path).schema
    return file, schema.names, {each.name for each in schema if hasattr(each.type, "value_field")}


def _delimited(delimiter: str, suffix: str) -> Format:
    def open(file: str) -> Opened:
        text = TextFile(Path(file), delimiter)
        return text, text.names, ()

    return Format(functools.partial(CsvReader, delimiter=delimiter), open, suffix)


FORMATS = {
    "csv": _delimited(",", ".csv"),
    "tsv": _delimited("\t", ".tsv"),
    "criteo": Format(CriteoReader, None, keys="hex"),
    "parquet": Format(ParquetReader, _open_parquet, ".parquet"),
}
