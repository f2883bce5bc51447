"""Layouts of snapshot and delta files, equal to those in csrc/serving/format.h.

docs/serving_format.md describes the files.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

PAGE = 4096
FORMAT_VERSION = 1
SNAPSHOT_MAGIC = b"\x89SKS\r\n\x1a\n"
DELTA_MAGIC = b"\x89SKD\r\n\x1a\n"
MOST_ROWS = 2**31 - 1
MOST_DIM = 1 << 20
MOST_TABLES = 1 << 16
MOST_NAME_BYTES = 4096

# A word's position in these tuples is its number in files.
ROW_FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
MISSES = ("initial", "zeros", "fallback", "error")
COMBINERS = ("sum", "mean", "sqrtn", "none", "max")
DISTRIBUTIONS = ("constant", "uniform", "normal")
UPSERT, TOMBSTONE = 1, 2

# Fallback row i has the key FIRST_FALLBACK + i.
FIRST_FALLBACK = -(2**63)


def _layout(size: int, *fields: tuple[str, str]) -> np.dtype:
    """Return a dtype without gaps; a field whose type is ``""`` fills the remaining bytes."""
    known = sum(np.dtype(kind).itemsize for _, kind in fields if kind)
    whole = [(name, kind or f"V{size - known}") for name, kind in fields]
    dtype = np.dtype(whole)
    if dtype.itemsize != size:
        raise ValueError(f"{dtype} has {dtype.itemsize} bytes, not {size}")
    return dtype


SNAPSHOT_HEADER = _layout(
    PAGE,
    ("magic", "S8"),
    ("format_version", "<u4"),
    ("num_tables", "<u4"),
    ("file_bytes", "<u8"),
    ("log_id", "<u8"),
    ("version", "<u8"),
    ("dense_version", "<u8"),
    ("step", "<i8"),
    ("written_at", "<i8"),
    ("directory_bytes", "<u8"),
    ("note_offset", "<u8"),
    ("note_bytes", "<u8"),
    ("zeros", ""),
    ("directory_crc", "<u4"),
    ("crc", "<u4"),
)
TABLE_RECORD = _layout(
    256,
    ("name_offset", "<u8"),
    ("name_bytes", "<u4"),
    ("row_format", "<u4"),
    ("dim", "<u4"),
    ("row_bytes", "<u4"),
    ("num_rows", "<u8"),
    ("num_buckets", "<u8"),
    ("index_seed", "<i8"),
    ("index_offset", "<u8"),
    ("rows_offset", "<u8"),
    ("index_crc", "<u4"),
    ("rows_crc", "<u4"),
    ("miss", "<u4"),
    ("distribution", "<u4"),
    ("initial_seed", "<u8"),
    ("a", "<f4"),
    ("b", "<f4"),
    ("num_fallbacks", "<u8"),
    ("combiner", "<u4"),
    ("has_padding_key", "<u4"),
    ("padding_key", "<i8"),
    ("zeros", ""),
)
DELTA_HEADER = _layout(
    128,
    ("magic", "S8"),
    ("format_version", "<u4"),
    ("num_sections", "<u4"),
    ("file_bytes", "<u8"),
    ("log_id", "<u8"),
    ("version", "<u8"),
    ("dense_version", "<u8"),
    ("step", "<i8"),
    ("written_at", "<i8"),
    ("rank", "<u4"),
    ("num_ranks", "<u4"),
    ("zeros", ""),
    ("crc", "<u4"),
)
DELTA_SECTION = _layout(
    32,
    ("table", "<u4"),
    ("kind", "<u4"),
    ("row_format", "<u4"),
    ("row_bytes", "<u4"),
    ("num_keys", "<u8"),
    ("data_crc", "<u4"),
    ("header_crc", "<u4"),
)
BUCKET = np.dtype([("keys", "<i8", 5), ("rows", "<i4", 5), ("spilled", "<i4")])

_BASE = re.compile(r"base-(\d{20})\.sks\Z", re.ASCII)
_DELTA = re.compile(r"delta-(\d{20})-(\d{5})-of-(\d{5})\.skd\Z", re.ASCII)


def base_name(version: int) -> str:
    """Return the name of a base in a log's folder."""
    return f"base-{version:020d}.sks"


def delta_name(version: int, rank: int, num_ranks: int) -> str:
    """Return the name of a rank's part of a delta in a log's folder."""
    return f"delta-{version:020d}-{rank:05d}-of-{num_ranks:05d}.skd"


def base_version(name: str) -> int | None:
    """Return the version in a base's name; None for any other name."""
    match = _BASE.match(name)
    return int(match[1]) if match else None


def delta_part(name: str) -> tuple[int, int, int] | None:
    """Return the version, rank and number of ranks in a delta's name; None for any other name."""
    match = _DELTA.match(name)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def offset_of(layout: np.dtype, field: str) -> int:
    """Return the offset of a field in bytes."""
    fields: Any = layout.fields
    return int(fields[field][1])


def page_after(offset: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-offset // PAGE) * PAGE
