"""Reads tables from ``.npz`` files (zip archives of NumPy arrays), whose contents are untrusted."""

from __future__ import annotations

import ast
import contextlib
import json
import lzma
import math
import os
import re
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ..errors import CheckpointError
from .files import plain_file
from .sources import (
    MOST_DIM,
    ForeignTable,
    Pieces,
    as_keys,
    as_vectors,
    exactly,
    here,
    rows_at_a_time,
)

# Maximum header size in bytes, as in NumPy: parsing a header takes far more memory than its text.
_MOST_HEADER = 10_000
_LENGTHS = {1: "<H", 2: "<I", 3: "<I"}
_DTYPE = re.compile(r"[<>=|]?(?:f[248]|[iu][1248])\Z")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DAMAGE = (
    ArithmeticError, EOFError, LookupError, MemoryError, NotImplementedError, OSError,
    RecursionError, RuntimeError, SyntaxError, TypeError, ValueError, lzma.LZMAError, struct.error,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class _Array:
    """Shape, dtype and memory order of an array, read from its header."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns_first: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def npz(path: Path) -> list[ForeignTable]:
    """List the tables in ``<table>.npz``.

    A file has ``vectors`` [rows, dim], and may have ``keys`` [rows]. Without keys, row i has key i.

    Args:
        path: a .npz file, or a folder of them.
    """
    files = sorted(path.glob("*.npz")) if os.path.isdir(path) else [path]
    if not files:
        raise CheckpointError(f"{path}: has no .npz file")
    return [_table(file) for file in files]


def name_note(table: str) -> bytes:
    """Return an archive comment with the table's name, since the file's name may differ."""
    return json.dumps({"table": table}).encode()


def _table(path: Path) -> ForeignTable:
    with _archive(path, "it") as archive:
        names = {each.removesuffix(".npy") for each in archive.namelist()}
        name = _noted_name(archive.comment) or path.stem
    if "vectors" not in names:
        raise CheckpointError(
            f"{path}: has {', '.join(sorted(names)[:5]) or 'nothing'}, and no vectors"
        )
    with _array(path, "vectors", "f", 2) as (_, vectors):
        rows, dim = vectors.shape
    if not 1 <= dim <= MOST_DIM:
        raise CheckpointError(f"{path}: vectors of dim {dim}")
    numbered = "keys" not in names
    if not numbered:
        with _array(path, "keys", "iu", 1) as (_, keys):
            if keys.shape != (rows,):
                raise CheckpointError(f"{path}: has {keys.shape[0]} keys and {rows} vectors")
    left = ", ".join(sorted(names - {"keys", "vectors"}))

    def pieces() -> Pieces:
        step = rows_at_a_time(dim, vectors.dtype.itemsize)
        with contextlib.ExitStack() as stack:
            # Open keys and vectors as two file objects, since they are read alternately.
            of_keys = None if numbered else stack.enter_context(_array(path, "keys", "iu", 1))
            file, array = stack.enter_context(_array(path, "vectors", "f", 2))
            blocks = (_by_columns if array.columns_first else _by_rows)(path, file, array, step)
            with contextlib.closing(blocks):
                for begin, block in zip(range(0, rows, step), blocks, strict=True):
                    numbers = torch.arange(begin, begin + len(block))
                    if of_keys is not None:
                        content = exactly(of_keys[0], len(block) * of_keys[1].dtype.itemsize, path)
                        numbers = as_keys(np.frombuffer(content, of_keys[1].dtype))
                    yield numbers, as_vectors(block)

    return ForeignTable(name, here(vectors.dtype), dim, rows, path, pieces, left, distinct=numbered)


def _noted_name(comment: bytes) -> str:
    """Return the table's name from a comment made by `name_note`, or ``""`` for other comments."""
    try:
        name = json.loads(comment)["table"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def _by_rows(path: Path, file: IO[bytes], array: _Array, step: int) -> Generator[np.ndarray]:
    rows, dim = array.shape
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        content = exactly(file, count * dim * array.dtype.itemsize, path)
        yield np.frombuffer(content, array.dtype).reshape(count, dim)


def _by_columns(path: Path, file: IO[bytes], array: _Array, step: int) -> Generator[np.ndarray]:
    """Yield the rows of an array stored by columns, after unpacking it to a temporary file."""
    with tempfile.TemporaryFile() as unpacked:
        left = array.nbytes
        while left:
            content = exactly(file, min(left, 1 << 20), path)
            try:
                left -= unpacked.write(content)
                unpacked.flush()
            except OSError as error:
                raise CheckpointError(
                    f"{path}: is stored column by column, and cannot be unpacked in "
                    f"{tempfile.gettempdir()}: {error.strerror or error}; set TMPDIR to a folder "
                    f"with room for {array.nbytes} bytes"
                ) from error
        columns = np.memmap(unpacked, array.dtype, "r", shape=array.shape[::-1])
        for begin in range(0, array.shape[0], step):
            yield columns[:, begin : begin + step].T


@contextlib.contextmanager
def _archive(path: Path, what: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive; errors name the file."""
    with plain_file(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except _DAMAGE as error:
            raise CheckpointError(f"{path}: is no .npz file: {error}") from None
        try:
            with archive:
                yield archive
        except CheckpointError:
            raise
        except _DAMAGE as error:
            raise CheckpointError(f"{path}: {what} is damaged: {error!r:.200}") from None


@contextlib.contextmanager
def _array(path: Path, name: str, kinds: str, dims: int) -> Iterator[tuple[IO[bytes], _Array]]:
    """Open an array in an archive; yield the file, positioned after the header, and the header."""
    with _archive(path, name) as archive:
        entry = archive.getinfo(f"{name}.npy")
        if entry.compress_type not in _METHODS:
            raise CheckpointError(
                f"{path}: {name} is compressed by method {entry.compress_type}; NumPy writes "
                f"{' and '.join(map(str, _METHODS))}"
            )
        with archive.open(entry) as file:
            array = _header(path, name, file, kinds, dims)
            if entry.file_size - file.tell() != array.nbytes:
                raise CheckpointError(
                    f"{path}: {name} is damaged: it has {entry.file_size - file.tell()} bytes, and "
                    f"{array.dtype} {list(array.shape)} has {array.nbytes}"
                )
            yield file, array


def _header(path: Path, name: str, file: IO[bytes], kinds: str, dims: int) -> _Array:
    start = exactly(file, 8, path)
    if start[:6] != b"\x93NUMPY" or start[6] not in _LENGTHS:
        raise CheckpointError(f"{path}: {name} is damaged: it begins with {start!r}")
    code = _LENGTHS[start[6]]
    (length,) = struct.unpack(code, exactly(file, struct.calcsize(code), path))
    if length > _MOST_HEADER:
        raise CheckpointError(f"{path}: {name} is damaged: it has a header of {length} bytes")
    values = ast.literal_eval(exactly(file, length, path).decode("latin1").strip())
    descr, shape, columns_first = (values[key] for key in ("descr", "shape", "fortran_order"))
    sizes = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or type(columns_first) is not bool:
        raise CheckpointError(f"{path}: {name} is damaged: its header is {values!r:.200}")
    known = isinstance(descr, str) and _DTYPE.match(descr)
    if not known or np.dtype(descr).kind not in kinds or len(shape) != dims:
        wanted = "floating-point numbers" if kinds == "f" else "whole numbers"
        raise CheckpointError(
            f"{path}: {name} should be {wanted} of {dims} dimension(s), and is {descr!r:.80} "
            f"{list(shape)!r:.80}"
        )
    return _Array(shape, np.dtype(descr), columns_first)
