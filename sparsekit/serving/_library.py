"""Loads libsparsekit_serving.so, and turns its status codes into exceptions."""

from __future__ import annotations

import ctypes
import functools
import struct
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

from .errors import BusyError, SnapshotError, UnknownKeyError

ABI_VERSION = 1
LIBRARY = Path(__file__).parents[1] / "lib" / "libsparsekit_serving.so"
# Names in the order of the enums in sparsekit_serving.h.
ROW_FORMATS = ("float32", "float16", "bfloat16", "int8", "int4")
MISSES = ("initial", "zeros", "fallback", "error")
COMBINERS = ("sum", "mean", "sqrtn", "none", "max")

_OSERROR, _DAMAGED, _NEWER, _UNKNOWN_KEY, _NO_MEMORY, _GAP, _BUSY = range(2, 9)
_ERRORS: dict[int, type[Exception]] = {
    _OSERROR: OSError,
    _DAMAGED: SnapshotError,
    _NEWER: SnapshotError,
    _UNKNOWN_KEY: UnknownKeyError,
    _NO_MEMORY: MemoryError,
    _GAP: SnapshotError,
    _BUSY: BusyError,
}


class _Sized(ctypes.Structure):
    """Base class of structs that begin with their size; fills in the size."""

    def __init__(self, **fields: object) -> None:
        super().__init__(size=ctypes.sizeof(self), **fields)


class OpenOptions(_Sized):
    """The struct sk_open_options."""

    _fields_ = [
        ("size", c_size_t),
        ("verify", ctypes.c_int),
        ("prefault", ctypes.c_int),
        ("lock", ctypes.c_int),
        ("copy", ctypes.c_int),
    ]


class Info(_Sized):
    """The struct sk_info."""

    _fields_ = [
        ("size", c_size_t),
        ("log_id", c_uint64),
        ("version", c_uint64),
        ("dense_version", c_uint64),
        ("step", c_int64),
        ("written_at", c_int64),
        ("tables", c_int32),
    ]


class TableInfo(_Sized):
    """The struct sk_table_info."""

    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("rows", c_int64),
        ("dim", c_int32),
        ("row_bytes", c_int32),
        ("row_format", c_int32),
        ("miss", c_int32),
        ("combiner", c_int32),
        ("has_padding_key", c_int32),
        ("padding_key", c_int64),
    ]


class Pin(ctypes.Structure):
    """The struct sk_pin."""

    _fields_ = [("version", c_uint64), ("dense_version", c_uint64), ("internal", c_uint64 * 2)]


class Feature(_Sized):
    """The struct sk_feature."""

    _fields_ = [
        ("size", c_size_t),
        ("table", c_int32),
        ("combiner", c_int32),
        ("keys", c_void_p),
        ("num_keys", c_int64),
        ("offsets", c_void_p),
        ("num_bags", c_int64),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("found", c_void_p),
    ]


class Progress(_Sized):
    """The struct sk_progress."""

    _fields_ = [
        ("size", c_size_t),
        ("version", c_uint64),
        ("deltas", c_int64),
        ("rows_written", c_int64),
        ("rows_erased", c_int64),
    ]


# The fields of Feature; packing them all at once is faster than setting each.
FEATURE = struct.Struct("@NiiPqPqPPqP")


# Argument types of the functions, which all return an sk_status.
_ARGUMENTS = {
    "sk_open": [c_char_p, POINTER(OpenOptions), POINTER(c_void_p)],
    "sk_close": [c_void_p],
    "sk_describe": [c_void_p, POINTER(Info)],
    "sk_describe_table": [c_void_p, c_int32, POINTER(TableInfo)],
    "sk_find_table": [c_void_p, c_char_p, POINTER(c_int32)],
    "sk_pin_newest": [c_void_p, POINTER(Pin)],
    "sk_unpin": [c_void_p, POINTER(Pin)],
    "sk_lookup": [c_void_p, POINTER(Pin), POINTER(Feature), c_int32],
    "sk_time_lookups": [c_void_p, POINTER(Feature), c_int32, c_int64, c_void_p],
    "sk_follow": [c_void_p, POINTER(Progress)],
    "sk_apply": [c_void_p, POINTER(c_char_p), c_int32, POINTER(Progress)],
    "sk_top_k": [
        *(c_void_p, POINTER(Pin), c_int32, c_void_p, c_int32),
        *(c_void_p, c_void_p, POINTER(c_int32)),
    ],
}


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library. Calls to its functions release the interpreter's lock.

    Raises:
        ImportError: the library does not exist, cannot be loaded, or is the wrong version.
    """
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"sparsekit's compiled library {LIBRARY} does not load: {error}. In a source tree run "
            f"`make build`; otherwise reinstall sparsekit-torch"
        ) from error
    if (found := library.sk_abi_version()) != ABI_VERSION:
        raise ImportError(f"{LIBRARY} has the ABI version {found}, not {ABI_VERSION}")
    library.sk_message.restype = c_char_p
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    return library


def check(status: int) -> None:
    """Raise the exception for a status other than SK_OK, with the library's message."""
    if status:
        message = load().sk_message().decode(errors="replace")
        raise _ERRORS.get(status, ValueError)(message)
