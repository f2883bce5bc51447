"""Hashes the values in sequences, NumPy arrays, tensors and Arrow columns with XXH64."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sparsekit import _pybind

from ..ops.hash_integers import INTEGER_DTYPES, hash_integers

__all__ = ["xxh64"]

# `Any` stands for an Arrow column, whose class is unknown if no Arrow package is installed.
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

    Subclasses of str and int, such as an ``Enum`` with str values, are hashed by their content, not
    by the result of ``__str__``. All other types are refused, including bool, and float, whose text
    is not unique. Replace a NaN that stands for a missing value with ``None``.

    Args:
        values: n values as one of

            - a list, a tuple or another sequence, which may mix the types above;
            - a 1-D numpy array of an integer, ``str`` (``U`` or ``StringDType``), ``bytes`` or
              object dtype. Fixed-width arrays (``S`` or ``U``) drop NUL characters at the end of an
              item, so such characters are not hashed. Masked items and missing strings count as
              None;
            - a 1-D integer tensor, which is hashed on its device;
            - an Arrow column, as one array or in chunks, from pyarrow or another package with the
              Arrow PyCapsule interface. Its type is a string or binary type of any layout, an
              integer type, or a dictionary of these. Nulls count as None.

            Columns and arrays are hashed in place: no Python objects are created and no text is
            copied, except for arrays of objects. Large inputs are hashed by up to
            ``torch.get_num_threads()`` threads. Other Python threads can run at the same time,
            unless the input is a sequence or a ``StringDType`` array.
        seed: Seed of the hash, in ``[0, 2**64)``.

    Returns:
        int64 ``[n]``, on the same device as a tensor, otherwise on the CPU. torch supports few
        operations on unsigned 64-bit integers, so the 64 bits are interpreted as a signed number: a
        hash h of 2**63 or more becomes ``h - 2**64``. For a Python int, ``code % 2**64`` returns h.

    Raises:
        TypeError: A value has the wrong type (the message gives its position); an array or column
            has the wrong type, such as floats or timestamps, or is a whole table; or values is a
            single value, a set, a dict or an iterator instead of a sequence.
        ValueError: A str has a lone surrogate, or an int is too long for Python to print (the
            message gives the position); an index has no entry in a column's dictionary; an Arrow
            column has decreasing offsets, or offsets or views beyond its buffers (checked only for
            pyarrow, since other packages do not provide buffer sizes); the number of dimensions is
            not one; or the seed is out of range.
        OSError: The chunks of a column could not be read.

    Example:
        >>> xxh64(["3", 3, "item_42", None])
        tensor([ 2744517546871237796,  2744517546871237796, -2566429626015469488,
                -1205034819632174695])
        >>> hex(xxh64(["item_42"]).item() % 2**64)
        '0xdc6235da484f3050'

    """
    seed = checked_seed(seed)
    if isinstance(values, _SINGLE_VALUES):
        raise TypeError(
            f"xxh64 takes a sequence of values and got a single {type(values).__name__}; "
            "put it in a list: xxh64([value])"
        )
    # Convert a pandas Series to NumPy, since not every Series can be read through Arrow.
    if isinstance(getattr(values, "dtype", None), np.dtype) and hasattr(values, "__array__"):
        values = np.asanyarray(values)
    if isinstance(values, torch.Tensor) and values.dtype not in INTEGER_DTYPES:
        raise TypeError(f"values is a tensor of dtype {values.dtype}; expected integers")
    # This also refuses a pandas DataFrame: as a sequence, it would yield its column names.
    dimensions = getattr(values, "ndim", 1)
    if dimensions != 1:
        raise ValueError(f"values must have one dimension, got {dimensions}")
    if isinstance(values, torch.Tensor):
        return hash_integers(values, seed)
    if isinstance(values, np.ndarray):
        return _hash_array(values, seed)
    return torch.from_numpy(_hash(values, seed))


def _hash(values: Any, seed: int) -> np.ndarray:
    if isinstance(values, Mapping):
        raise TypeError(f"values must be a sequence, such as a list; got {type(values).__name__}")
    _check_buffers(values)
    threads = torch.get_num_threads()
    if hasattr(values, "__arrow_c_array__"):
        schema, array = values.__arrow_c_array__()
        return _pybind.xxh64_arrow(schema, array, seed, threads)
    if hasattr(values, "__arrow_c_stream__"):
        return _pybind.xxh64_arrow_stream(values.__arrow_c_stream__(), seed, threads)
    return _pybind.xxh64_many(values, seed, threads)


def _check_buffers(values: Any) -> None:
    """Raise ValueError if a pyarrow column reaches beyond its buffers.

    _pybind cannot check this, since __arrow_c_array__ does not return buffer sizes.
    """
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is None or not isinstance(values, (pyarrow.Array, pyarrow.ChunkedArray)):
        return
    first = 0
    for chunk in getattr(values, "chunks", [values]):
        try:
            chunk.validate()
        except pyarrow.ArrowException as error:
            raise ValueError(
                f"values is a malformed Arrow column from values[{first}] on: {error}"
            ) from error
        first += len(chunk)


def _hash_array(values: np.ndarray, seed: int) -> torch.Tensor:
    kind, masked = values.dtype.kind, isinstance(values, np.ma.MaskedArray)
    if kind in "iu" and not masked:
        # Copy the array if torch would refuse it (foreign byte order, negative strides) or warn
        # about it (read-only memory).
        if not (values.flags.carray and values.dtype.isnative and values.strides[0] > 0):
            values = np.array(values, values.dtype.newbyteorder("="))
        return hash_integers(torch.from_numpy(values), seed)
    threads = torch.get_num_threads()
    # Convert a masked array to a list, with None for masked items.
    if kind == "O" or (masked and kind in "iuSUT"):
        codes = _pybind.xxh64_many(values.tolist(), seed, threads)
    elif kind in "SU":
        texts = np.require(values, values.dtype.newbyteorder("="), ["C", "A"])
        size = texts.itemsize // (4 if kind == "U" else 1)
        place = texts.ctypes.data, size, kind == "U", len(texts)
        codes = _pybind.xxh64_fixed_width(*place, seed, threads)
    elif kind == "T":
        # A dtype may represent missing strings as a str. If so, hash that str; otherwise missing
        # strings count as None.
        stand_in = getattr(values.dtype, "na_object", None)
        missing = stand_in.encode() if isinstance(stand_in, str) else b""
        places = values.ctypes.data, values.strides[0], len(values)
        codes = _pybind.xxh64_numpy_strings(values.dtype, *places, missing, seed, threads)
    else:
        raise TypeError(
            f"values is an array of dtype {values.dtype}; expected integers, str, bytes or objects"
        )
    return torch.from_numpy(codes)


def checked_seed(seed: int) -> int:
    """Check that the seed is in ``[0, 2**64)``, and return it as an int."""
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an int, got {type(seed).__name__}") from None
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2**64), got {seed}")
    return seed
