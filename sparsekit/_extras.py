"""Packages that only some functions need: those of the extras."""

import importlib
from typing import Any

__all__ = ["needed"]

# The extra of each package, and its name in an index where that is another one.
_EXTRAS = {
    "matplotlib": "train",
    "pyarrow": "data",
    "scipy": "data",
    "tensorboard": "train",
    "yaml": "train",
}
_NAMES = {"yaml": "pyyaml"}


def needed(module: str, user: str) -> Any:
    """Import a module of such a package.

    Raises:
        ImportError: it cannot be imported; the message says what needs it and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{user} needs {_NAMES.get(package, package)}: "
            f"pip install 'sparsekit-torch[{_EXTRAS[package]}]'"
        ) from error
