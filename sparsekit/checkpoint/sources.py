"""Reads tables saved by other libraries, piece by piece; nothing in their files is trusted.

SOK is HugeCTR's sparse_operation_kit. The layout of its version 2 is defined in its file
``dump_load.py``.
"""

from __future__ import annotations

import functools
import os
import re
import string
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .files import PIECE, naming, plain_file, size_of

_SOK2_DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f2", "<f4", "<f8")
_SOK2_HEAD = 296
MOST_DIM = 2**24
_VECTOR_DTYPES = (torch.float32, torch.float64, torch.bfloat16)

# Yields pieces of a table: keys int64 [n], vectors [n, dim].
Pieces = Generator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ForeignTable:
    """A table saved by another library, which can be read piece by piece.

    Attributes:
        name: name of the table.
        dtype: dtype of the vectors after the import.
        dim: number of elements in a vector.
        rows: number of rows.
        path: path of the file, for errors.
        pieces: yields pieces: keys int64 ``[n]``, vectors ``[n, dim]``. Can be called repeatedly.
        left: description of the data in the file that is not imported; may be empty.
        distinct: true if keys are row indices, so that no key can occur twice.
    """

    name: str
    dtype: torch.dtype
    dim: int
    rows: int
    path: Path
    pieces: Callable[[], Pieces]
    left: str = ""
    distinct: bool = False


