"""Serves trained tables: looks raw keys up in snapshots. Needs NumPy, and no torch."""

from .errors import BusyError, SnapshotError, UnknownKeyError
from .snapshot import Pinned, Request, Snapshot, TableInfo
from .writer import SnapshotWriter

__all__ = [
    "BusyError",
    "Pinned",
    "Request",
    "Snapshot",
    "SnapshotError",
    "SnapshotWriter",
    "TableInfo",
    "UnknownKeyError",
]
