"""Imports optional packages; errors name the extra that installs the package."""

import importlib
from typing import Any

__all__ = ["MissingPackageError", "needed"]

# For each module: the extra that installs it, and its name on PyPI if that name differs.
_EXTRAS = {
    "matplotlib": "train",
    "pyarrow": "data",
    "scipy": "data",
    "tensorboard": "train",
    "yaml": "train",
}
_NAMES = {"yaml": "pyyaml"}


class MissingPackageError(ImportError):
    """Raised when a package is missing; the message says what it is for and how to install it."""


def needed(module: str, user: str) -> Any:
    """Import a module of an optional package.

    Raises:
        MissingPackageError: the module is missing.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"{user} needs {_NAMES.get(package, package)}: "
            f"pip install 'sparsekit-torch[{_EXTRAS[package]}]'"
        ) from error
