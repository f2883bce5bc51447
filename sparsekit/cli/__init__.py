"""The command ``sparsekit``: what all commands share, and those that belong to no application."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; None means those of the process.

    Returns:
        The exit code: 0; 1 when training has diverged or a rank has failed; 2 for what the user can
        put right; 130 after Ctrl-C.
    """
    # Only now: the commands of applications import this package, for what all commands share.
    from .dispatch import run

    return run(argv)
