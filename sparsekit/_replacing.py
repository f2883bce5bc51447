"""Files that appear whole, in place of what was there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new path beside the given one, for a file that takes its place at the end.

    After an error what was there stays, and nothing beside it. The name is nobody else's: of two
    jobs that write the same file, the last to end wins, and neither gets a mixture. A link stays,
    and its target is replaced; what is no file, such as /dev/null or a pipe, is written into.

    Raises:
        OSError: the file cannot be replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    # Not longer than the name itself, which may be as long as names can be.
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
