"""Serves trained tables: looks raw keys up in snapshots. Needs NumPy, and no torch.

`export_module` and `export_checkpoint`, which write snapshots of what torch has trained, need it.
"""

from typing import TYPE_CHECKING, Any

from .errors import BusyError, SnapshotError, UnknownKeyError
from .request import Request, TableInfo
from .snapshot import Pinned, Snapshot
from .writer import SnapshotWriter

if TYPE_CHECKING:
    from .export import export_checkpoint, export_module

__all__ = [
    "BusyError",
    "Pinned",
    "Request",
    "Snapshot",
    "SnapshotError",
    "SnapshotWriter",
    "TableInfo",
    "UnknownKeyError",
    "export_checkpoint",
    "export_module",
]


def __getattr__(name: str) -> Any:
    if name in ("export_checkpoint", "export_module"):
        from . import export  # imports torch

        return getattr(export, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
