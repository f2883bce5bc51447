"""Keeps a snapshot up to date with the folder of a delta log."""

from __future__ import annotations

import ctypes
import threading
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

from . import _library
from .errors import BusyError


@dataclass(frozen=True)
class Progress:
    """Counts what a call of `Snapshot.refresh` has loaded.

    Attributes:
        version: the newest version, which lookups now see.
        deltas: number of versions loaded from deltas.
        rows_written: number of rows that these deltas wrote.
        rows_erased: number of rows that these deltas erased.
    """

    version: int
    deltas: int
    rows_written: int
    rows_erased: int


def follow_once(handle: ctypes.c_void_p) -> Progress:
    """Load any new versions from the folder; see `Snapshot.refresh`."""
    progress = _library.Progress()
    _library.check(_library.load().sk_follow(handle, ctypes.byref(progress)))
    return Progress(progress.version, progress.deltas, progress.rows_written, progress.rows_erased)


class Follower:
    """A thread that loads new versions until it or its snapshot is closed.

    Attributes:
        error: error from the last attempt; None if it succeeded. Pinned versions do not count as an
            error.
        busy: number of attempts that failed because versions were pinned.
    """

    def __init__(self, snapshot: Any, every: float) -> None:
        if not every > 0:
            raise ValueError(f"{snapshot.path}: every must be positive, got {every}")
        self.error: Exception | None = None
        self.busy = 0
        self._snapshot = weakref.ref(snapshot)
        self._every = every
        self._stop = threading.Event()
        self._warned = False
        name = f"follow {snapshot.path}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread is still running."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread; closing it again does nothing."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + self._every
            # A snapshot with no other references is closed by its destructor.
            if (snapshot := self._snapshot()) is None:
                return
            self._once(snapshot)
            del snapshot

    def _once(self, snapshot: Any) -> None:
        try:
            snapshot.refresh()
        except BusyError:
            self.busy += 1
        except Exception as error:
            self.error = error
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{snapshot.path}: version {snapshot.version} is still served: {error}",
                    stacklevel=2,
                )
        else:
            self.error, self._warned = None, False
