"""Writes a file and computes its CRC-32 at the same time."""

from __future__ import annotations

import contextlib
import ctypes
import io
import zlib

import numpy as np

from .task import Task

# After each run of this many bytes, ask the system to start writing them to disk, so that the final
# fsync is short.
_TO_DISK = 64 << 20
# Pieces of at least this many bytes are checksummed on another thread. For a smaller piece,
# starting the thread would take longer than the checksum.
_WORTH_A_THREAD = 1 << 16


def _begin_to_write(file: int, begin: int, count: int) -> None:
    """Ask Linux to start writing a range of the file to disk; do nothing on other systems."""
    with contextlib.suppress(AttributeError):
        ask = ctypes.CDLL(None).sync_file_range
        ask.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        ask(file, begin, count, 2)  # 2 is SYNC_FILE_RANGE_WRITE


class Summed:
    """Writes pieces to a file while another thread computes their CRC-32.

    Each piece is copied first, since training may change it in the meantime.
    """

    def __init__(self) -> None:
        self.bytes = self._begun = 0
        self._crc = 0
        self._task: Task | None = None
        # Use two buffers: one is written to the file while the other is filled.
        self._room = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def __enter__(self) -> Summed:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()  # a failed save must not leave a thread running

    def write(self, file: io.FileIO, piece: bytes | np.ndarray) -> None:
        """Write a piece: bytes, or a uint8 array [n]."""
        view = self._copied(np.frombuffer(piece, np.uint8))
        self._wait()
        if len(view) >= _WORTH_A_THREAD:
            self._task = Task(lambda: self._add(view), "sparsekit crc32", daemon=True)
            self._task.start()
        else:
            self._add(view)
        done = 0
        while done < len(view):
            done += file.write(view[done:])
        self.bytes += len(view)
        if self.bytes - self._begun >= _TO_DISK:
            _begin_to_write(file.fileno(), self._begun, self.bytes - self._begun)
            self._begun = self.bytes

    def _copied(self, piece: np.ndarray) -> memoryview:
        self._room.reverse()
        if len(self._room[0]) < len(piece):
            self._room[0] = np.empty(len(piece), np.uint8)
        room = self._room[0][: len(piece)]
        room[:] = piece
        return memoryview(room)  # type: ignore[arg-type]

    def crc32(self) -> int:
        """Return the CRC-32 of everything written so far."""
        self._wait()
        return self._crc

    def _add(self, view: memoryview) -> None:
        self._crc = zlib.crc32(view, self._crc)

    def _wait(self) -> None:
        if self._task is not None:
            self._task.wait()
            self._task = None
