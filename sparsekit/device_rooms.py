"""Keeps growing tensors in rooms: device address ranges with memory mapped only at the start.

A room reserves addresses for all rows that a table may ever have. Memory is mapped as the table
grows, so tensors keep their addresses. Access to a row without memory is an illegal memory access.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

from ._load import device_library

# Device types where growing tensors are kept in rooms.
DEVICES = {"cuda"}

# Smaller tensors are allocated normally, since a room takes at least one 2 MiB page.
_LEAST_BYTES = 2 << 20

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_new_capsule.restype = ctypes.py_object


def new_zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, rows: int
) -> torch.Tensor:
    """Return zeros with memory for only the first rows; small tensors have memory for all rows.

    Args:
        shape: sizes of the dimensions.
        dtype: dtype of the elements.
        device: one of `DEVICES`, with an index.
        rows: number of rows with memory; `commit` adds more.

    Raises:
        RuntimeError: there is not enough memory or address space.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST_BYTES:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    first = size // shape[0] * rows
    made = _taken("sparsekit_new_room", size, first, device.index or 0, _stream(device))
    return made.view(dtype).view(tuple(shape))


def commit(tensor: torch.Tensor, rows: int) -> None:
    """Map memory for the first rows of a tensor, if it is in a room; new memory is zeroed.

    The zeros are written on the current stream.

    Args:
        tensor: a tensor whose rows do not overlap.
        rows: number of rows.

    Raises:
        RuntimeError: there is not enough memory, or a graph is being captured.
    """
    if not is_in_room(tensor):
        return
    begin = tensor.untyped_storage().data_ptr()
    size = rows * tensor.stride(0) * tensor.itemsize
    _call("sparsekit_commit_room", begin, size, _stream(tensor.device))


def is_in_room(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in a room."""
    return _committed(tensor) >= 0


def rows_with_memory(tensor: torch.Tensor) -> int:
    """Return how many leading rows are backed by memory; all if the tensor is not in a room."""
    committed = _committed(tensor)
    if committed < 0:
        return len(tensor)
    width = tensor.stride(0)
    rows = committed // (width * tensor.itemsize) - tensor.storage_offset() // width
    return min(max(rows, 0), len(tensor))


def first_rows(tensor: torch.Tensor, rows: int, spaces: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the first rows of a tensor in a room, in a storage that ends after them.

    Args:
        tensor: the tensor.
        rows: number of rows, at least 1, all of which have memory.
        spaces: storages of earlier results, by address; reused for this one if possible.
    """
    begin = tensor.untyped_storage().data_ptr()
    if begin not in spaces:
        size = rows * tensor.stride(0) * tensor.itemsize
        spaces[begin] = _taken("sparsekit_room_tensor", begin, size).view(tensor.dtype)
    return spaces[begin].as_strided(
        (rows, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset()
    )


def _committed(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor's room are backed by memory; -1 if it has no room."""
    if tensor.device.type not in DEVICES or tensor.layout != torch.strided:
        return -1
    if type(tensor.data) is not torch.Tensor:  # such as a FakeTensor, which has no address
        return -1
    function = device_library().sparsekit_committed
    function.argtypes, function.restype = [ctypes.c_ulonglong], ctypes.c_int64
    return int(function(tensor.untyped_storage().data_ptr()))


def _stream(device: torch.device) -> int | None:
    """Return the handle of torch's current stream; None for the host runner."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _taken(name: str, *arguments: int | None) -> torch.Tensor:
    """Call a library function that makes a tensor of bytes, and return the tensor."""
    made = ctypes.c_void_p()
    _call(name, *arguments, ctypes.byref(made))
    return from_dlpack(_new_capsule(made, b"dltensor", None))


_TYPES = {
    "sparsekit_new_room": [
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ],
    "sparsekit_room_tensor": [ctypes.c_ulonglong, ctypes.c_int64, ctypes.c_void_p],
    "sparsekit_commit_room": [ctypes.c_ulonglong, ctypes.c_int64, ctypes.c_void_p],
}


def _call(name: str, *arguments: object) -> None:
    """Call a library function; raise RuntimeError with the message that it returns, if any."""
    function = getattr(device_library(), name)
    function.argtypes, function.restype = _TYPES[name], ctypes.c_char_p
    message = function(*arguments)
    if message is not None and b"out of memory" in message and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # torch may be caching memory that no tensor uses
        message = function(*arguments)
    if message is not None:
        raise RuntimeError(f"sparsekit: {message.decode()}")
