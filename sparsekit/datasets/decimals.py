"""Numbers in text files."""

from __future__ import annotations

import re
import sys

# Python's own float() also accepts underscores, blanks and the digits of all scripts.
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def finite(text: str, most: float = sys.float_info.max) -> float:
    """Return the number in a text; ValueError if there is none, or it is larger than most."""
    number = float(text) if DECIMAL.fullmatch(text) else None
    if number is None or abs(number) > most:
        raise ValueError(f"{text[:80]!r} is not a finite number")
    return number
