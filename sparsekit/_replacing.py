"""Writes files that replace an existing one only when they are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces the file at `path` at the end.

    After an error the old file is unchanged and the new file is removed. The temporary path is
    unique: if two jobs write the same file, the last to finish wins, and their contents do not mix.
    If `path` is a link, its target is replaced. A path that is not a file, such as /dev/null or a
    pipe, is yielded itself.

    Raises:
        OSError: the file cannot be replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    # The length is fixed, since the target's name may already have the maximum length.
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
