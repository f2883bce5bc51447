"""Suggests a known name for a misspelt one."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_MOST_FILES = 10_000


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return text to append to an error message: the nearest name, or nothing if none is near."""
    near = difflib.get_close_matches(wrong, list(dict.fromkeys(names)), 1)
    return f"; did you mean {_shown(near[0])}?" if near else ""


def _shown(name: str) -> str:
    """Return the name, in quotes if it begins or ends with a blank, which would be invisible."""
    return name if name == name.strip() else repr(name)


def did_you_mean_file(path: str | os.PathLike[str]) -> str:
    """Like `did_you_mean`, for a path that does not exist and the names in its folder.

    If the folder does not exist either, the suggestion is for the folder's name.
    """
    wrong = Path(path)
    while not wrong.parent.is_dir() and wrong.parent != wrong:
        wrong = wrong.parent
    try:
        with os.scandir(wrong.parent) as entries:
            there = [entry.name for entry in itertools.islice(entries, _MOST_FILES)]
    except OSError:
        return ""
    if wrong.name in there:  # a broken link, or a folder that lacks the rest of the path
        return ""
    near = difflib.get_close_matches(wrong.name, there, 1)
    return f"; did you mean {_shown(str(wrong.with_name(near[0])))}?" if near else ""
