"""Writes and reads delta files; docs/serving_format.md describes the format."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import encoding
from .draft import Draft
from .errors import LogError
from .format import (
    DELTA_HEADER,
    DELTA_MAGIC,
    DELTA_SECTION,
    FORMAT_VERSION,
    TOMBSTONE,
    UPSERT,
    offset_of,
)


@dataclass(frozen=True)
class Section:
    """Keys of one table that a delta writes or erases.

    Attributes:
        table: position of the table in the base's directory.
        row_format: number of the row format.
        row_bytes: size of a row in bytes.
        keys: int64 ``[n]``.
        rows: uint8 ``[n, row_bytes]``; None if the keys are erased.
    """

    table: int
    row_format: int
    row_bytes: int
    keys: np.ndarray
    rows: np.ndarray | None


def header_of(**fields: int) -> np.ndarray:
    """Return the header of a delta with these fields; `write_delta` fills in the others."""
    header = np.zeros((), DELTA_HEADER)
    header["magic"], header["format_version"] = DELTA_MAGIC, FORMAT_VERSION
    for name, value in fields.items():
        header[name] = value
    return header


def write_delta(
    path: str | os.PathLike[str], header: np.ndarray, sections: Sequence[Section]
) -> int:
    """Write a delta; the file gets its name only once it is complete.

    The file is not synced to disk: that would take longer than everything else, and a trainer that
    restarts after a power loss writes a new base, so no reader needs the deltas before it.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: the disk is full, for example; the error names the file.
    """
    parts: list[bytes | memoryview] = []
    for section in sections:
        data = [np.ascontiguousarray(section.keys, dtype="<i8")]
        if section.rows is not None:
            data.append(np.ascontiguousarray(section.rows))
        size = sum(each.nbytes for each in data)
        zeros = bytes(-size % 8)
        crc = 0
        for each in data:
            crc = encoding.crc32(each, crc)
        head = np.zeros((), DELTA_SECTION)
        head["table"], head["row_format"] = section.table, section.row_format
        head["kind"] = TOMBSTONE if section.rows is None else UPSERT
        head["row_bytes"], head["num_keys"] = section.row_bytes, len(section.keys)
        head["data_crc"] = encoding.crc32(zeros, crc)
        head["header_crc"] = _crc_before(head, "header_crc")
        parts += [head.tobytes(), *(each.data for each in data if each.nbytes), zeros]
    header = header.copy()
    header["num_sections"] = len(sections)
    total = DELTA_HEADER.itemsize + sum(memoryview(part).nbytes for part in parts)
    header["file_bytes"] = total
    header["crc"] = _crc_before(header, "crc")
    draft = Draft(path)
    try:
        draft.write(header.tobytes())
        for part in parts:
            draft.write(part)
        draft.publish(sync=False)
    finally:
        draft.end()
    return total


def read_delta(path: Path, log_id: int | None = None) -> tuple[np.ndarray, list[Section]]:
    """Read and check a delta; its sections' keys and rows are views of the mapped file.

    Args:
        path: the file.
        log_id: ID of the log that the delta must belong to; None for any.

    Returns:
        The header and the sections.

    Raises:
        LogError: the file is damaged, belongs to another log, or has an unknown format.
        OSError: the file cannot be read.
    """
    data = map_file(path)
    if len(data) < DELTA_HEADER.itemsize:
        raise LogError(f"{path}: damaged: ends too soon")
    header = data[: DELTA_HEADER.itemsize].view(DELTA_HEADER)[0]
    if header["magic"] != DELTA_MAGIC or header["crc"] != _crc_before(header, "crc"):
        raise LogError(f"{path}: not a delta, or damaged: wrong checksum of the header")
    if header["format_version"] > FORMAT_VERSION:
        raise LogError(f"{path}: of format {header['format_version']}, which is not known")
    if log_id is not None and header["log_id"] != log_id:
        raise LogError(f"{path}: belongs to log {header['log_id']:016x}, not to {log_id:016x}")
    if header["file_bytes"] != len(data):
        raise LogError(f"{path}: damaged: {len(data)} bytes instead of {header['file_bytes']}")
    return header, list(_sections(path, header, data))


def _sections(path: Path, header: np.ndarray, data: np.ndarray) -> Iterator[Section]:
    at = DELTA_HEADER.itemsize
    for number in range(int(header["num_sections"])):
        end = at + DELTA_SECTION.itemsize
        if end > len(data):
            raise LogError(f"{path}: damaged: ends before section {number}")
        head = data[at:end].view(DELTA_SECTION)[0]
        keys, width = int(head["num_keys"]), int(head["row_bytes"])
        each = 8 + (width if head["kind"] == UPSERT else 0)
        size = -(-keys * each // 8) * 8
        if head["header_crc"] != _crc_before(head, "header_crc") or end + size > len(data):
            raise LogError(f"{path}: damaged: wrong checksum of the header of section {number}")
        if head["kind"] not in (UPSERT, TOMBSTONE):
            raise LogError(f"{path}: section {number} is of an unknown kind, {head['kind']}")
        own = data[end : end + size]
        if head["data_crc"] != encoding.crc32(own):
            raise LogError(f"{path}: damaged: wrong checksum of section {number}")
        rows = own[8 * keys : keys * each].reshape(keys, width) if head["kind"] == UPSERT else None
        table, row_format = int(head["table"]), int(head["row_format"])
        yield Section(table, row_format, width, own[: 8 * keys].view("<i8"), rows)
        at = end + size
    if at != len(data):
        raise LogError(f"{path}: damaged: bytes behind the last section")


def map_file(path: Path) -> np.ndarray:
    """Map a file into memory, read-only, as uint8 ``[bytes]``."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)


def _crc_before(record: np.ndarray, field: str) -> int:
    """Return the checksum of a record's bytes before a field."""
    return encoding.crc32(record.tobytes()[: offset_of(record.dtype, field)])
