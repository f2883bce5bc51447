"""Writes files that replace existing files only when the new ones are complete."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path to write to; at the end, move the file written there to `path`.

    After an error, the old file is unchanged and the new file is removed. The temporary path is
    unique: if two jobs write the same file, the result is from the job that finishes last.
    If `path` is a link, its target is replaced. If `path` is not a regular file, such as /dev/null
    or a pipe, it is yielded unchanged.

    Raises:
        OSError: the file cannot be replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    # Use a random name, since the target's name may already have the maximum length.
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
