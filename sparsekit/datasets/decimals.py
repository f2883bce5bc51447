"""Numbers in text files."""

from __future__ import annotations

import re
import sys

# Python's own float() takes underscores, blanks and the digits of all scripts as well.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def finite(text: str, most: float = sys.float_info.max) -> float:
    """The number that text stands for; ValueError if it is none, or its size is beyond most."""
    number = float(text) if DECIMAL.fullmatch(text) else None
    if number is None or abs(number) > most:
        raise ValueError(f"{text[:80]!r} is not a finite number")
    return number
