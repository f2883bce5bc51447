"""Parses rows of delimited text, and decimal numbers."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator

from ..errors import DataFormatError

# Stricter than float(), which also accepts underscores, blanks and the digits of all scripts.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Replaces the separator ``::``, since the csv module accepts only one character.
_UNIT = "\x1f"


def rows_of(
    lines: Iterable[str], source: str, separator: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each non-blank line."""
    one = separator if len(separator) == 1 else _UNIT
    if one != separator:
        lines = (line.replace(separator, one) for line in lines)
    reader = csv.reader(lines, delimiter=one, skipinitialspace=one == ",", strict=True)
    try:
        for row in reader:
            if row and one != separator:
                row = [text.replace(one, separator) for text in row]  # in quoted fields, too
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataFormatError(f"{source}:{reader.line_num}: {error}") from None


def finite(text: str, most: float = sys.float_info.max) -> float:
    """Parse a decimal number; raise ValueError if it is malformed or beyond ±``most``."""
    number = float(text) if DECIMAL.fullmatch(text) else None
    if number is None or abs(number) > most:
        raise ValueError(f"{text[:80]!r} is not a finite number")
    return number