def rows_at_a_time(dim: int, itemsize: int) -> int:
    """Return the number of rows to read in one piece."""
    return max(1, PIECE // (8 + dim * itemsize))  # bytes in a row and its key


def as_keys(keys: np.ndarray) -> torch.Tensor:
    """Convert keys to int64; unsigned 64-bit keys are reinterpreted as signed ones."""
    return torch.from_numpy(keys.astype(np.int64))


def as_vectors(values: np.ndarray) -> torch.Tensor:
    """Convert vectors to the native byte order and to C order; float16 becomes float32."""
    dtype = np.dtype(np.float32) if values.itemsize < 4 else values.dtype.newbyteorder("=")
    return torch.from_numpy(values.astype(dtype, order="C"))


def here(dtype: np.dtype[Any]) -> torch.dtype:
    """Return the torch dtype that `as_vectors` converts this dtype to."""
    return torch.float64 if dtype.itemsize == 8 else torch.float32


def exactly(file: Any, count: int, path: Path) -> bytes:
    """Read exactly ``count`` bytes.

    Raises:
        CheckpointError: the file has fewer bytes left, or cannot be read.
    """
    with naming(path, "cannot be read"):
        content: bytes = file.read(count)
    if len(content) != count:
        raise CheckpointError(f"{path}: is damaged: it ends {count - len(content)} bytes too early")
    return content


def _raw_pieces(
    keys_path: Path, key_dtype: np.dtype[Any], values_path: Path, dtype: np.dtype[Any],
    dim: int, rows: int, head: int,
) -> Pieces:  # fmt: skip
    """Read keys and vectors from two files of raw numbers; skip the headers."""
    step = rows_at_a_time(dim, dtype.itemsize)
    with plain_file(keys_path) as keys, plain_file(values_path) as values:
        keys.seek(head)
        values.seek(head)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            some = np.frombuffer(exactly(keys, count * key_dtype.itemsize, keys_path), key_dtype)
            content = exactly(values, count * dim * dtype.itemsize, values_path)
            vectors = np.frombuffer(content, dtype).reshape(count, dim)
            yield as_keys(some), as_vectors(vectors)


def sok1(path: Path, dims: dict[str, int]) -> list[ForeignTable]:
    """List the variables in ``<variable>_keys.file`` and ``<variable>_values.file`` (float32).

    The files record neither the size of a key nor dim, so the caller must pass dim. 4-byte keys are
    uint32.

    Args:
        path: folder of the files.
        dims: dim of each variable, by name; the entry ``""`` applies to all variables not listed.
    """
    found = []
    for keys_path in sorted(path.glob("*_keys.file")):
        name = keys_path.name.removesuffix("_keys.file")
        values_path = path / f"{name}_values.file"
        dim = dims.get(name, dims.get("", 0))
        if dim < 1:
            raise CheckpointError(
                f"{values_path}: files of SOK 1 do not tell how long a vector is; give --dim, or "
                f"--dim {name}=N"
            )
        key_bytes, value_bytes = size_of(keys_path), size_of(values_path)
        rows, rest = divmod(value_bytes, 4 * dim)
        width = key_bytes / rows if rows else 8
        if rest or width not in (4, 8) or (not rows and key_bytes):
            raise CheckpointError(
                f"{values_path}: {value_bytes} bytes are no float32 vectors of dim {dim} for the "
                f"{key_bytes} bytes of {keys_path.name}, which are uint32 or int64"
            )
        key_dtype = np.dtype("<u4" if width == 4 else "<i8")

        pieces = functools.partial(
            _raw_pieces, keys_path, key_dtype, values_path, np.dtype("<f4"), dim, rows, 0
        )
        found.append(ForeignTable(name, torch.float32, dim, rows, keys_path, pieces))
    if not found:
        raise CheckpointError(f"{path}: has no *_keys.file, as a dump of SOK 1 has")
    return found


def sok2(path: Path) -> list[ForeignTable]:
    """List the tables in ``meta_info``, each stored in ``<table>-key`` and ``<table>-weight``.

    Args:
        path: folder of the files.
    """
    meta = path / "meta_info"
    with plain_file(meta) as file:
        (count,) = struct.unpack(">I", exactly(file, 4, meta))
        if os.fstat(file.fileno()).st_size != 4 + count * 308:
            raise CheckpointError(f"{meta}: is damaged: its size is not that of {count} tables")
        key_types, value_types, dims = (
            struct.unpack(f">{count}I", exactly(file, 4 * count, meta)) for _ in range(3)
        )
        sizes = struct.unpack(f">{count}Q", exactly(file, 8 * count, meta))
        names = [_text(exactly(file, 256, meta), meta) for _ in range(count)]
        kinds = [_text(exactly(file, 32, meta), meta) for _ in range(count)]
    return [
        _sok2_table(path, meta, *facts)
        for facts in zip(names, key_types, value_types, dims, sizes, kinds, strict=True)
    ]


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: is damaged: {content[:40]!r} is no text") from None


def _sok2_table(
    path: Path, meta: Path, name: str, key_type: int, value_type: int, dim: int, rows: int,
    optimizer: str,
) -> ForeignTable:  # fmt: skip
    stem = name.translate(str.maketrans(string.punctuation, "_" * len(string.punctuation)))
    known = key_type <= 3 and 4 <= value_type <= 6 and 1 <= dim <= MOST_DIM
    if not known or not stem.isprintable():
        raise CheckpointError(
            f"{meta}: is damaged: table {name!r:.80} has key type {key_type}, value type "
            f"{value_type}, dim {dim}"
        )
    keys_path, values_path = path / f"{stem}-key", path / f"{stem}-weight"
    key_dtype, dtype = (np.dtype(_SOK2_DTYPES[each]) for each in (key_type, value_type))
    for kind, each in enumerate((keys_path, values_path)):
        with plain_file(each) as file:
            head = exactly(file, _SOK2_HEAD, each)
            size = os.fstat(file.fileno()).st_size - _SOK2_HEAD
        written_kind, written_type = (struct.unpack(">I", head[i : i + 4])[0] for i in (256, 292))
        if _text(head[:256], each) != name or written_kind != kind:
            raise CheckpointError(f"{each}: is damaged: its head is of another file")
        if written_type != (key_type, value_type)[kind]:
            raise CheckpointError(f"{each}: is of type {written_type}, and not as {meta} says")
        if kind == 0 and key_type == 2 and size == 8 * rows:
            key_dtype = np.dtype("<u8")  # some versions write uint32 keys as uint64
        expected = rows * (key_dtype.itemsize if kind == 0 else dim * dtype.itemsize)
        if size != expected:
            raise CheckpointError(
                f"{each}: is damaged: it has {size} bytes behind its head, and {rows} rows have "
                f"{expected}"
            )

    def pieces() -> Pieces:
        return _raw_pieces(keys_path, key_dtype, values_path, dtype, dim, rows, _SOK2_HEAD)

    begins = f"{stem}-{optimizer}-"  # not a glob pattern, since the name may contain wildcards
    states = sorted(each for each in os.listdir(path) if each.startswith(begins))
    left = f"states of {optimizer}: {', '.join(states)}" if states else ""
    return ForeignTable(re.sub(r":0\Z", "", name), here(dtype), dim, rows, keys_path, pieces, left)


def torchrec(path: Path) -> list[ForeignTable]:
    """List the tables of an EmbeddingBagCollection or EmbeddingCollection saved by ``torch.save``.

    Row i of a table is key i. Only tensors are read from the pickle.

    Args:
        path: the saved file.
    """
    size_of(path)  # raises for links and missing files
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip or the file system may raise anything
        text = str(error).splitlines()[0][:200] if str(error) else repr(error)
        raise CheckpointError(
            f"{path}: is no state dict of plain tensors: {text}; save a sharded model's state "
            f"after gathering it"
        ) from None
    tables: dict[str, torch.Tensor] = {}
    for name, tensor in state.items() if isinstance(state, dict) else ():
        match = re.fullmatch(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight", str(name))
        if match is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
            raise CheckpointError(f"{path}: {name} is no matrix")
        if not 1 <= tensor.shape[1] <= MOST_DIM:
            raise CheckpointError(f"{path}: {name} has vectors of dim {tensor.shape[1]}")
        if not tensor.is_floating_point() or tensor.layout != torch.strided or tensor.is_meta:
            where = "" if tensor.device.type == "cpu" else f", on {tensor.device}"
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, {tensor.layout}{where}")
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{path}: {name} says that it has {tensor.nbytes} bytes, and there are "
                f"{tensor.untyped_storage().nbytes()} (saved after expand?)"
            )
        if match[1] in tables:
            raise CheckpointError(f"{path}: has two tables {match[1]}")
        tables[match[1]] = tensor
    if not tables:
        raise CheckpointError(f"{path}: has no *.embedding_bags.<table>.weight")
    return [_torchrec_table(path, name, tensor) for name, tensor in tables.items()]


def _torchrec_table(path: Path, name: str, tensor: torch.Tensor) -> ForeignTable:
    rows, dim = tensor.shape
    dtype = tensor.dtype if tensor.dtype in _VECTOR_DTYPES else torch.float32
    step = rows_at_a_time(dim, tensor.dtype.itemsize)

    def pieces() -> Pieces:
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield torch.arange(begin, end), tensor[begin:end].to(dtype)

    return ForeignTable(name, dtype, dim, rows, path, pieces, distinct=True)
