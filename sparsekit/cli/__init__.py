"""The ``sparsekit`` command line: shared code, and the commands outside `sparsekit.recipes`."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: command-line arguments; None means ``sys.argv[1:]``.

    Returns:
        The exit code: 0 for success; 1 if training has diverged or a rank has failed; 2 for an
        error that the user can fix; 130 after Ctrl-C.
    """
    # Import late, to avoid a cycle: `dispatch` imports the recipes, which import this package.
    from .dispatch import run

    return run(argv)
