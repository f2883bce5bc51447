"""Makes the package importable without torch, for `sparsekit.serving` alone."""

import sys
from types import ModuleType
from typing import Any


class _WithoutTorch(ModuleType):
    """A package whose public names, except its version, raise ImportError, as torch is missing."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("__all__", ()):
            raise ImportError(
                f"{self.__name__}.{name} needs torch, which is not installed; only "
                f"{self.__name__}.serving works without it: pip install 'torch>=2.11'"
            )
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def leave_out_what_needs_torch(package: str) -> None:
    """Make a package's public names raise ImportError when they are used."""
    sys.modules[package].__class__ = _WithoutTorch
