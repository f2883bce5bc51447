"""Serves trained tables: looks raw keys up in snapshots. Needs NumPy, and no torch."""

from .errors import BusyError, SnapshotError, UnknownKeyError
from .snapshot import Pinned, Request, Snapshot, TableInfo

__all__ = [
    "BusyError",
    "Pinned",
    "Request",
    "Snapshot",
    "SnapshotError",
    "TableInfo",
    "UnknownKeyError",
]
