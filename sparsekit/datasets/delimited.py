"""Rows of delimited text, and numbers in them."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator

from ..errors import DataFormatError

# Python's own float() also accepts underscores, blanks and the digits of all scripts.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Replaces a separator of two characters, which the csv module does not accept.
_UNIT = "\x1f"


def rows_of(
    lines: Iterable[str], source: str, separator: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the columns of each line that is not blank."""
    one = separator if len(separator) == 1 else _UNIT
    if one != separator:
        lines = (line.replace(separator, one) for line in lines)
    reader = csv.reader(lines, delimiter=one, skipinitialspace=one == ",", strict=True)
    try:
        for row in reader:
            if row and one != separator:
                row = [text.replace(one, separator) for text in row]  # within a quoted one
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        raise DataFormatError(f"{source}:{reader.line_num}: {error}") from None


def finite(text: str, most: float = sys.float_info.max) -> float:
    """Return the number in a text; ValueError if there is none, or it is larger than most."""
    number = float(text) if DECIMAL.fullmatch(text) else None
    if number is None or abs(number) > most:
        raise ValueError(f"{text[:80]!r} is not a finite number")
    return number
