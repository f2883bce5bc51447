"""Lets lookups with the host runner defer their errors, as lookups on a GPU do.

Copies to the host are replaced by stand-ins that are complete when a test decides so. Several
threads may defer errors at once: each stands for a rank, and has the reports of that rank.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import simt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sparsekit import _reports
from sparsekit.tables import reports


def _at_second_look(looks: int) -> bool:
    return looks > 0


class _Thread(threading.local):
    """Settings and reports of the current thread."""

    is_made: Callable[[int], bool] = staticmethod(_at_second_look)
    on_wait: Callable[[], None] = staticmethod(lambda: None)
    reports: Any = None


_thread = _Thread()


class Copy:
    """Stand-in for `_reports.HostCopy`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with _disable_current_modes():
            self._words = tensor.clone()
        self._looks, self._made = 0, False

    def is_made(self) -> bool:
        """Return whether the copy has been made; once True, the answer stays True."""
        self._made = self._made or _thread.is_made(self._looks)
        self._looks += 1
        return self._made

    def wait(self) -> torch.Tensor:
        """Return the words; call `on_wait` first if the copy has not been made."""
        if not self._made:
            self._made = True
            _thread.on_wait()
        return self._words


class _ReportsOfThread(dict[torch.device, _reports.Reports]):
    """Reports of the calling thread, used instead of the reports of each device."""

    def get(self, device: torch.device, default: Any = None) -> Any:
        return _thread.reports

    def setdefault(self, device: torch.device, default: Any = None) -> Any:
        self[device] = _thread.reports = default
        return default


@functools.cache
def library() -> ctypes.CDLL:
    """Return the host runner's library, used instead of the library of the CUDA kernels."""
    simt.load()
    runner = ctypes.CDLL(str(simt.LIBRARY))
    runner.sparsekit_num_errors.restype = ctypes.c_int64
    runner.sparsekit_reported_error.restype = ctypes.c_char_p
    return runner


def _forget_errors() -> None:
    """Reset the host runner's error words, which an earlier test may have set."""
    words = torch.empty(library().sparsekit_num_errors(), dtype=torch.int64)
    tables, features = (torch.empty(0, n, dtype=torch.int64) for n in (3, 9))
    torch.ops.sparsekit_simt.group_find([], [], tables, [], [], features, words)


class _Patch:
    """While any thread is in the context, replaces everything that would need a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._patch = pytest.MonkeyPatch()
            _reports.DEFERRING_DEVICES.add("cpu")
            self._patch.setattr(_reports, "_reports", _ReportsOfThread())
            for module in (_reports, reports):
                self._patch.setattr(module, "device_library", library)
            self._patch.setattr(_reports, "HostCopy", Copy)
            self._checked = library().sparsekit_set_checked(0)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _forget_errors()
                library().sparsekit_set_checked(self._checked)
                self._patch.undo()
                _reports.DEFERRING_DEVICES.remove("cpu")


_patch = _Patch()


@contextmanager
def deferred_errors(
    is_made: Callable[[int], bool] = _at_second_look, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Context in which this thread's lookups with the host runner defer their errors.

    Args:
        is_made: called when the host asks whether a copy has been made, with the number of times
            that it has asked before; returns the answer.
        on_wait: called if the host has to wait for a copy.
    """
    _thread.is_made, _thread.on_wait, _thread.reports = is_made, on_wait, None
    with _patch:
        yield
