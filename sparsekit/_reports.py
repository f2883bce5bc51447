"""Lets the host read a device's reports later, without waiting.

A report consists of words on the device, which are being copied to the host. If errors on the
device are deferred, the host reads the copies that have arrived whenever it starts other work, and
raises the errors in them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from ._load import device_library

# Device types with deferred errors: an op does not wait to see whether it has failed.
DEFERRING_DEVICES = {"cuda"}

# Maximum age of a report, in lookups. A lookup waits for reports of this age, so an error is raised
# at most this many lookups later.
MOST_LOOKUPS = 8


class HostCopy:
    """A copy of a device's tensor in page-locked host memory, made in stream order."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._made = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(tensor.device))

    def is_made(self) -> bool:
        """Return whether the copy is complete."""
        return self._made.query()

    def wait(self) -> torch.Tensor:
        """Wait until the copy is complete, and return it."""
        self._made.synchronize()
        return self._copy


# Reads the words of a report, and raises the error in them, if any.
Read = Callable[[torch.Tensor], None]


class Reports:
    """A device's reports that the host has not read yet, oldest first."""

    def __init__(self) -> None:
        # Reports, each with the number of lookups that had begun when it was sent.
        self._sent: deque[tuple[int, HostCopy, Read]] = deque()
        self._lookups = 0
        self._lock = threading.RLock()

    def send(self, words: torch.Tensor, read: Read) -> None:
        """Start copying a report to the host; later, `read` is called with the copy."""
        with self._lock:
            self._sent.append((self._lookups, HostCopy(words), read))

    def poll(self) -> None:
        """Begin a lookup: read reports that have arrived; wait for any that are MOST_LOOKUPS old.

        Raises:
            IndexError, RuntimeError, ValueError, TableFullError: an error from an earlier lookup.
        """
        with self._lock:
            self._lookups += 1
            while self._sent:
                begun, copy, _ = self._sent[0]
                if self._lookups - begun < MOST_LOOKUPS and not copy.is_made():
                    break
                self._read_oldest()

    def drain(self) -> None:
        """Wait for all reports, and read them.

        Raises:
            IndexError, ValueError, TableFullError: as for `poll`; later reports stay unread.
        """
        with self._lock:
            while self._sent:
                self._read_oldest()

    def _read_oldest(self) -> None:
        # Remove the report only after the wait, so that its error is not lost if the wait is
        # interrupted.
        _, copy, read = self._sent[0]
        words = copy.wait()
        try:
            read(words)
        finally:
            self._sent.popleft()


_reports: dict[torch.device, Reports] = {}


def reports_of(device: torch.device) -> Reports | None:
    """Return the reports of a device; None if ops on it raise their errors immediately.

    Ops raise errors immediately on the CPU, and on any device while `sparsekit.checked` is on.

    Raises:
        IndexError, ValueError, TableFullError: checks are on, and an earlier lookup has failed.
    """
    if device.type not in DEFERRING_DEVICES:
        return None
    reports = _reports.get(device)
    if reports is None:
        reports = _reports.setdefault(device, Reports())
    if device_library().sparsekit_checks_on():
        reports.drain()
        return None
    return reports


def errors_are_deferred(device: torch.device) -> bool:
    """Return whether errors from ops on a device are raised later, without waiting for the ops."""
    return device.type in DEFERRING_DEVICES and not device_library().sparsekit_checks_on()


def devices_in_use() -> list[torch.device]:
    """Return the devices that have had reports."""
    return list(_reports)
