"""XXH64 of values: what is hashed for which type, and the ways of columns, arrays and sequences."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sparsekit import _pybind

__all__ = ["xxh64"]

_INTEGER_DTYPES = frozenset(
    getattr(torch, sign + "int" + bits) for sign in ("", "u") for bits in ("8", "16", "32", "64")
)
# Any: an Arrow column, whose package need not be installed.
Values = Sequence[str | bytes | int | None] | np.ndarray | torch.Tensor | Any
_SINGLE_VALUES = (str, bytes, bytearray, memoryview, int, np.generic, type(None))


def xxh64(values: Values, seed: int = 0) -> torch.Tensor:
    """Hash each value to 64 bits with XXH64.

    =============  ==================================================================
    value          what is hashed
    =============  ==================================================================
    ``str``        its UTF-8 bytes
    ``bytes``      the bytes as they are, so ``"a"`` and ``b"a"`` have the same code
    ``int``        its decimal text, so ``3``, ``np.int32(3)`` and ``"3"`` have the same code
    ``None``       nothing, as for ``""``: missing values share one code
    =============  ==================================================================

    Subclasses of str and int (an ``Enum`` with str values, say) count by content, not by what
    their ``__str__`` prints. Everything else is refused: floats, whose text is a matter of taste
    (put ``None`` for a NaN that means missing), and bools.

    Args:
        values: n values as one of

            - a list, a tuple or another sequence, which may mix the types above;
            - a 1-D numpy array of an integer, ``str`` (``U`` or ``StringDType``), ``bytes`` or
              object dtype. A fixed-width one (``S`` or ``U``) does not know of NUL characters at
              the end of an item, so those are not hashed. Masked items and missing strings count
              as None;
            - a 1-D integer tensor on the CPU;
            - an Arrow column, of pyarrow or of another package that knows the Arrow PyCapsule
              interface, in one array or in chunks: strings and binary of every layout, integers,
              or a dictionary of these. Nulls count as None.

            Columns and arrays other than of objects are hashed where they lie, without a Python
            object or a copy of their text. Large inputs are hashed by up to
            ``torch.get_num_threads()`` threads; other threads of Python run meanwhile, unless it
            is a sequence or a ``StringDType``.
        seed: Which of the 2**64 hash functions, in ``[0, 2**64)``.

    Returns:
        int64 ``[n]`` on the CPU. torch computes little with unsigned 64-bit integers, so the 64
        bits are read as a signed number: a hash h of 2**63 or more comes out as ``h - 2**64``.
        ``code % 2**64`` on a Python int gives h back.

    Raises:
        TypeError: A value of another type, named with its position; an array or a column of another
            type, such as floats, timestamps or a whole table; a single value, a set, a dict or an
            iterator instead of a sequence.
        ValueError: A str with a lone surrogate or an int too long for Python to print, named with
            its position; an index without an entry in a column's dictionary; more or fewer than one
            dimension; a tensor on another device; a seed out of range.
        OSError: The chunks of a column could not be read.

    Example:
        >>> xxh64(["3", 3, "item_42", None])
        tensor([ 2744517546871237796,  2744517546871237796, -2566429626015469488,
                -1205034819632174695])
        >>> hex(xxh64(["item_42"]).item() % 2**64)
        '0xdc6235da484f3050'

    """
    seed = checked_seed(seed)
    if isinstance(values, torch.Tensor):
        values = _array_of_tensor(values)
    codes = _hash_array(values, seed) if isinstance(values, np.ndarray) else _hash(values, seed)
    return torch.from_numpy(codes)


def _hash(values: Any, seed: int) -> np.ndarray:
    if isinstance(values, _SINGLE_VALUES):
        raise TypeError(
            f"xxh64 takes a sequence of values and got a single {type(values).__name__}; "
            "put it in a list: xxh64([value])"
        )
    if isinstance(values, Mapping):
        raise TypeError(f"values must be a sequence, such as a list; got {type(values).__name__}")
    _check_dimensions(values)
    threads = torch.get_num_threads()
    # A Series of pandas over an array of numpy's; not all of those can be had through Arrow.
    if isinstance(getattr(values, "dtype", None), np.dtype) and hasattr(values, "__array__"):
        return _hash_array(np.asarray(values), seed)
    if hasattr(values, "__arrow_c_array__"):
        schema, array = values.__arrow_c_array__()
        return _pybind.xxh64_arrow(schema, array, seed, threads)
    if hasattr(values, "__arrow_c_stream__"):
        return _pybind.xxh64_arrow_stream(values.__arrow_c_stream__(), seed, threads)
    return _pybind.xxh64_many(values, seed, threads)


def _hash_array(values: np.ndarray, seed: int) -> np.ndarray:
    _check_dimensions(values)
    kind, threads = values.dtype.kind, torch.get_num_threads()
    # A masked array goes the general way: its tolist() has None where an item is masked.
    if kind in "OiuSUT" and isinstance(values, np.ma.MaskedArray):
        return _pybind.xxh64_many(values.tolist(), seed, threads)
    if kind in "iu":
        wide = np.int64 if kind == "i" else np.uint64
        return _pybind.xxh64_integers(np.ascontiguousarray(values, dtype=wide), seed, threads)
    if kind == "O":
        return _pybind.xxh64_many(values.tolist(), seed, threads)
    if kind in "SU":
        texts = np.require(values, values.dtype.newbyteorder("="), ["C", "A"])
        size = texts.itemsize // (4 if kind == "U" else 1)
        return _pybind.xxh64_fixed_width(
            texts.ctypes.data, size, kind == "U", len(texts), seed, threads
        )
    if kind == "T":
        # A str that stands for missing strings is what counts for them; else they count as None.
        stand_in = getattr(values.dtype, "na_object", None)
        missing = stand_in.encode() if isinstance(stand_in, str) else b""
        place = values.ctypes.data, values.strides[0], len(values)
        return _pybind.xxh64_numpy_strings(values.dtype, *place, missing, seed, threads)
    raise TypeError(
        f"values is an array of dtype {values.dtype}; expected integers, str, bytes or objects"
    )


def _array_of_tensor(values: torch.Tensor) -> np.ndarray:
    if values.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"values is a tensor of dtype {values.dtype}; expected integers")
    if values.device.type != "cpu":
        raise ValueError(f"values is on device {values.device}; hashing runs on the CPU: .cpu()")
    return values.numpy()


def _check_dimensions(values: Any) -> None:
    # A table of pandas is refused here too: as a sequence it would be its column names.
    dimensions = getattr(values, "ndim", 1)
    if dimensions != 1:
        raise ValueError(f"values must have one dimension, got {dimensions}")


def checked_seed(seed: int) -> int:
    """The seed as an int; TypeError or ValueError if it is none of 64 bits."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an int, got {type(seed).__name__}") from None
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return seed
