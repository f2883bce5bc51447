"""Serves trained tables: looks raw keys up in snapshots. Needs NumPy, but not torch.

Only `export_module`, `export_checkpoint` and `DeltaLog`, which write trained tables, need torch.
"""

from typing import TYPE_CHECKING, Any

from .errors import BusyError, LogError, SnapshotError, UnknownKeyError
from .log_folder import compact
from .request import Request, TableInfo
from .snapshot import Pinned, Snapshot
from .writer import SnapshotWriter

if TYPE_CHECKING:
    from .delta_log import DeltaLog
    from .export import export_checkpoint, export_module

__all__ = [
    "BusyError",
    "DeltaLog",
    "LogError",
    "Pinned",
    "Request",
    "Snapshot",
    "SnapshotError",
    "SnapshotWriter",
    "TableInfo",
    "UnknownKeyError",
    "compact",
    "export_checkpoint",
    "export_module",
]


def __getattr__(name: str) -> Any:
    if name in ("export_checkpoint", "export_module"):
        from . import export  # imports torch

        return getattr(export, name)
    if name == "DeltaLog":
        from .delta_log import DeltaLog

        return DeltaLog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
