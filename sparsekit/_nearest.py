"""Suggests a known name for one that is misspelt."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_MOST_FILES = 10_000


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """The end of an error message: the nearest of these names, or nothing if none is near."""
    near = difflib.get_close_matches(wrong, list(dict.fromkeys(names)), 1)
    return f"; did you mean {_shown(near[0])}?" if near else ""


def _shown(name: str) -> str:
    """The name, in quotes where it begins or ends with a blank that would not be seen."""
    return name if name == name.strip() else repr(name)


def did_you_mean_file(path: str | os.PathLike[str]) -> str:
    """The same for a path that does not exist: the nearest name in its folder.

    Of a path whose folder is missing, it is the folder that has been misspelt.
    """
    wrong = Path(path)
    while not wrong.parent.is_dir() and wrong.parent != wrong:
        wrong = wrong.parent
    try:
        with os.scandir(wrong.parent) as entries:
            there = [entry.name for entry in itertools.islice(entries, _MOST_FILES)]
    except OSError:
        return ""
    if wrong.name in there:  # then something in it is missing, or what it links to
        return ""
    near = difflib.get_close_matches(wrong.name, there, 1)
    return f"; did you mean {_shown(str(wrong.with_name(near[0])))}?" if near else ""
