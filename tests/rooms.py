"""Lets tables on the host runner grow as they do on a GPU, whose driver has a stand-in.

    with on_device():
        layer = sparsekit.Embedding(None, 8)
        layer(keys)

Tensors of tables that grow lie in rooms (`sparsekit.device_rooms`), in memory of the CPU. Access to
a row without memory ends the process. New memory is full of garbage until it is zeroed.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import deferred_errors
import pytest
import simt

from sparsekit import device_rooms


def _library() -> ctypes.CDLL:
    library = deferred_errors.library()
    library.sparsekit_simt_limit_memory.argtypes = [ctypes.c_int64]
    library.sparsekit_simt_limit_memory.restype = ctypes.c_int64
    library.sparsekit_simt_num_rooms.restype = ctypes.c_int64
    return library


def memory_in_use() -> int:
    """Return the number of bytes that rooms have."""
    return _library().sparsekit_simt_limit_memory(2**62)


def num_rooms() -> int:
    """Return the number of rooms."""
    return _library().sparsekit_simt_num_rooms()


@contextmanager
def memory_of(more: int) -> Iterator[None]:
    """Context in which the device has memory for this number of bytes more."""
    _library().sparsekit_simt_limit_memory(memory_in_use() + more)
    try:
        yield
    finally:
        _library().sparsekit_simt_limit_memory(2**62)


@contextmanager
def rooms() -> Iterator[None]:
    """Context in which tensors that grow lie in rooms."""
    device_rooms.DEVICES.add("cpu")  # other modules have this set too
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_rooms, "device_library", deferred_errors.library)
            yield
    finally:
        device_rooms.DEVICES.remove("cpu")


@contextmanager
def on_device(
    is_made: Callable[[int], bool] = lambda looks: looks > 0,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Context in which this thread's tables and lookups are those of a GPU.

    The arguments are those of `deferred_errors`.
    """
    with rooms(), simt.SimtMode(), deferred_errors.deferred_errors(is_made, on_wait):
        yield
