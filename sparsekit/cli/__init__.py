"""The ``sparsekit`` command line: shared code, and the commands that belong to no application."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; None means those of the process.

    Returns:
        The exit code: 0; 1 when training has diverged or a rank has failed; 2 for an error that the
        user can fix; 130 after Ctrl-C.
    """
    # Imported late, since the commands of applications import this package for its shared code.
    from .dispatch import run

    return run(argv)
