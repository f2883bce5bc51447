"""Checks whether a peer's package is installed; all of these packages are optional."""

from importlib.util import find_spec


def missing(module: str, package: str = "") -> str | None:
    """Return why a peer cannot be measured, and how to install it; None if it can."""
    if find_spec(module) is not None:
        return None
    name = package or module
    return f"{name} is not installed (pip install {name}, or make bench)"
