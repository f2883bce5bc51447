"""Writes and reads files of tensors in the safetensors layout, piece by piece.

A file begins with the length of its header, a little-endian uint64. The header follows; it is JSON
that maps each tensor's name to its dtype, shape and offsets. Then come the contents of the tensors,
without gaps.
See https://huggingface.co/docs/safetensors for the layout.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .checksum import Summed
from .files import PIECE, FileRecord, naming, plain_file

# Maximum size of a header in bytes. A header lists a table's states or a model's dense parameters.
MOST_HEADER = 64 << 20

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Column:
    """A tensor in a file: name, dtype, shape, and a function that yields its bytes in pieces."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]] = list

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as written in the manifest, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError with the tensor's name if a file cannot store the tensor."""
    if tensor.layout != torch.strided or hasattr(tensor, "device_mesh"):
        kind = str(tensor.layout).removeprefix("torch.")
        kind = "a distributed tensor" if kind == "strided" else f"a tensor that is {kind}"
        raise CheckpointError(f"{name}: {kind} cannot be saved here; keep a dense one")
    if tensor.is_meta:
        raise CheckpointError(f"{name}: a tensor on meta cannot be saved: it has no values")
    if tensor.dtype not in _CODES:
        listed = ", ".join(map(dtype_name, _CODES))
        raise CheckpointError(
            f"{name}: a tensor of {tensor.dtype} cannot be saved; a checkpoint has {listed}"
        )


def carried(tensor: torch.Tensor) -> np.ndarray:
    """View a CPU tensor as an array of unsigned integers of the same width and shape."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    # View as integers: NumPy has no bfloat16, and this module only moves bytes.
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    array: np.ndarray = tensor.view(same).numpy()
    return array.view(f"<u{tensor.dtype.itemsize}")


def column_of(name: str, tensor: torch.Tensor, rows: np.ndarray | None = None) -> Column:
    """Make a column from a tensor, or from some of its rows, given in ascending order."""
    count = (len(tensor) if tensor.dim() else 1) if rows is None else len(rows)
    shape = (count, *tensor.shape[1:]) if tensor.dim() else ()
    table = tensor.reshape(1) if not tensor.dim() else tensor
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    step = max(1, PIECE // max(1, row_bytes))

    def pieces() -> Iterator[np.ndarray]:
        for begin in range(0, count, step):
            if rows is None:
                part = table[begin : begin + step]
                yield carried(part.cpu())
            elif table.device.type == "cpu":
                yield carried(table)[rows[begin : begin + step]]
            else:
                chosen = torch.from_numpy(rows[begin : begin + step]).to(table.device)
                yield carried(table[chosen].cpu())

    return Column(name, tensor.dtype, shape, pieces)


def header_of(columns: Iterable[Column], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file with these columns: the header's length, and the header."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for column in columns:
        begin, end = end, end + column.nbytes
        entries[column.name] = {
            "dtype": _CODES[column.dtype],
            "shape": list(column.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(path: Path, columns: Iterable[Column], metadata: Mapping[str, str] = {}) -> FileRecord:
    """Write columns to a new file, sync it to disk, and return its record.

    Raises:
        CheckpointError: the file cannot be written, or a column yields too many or too few bytes.
    """
    columns = list(columns)
    with (
        naming(path, "cannot be written"),
        open(path, "xb", buffering=0) as file,
        Summed() as total,
    ):
        total.write(file, header_of(columns, metadata))
        for column in columns:
            expected = total.bytes + column.nbytes
            for piece in column.pieces():
                total.write(file, np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            if total.bytes != expected:
                raise CheckpointError(
                    f"{path}: {column.name} has changed while it was written: "
                    f"{total.bytes - expected:+} bytes"
                )
        os.fsync(file.fileno())
        return FileRecord(total.bytes, total.crc32())


@dataclass(frozen=True)
class Place:
    """Dtype and shape of a tensor in a file; ``begin`` is its byte offset in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class TensorFile:
    """Reads rows of the tensors in a file; nothing in the file is trusted.

    Args:
        path: a plain file, not a link.

    Raises:
        CheckpointError: the file cannot be read, or has a different format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = plain_file(path)
        try:
            self.places = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> dict[str, Place]:
        size = os.fstat(self._file.fileno()).st_size
        (length,) = struct.unpack("<Q", self._bytes(0, 8, "it"))
        if not 2 <= length <= min(size - 8, MOST_HEADER):
            raise CheckpointError(f"{self.path}: is damaged: it has no header of tensors")
        try:
            entries = json.loads(self._bytes(8, length, "its header"))
            entries.pop("__metadata__", None)
            places = {name: _place(entry, 8 + length) for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: is damaged: {error!r:.200}") from None
        end = 8 + length
        for name, place in sorted(places.items(), key=lambda item: item[1].begin):
            if place.begin != end:
                raise CheckpointError(f"{self.path}: is damaged: {name} begins at {place.begin}")
            end += math.prod(place.shape) * place.dtype.itemsize
        if end != size:
            raise CheckpointError(
                f"{self.path}: is damaged: it has {size} bytes, and its header tells of {end}"
            )
        return places

    def read(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Read rows ``[first, first + count)`` of a tensor, or the whole tensor."""
        place = self.places[name]
        shape = place.shape if count is None else (count, *place.shape[1:])
        if not (size := math.prod(shape) * place.dtype.itemsize):
            return torch.empty(shape, dtype=place.dtype)
        row_bytes = math.prod(place.shape[1:]) * place.dtype.itemsize
        room = self._bytes(place.begin + first * row_bytes, size, name)
        return torch.frombuffer(room, dtype=torch.uint8).view(place.dtype).view(shape)

    def _bytes(self, begin: int, count: int, what: str) -> bytearray:
        room = bytearray(count)
        with naming(self.path, "cannot be read"):
            self._file.seek(begin)
            if self._file.readinto(room) < count:
                raise CheckpointError(f"{self.path}: is damaged: it ends in the middle of {what}")
        return room


def _place(entry: Any, begin: int) -> Place:
    shape = entry["shape"]
    first, last = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    numbers = [first, last, *shape]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a size or place is no number >= 0: {numbers}")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{last - first} bytes for shape {shape}")
    return Place(dtype, tuple(shape), begin + first)
