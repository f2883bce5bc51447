"""Writes and reads sizes in bytes with binary units."""

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(size: int) -> str:
    """Return a size as text, in the largest binary unit that does not exceed it."""
    value, units = float(size), list(_UNITS)
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def size_of_text(text: str) -> int:
    """Return the number of bytes in a size such as ``"2 GiB"``, ``"1.5GiB"`` or ``"4096"``.

    Raises:
        ValueError: the string is not a size of at least one byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*(B|KiB|MiB|GiB|TiB)?", text.strip())
    size = int(float(found[1]) * 1024 ** _UNITS.index(found[2] or "B")) if found else 0
    if size < 1:
        raise ValueError(f"{text!r} is no size in bytes, such as 2GiB, 500MiB or 4096")
    return size
