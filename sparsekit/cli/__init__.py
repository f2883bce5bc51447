"""The ``sparsekit`` command line: shared code, and commands that are not part of an application."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments of the command line; None means ``sys.argv[1:]``.

    Returns:
        The exit code: 0 for success; 1 when training has diverged or a rank has failed; 2 for an
        error that the user can fix; 130 after Ctrl-C.
    """
    # Imported late, since the commands of applications import this package for its shared code.
    from .dispatch import run

    return run(argv)
