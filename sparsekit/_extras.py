"""Imports packages that only some functions need, and names the extra that installs them."""

import importlib
from typing import Any

__all__ = ["MissingPackageError", "needed"]

# The extra that installs each package, and the package's name on PyPI if the module's name differs.
_EXTRAS = {
    "matplotlib": "train",
    "pyarrow": "data",
    "scipy": "data",
    "tensorboard": "train",
    "yaml": "train",
}
_NAMES = {"yaml": "pyyaml"}


class MissingPackageError(ImportError):
    """A package is missing; the message says what needs it and how to install it."""


def needed(module: str, user: str) -> Any:
    """Import a module that only some functions need.

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
