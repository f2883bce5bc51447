"""Merges a base and deltas into one base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import encoding
from .delta_file import Section, map_file
from .errors import LogError
from .format import (
    BUCKET,
    COMBINERS,
    DISTRIBUTIONS,
    FORMAT_VERSION,
    MISSES,
    PAGE,
    ROW_FORMATS,
    SNAPSHOT_HEADER,
    SNAPSHOT_MAGIC,
    TABLE_RECORD,
    offset_of,
)
from .writer import SnapshotWriter, TableWriter

# Number of rows copied at a time.
_ROWS = 1 << 16


@dataclass(frozen=True)
class BaseFile:
    """A base that has been mapped into memory and checked.

    Attributes:
        path: the file.
        header: its header.
        records: its tables.
        names: names of the tables.
        note: text that says where the base comes from.
    """

    path: Path
    header: np.ndarray
    records: np.ndarray
    names: list[str]
    note: str
    _data: np.ndarray

    @staticmethod
    def read(path: Path, whole: bool = True) -> BaseFile:
        """Map a file and verify its checksums; with whole=False, only those of its first pages.

        Raises:
            LogError: the file is damaged, or has an unknown format.
            OSError: the file cannot be read.
        """
        data = map_file(path)
        if len(data) < PAGE:
            raise LogError(f"{path}: damaged: ends too soon")
        header = data[:PAGE].view(SNAPSHOT_HEADER)[0]
        crc = encoding.crc32(data[: offset_of(SNAPSHOT_HEADER, "crc")])
        if header["magic"] != SNAPSHOT_MAGIC or header["crc"] != crc:
            raise LogError(f"{path}: not a snapshot, or damaged: wrong checksum of the header")
        if header["format_version"] > FORMAT_VERSION:
            raise LogError(f"{path}: of format {header['format_version']}, which is not known")
        end = PAGE + int(header["directory_bytes"])
        if header["file_bytes"] != len(data) or end > len(data):
            raise LogError(f"{path}: damaged: {len(data)} bytes, not {header['file_bytes']}")
        if header["directory_crc"] != encoding.crc32(data[PAGE:end]):
            raise LogError(f"{path}: damaged: wrong checksum of the directory")
        size = int(header["num_tables"]) * TABLE_RECORD.itemsize
        records = data[PAGE : PAGE + size].view(TABLE_RECORD)
        texts = [_text(data, each["name_offset"], each["name_bytes"]) for each in records]
        note = _text(data, header["note_offset"], header["note_bytes"])
        base = BaseFile(path, header, records, texts, note, data)
        for table in range(len(records)) if whole else ():
            for part, kind in (("index", base.buckets(table)), ("rows", base.rows(table))):
                if records[table][f"{part}_crc"] != encoding.crc32(kind):
                    raise LogError(
                        f"{path}: damaged: wrong checksum of the {part} of table {texts[table]}"
                    )
        return base

    def buckets(self, table: int) -> np.ndarray:
        """Return the index of a table, `BUCKET` ``[num_buckets]``."""
        record = self.records[table]
        begin = int(record["index_offset"])
        end = begin + int(record["num_buckets"]) * BUCKET.itemsize
        return self._data[begin:end].view(BUCKET)

    def rows(self, table: int) -> np.ndarray:
        """Return the rows of a table, uint8 ``[n, row_bytes]``."""
        record = self.records[table]
        count, width = int(record["num_rows"]), int(record["row_bytes"])
        begin = int(record["rows_offset"])
        return self._data[begin : begin + count * width].reshape(count, width)

    def keys(self, table: int) -> np.ndarray:
        """Return the key of each row of a table, int64 ``[n]``."""
        keys = np.zeros(int(self.records[table]["num_rows"]), np.int64)
        for begin in range(0, int(self.records[table]["num_buckets"]), _ROWS):
            buckets = self.buckets(table)[begin : begin + _ROWS]
            used = buckets["rows"] >= 0
            keys[buckets["rows"][used]] = buckets["keys"][used]
        return keys


def _text(data: np.ndarray, offset: int, size: int) -> str:
    text = data[int(offset) : int(offset) + int(size)].tobytes()
    return text.decode("utf-8", "surrogateescape")


def add_tables_of(base: BaseFile, snapshot: SnapshotWriter) -> list[TableWriter]:
    """Add the tables of a base, without rows, to a new snapshot."""
    added = []
    for name, record in zip(base.names, base.records, strict=True):
        numbers = float(record["a"]), float(record["b"])
        added.append(
            snapshot.table(
                name,
                int(record["dim"]),
                rows=ROW_FORMATS[record["row_format"]],
                miss=MISSES[record["miss"]],
                initializer=(DISTRIBUTIONS[record["distribution"]], *numbers),
                seed=int(record["initial_seed"]),
                fallbacks=int(record["num_fallbacks"]),
                combiner=COMBINERS[record["combiner"]],
                padding_key=int(record["padding_key"]) if record["has_padding_key"] else None,
                index_seed=int(record["index_seed"]),
            )
        )
    return added


def merge_table(
    writer: TableWriter,
    keys: np.ndarray,
    rows: np.ndarray,
    changes: Iterable[Sequence[Section]],
) -> None:
    """Write the rows of a table with some changes applied.

    Args:
        writer: the table to fill.
        keys: key of each row before the changes, int64 ``[n]``.
        rows: the rows before the changes, uint8 ``[n, row_bytes]``.
        changes: sections of the table, version by version. In each version, tombstones precede
            upserts.

    Raises:
        OSError: the disk is full, for example.
    """
    ordered = [
        section
        for version in changes
        for section in sorted(version, key=lambda each: each.rows is not None)
        if len(section.keys)
    ]
    if not ordered:
        _append(writer, keys, rows, np.ones(len(keys), bool))
        return
    changed = np.concatenate([section.keys for section in ordered])
    # Only each key's last change counts. np.unique finds the first one, so reverse the order.
    distinct, last = np.unique(changed[::-1], return_index=True)
    lasts = np.zeros(len(changed), bool)
    lasts[len(changed) - 1 - last] = True
    places = np.searchsorted(distinct, keys)
    places[places == len(distinct)] = 0
    _append(writer, keys, rows, distinct[places] != keys)
    begin = 0
    for section in ordered:
        end = begin + len(section.keys)
        if section.rows is not None:
            _append(writer, section.keys, section.rows, lasts[begin:end])
        begin = end


def _append(writer: TableWriter, keys: np.ndarray, rows: np.ndarray, wanted: np.ndarray) -> None:
    for begin in range(0, len(keys), _ROWS):
        part = slice(begin, begin + _ROWS)
        taken = wanted[part]
        if taken.any():
            writer.append_encoded(keys[part][taken], rows[part][taken])
