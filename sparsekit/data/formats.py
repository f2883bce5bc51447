"""Formats of files by name; an entry here makes a format known to all commands."""

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

# The opened file, the names of its columns, and those that hold lists.
Opened = tuple[Any, Sequence[str], Collection[str]]


@dataclass(frozen=True)
class Format:
    """The functions that read files of a format.

    Attributes:
        reader: makes the reader, as `CsvReader` does.
        open: opens a file, for the reader, to find its columns; None where all files of the format
            have the same columns, and only ``keys`` can be chosen.
        suffix: the ending of file names that tells the format, if there is one.
        keys: the default kind of `Keys` for a category.
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
