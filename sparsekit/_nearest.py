"""Suggests a known name for a misspelled one."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

_MOST_FILES = 10_000


def did_you_mean(wrong: str, names: Iterable[str]) -> str:
    """Return a suggestion to append to an error message; empty if no name is similar."""
    near = difflib.get_close_matches(wrong, list(dict.fromkeys(names)), 1)
    return f"; did you mean {_shown(near[0])}?" if near else ""


def _shown(name: str) -> str:
    """Return the name, in quotes if a leading or trailing blank would otherwise be invisible."""
    return name if name == name.strip() else repr(name)


def did_you_mean_file(path: str | os.PathLike[str]) -> str:
    """Suggest a similar name in the same folder for a path that does not exist.

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
    if wrong.name in there:  # the name exists, as a broken link or a folder
        return ""
    near = difflib.get_close_matches(wrong.name, there, 1)
    return f"; did you mean {_shown(str(wrong.with_name(near[0])))}?" if near else ""
