"""Keeps the rows of a table in an unnamed file that is mapped into memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .memory import MappedMemory, mapped, parts_written, total_bytes, untouched_zeros

# A column of the file: the shape of one of its rows, and its dtype.
Column = tuple[Sequence[int], torch.dtype]

_PAGE = mmap.PAGESIZE
_PAGES_AT_A_TIME = 1 << 12  # pages that the clock algorithm checks at a time
_ALIGNMENT = 8  # each record begins at a multiple of this number of bytes
# States of a page: not in memory; in memory, but not asked for since the clock algorithm last
# passed; in memory, and asked for since then.
_GONE, _OLD, _ASKED = range(3)
_ROWS_AT_A_TIME = 1 << 16  # rows to copy at a time
_NO_PAGES = np.empty(0, np.int64)

# Flags for Linux's fallocate and sync_file_range, which Python does not define.
_PUNCH_HOLE = 0x02 | 0x01  # keeps the size of the file
_WAIT, _WRITE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def _function(name: str, *types: Any) -> Any:
    """Return a function from the C library; None if it is missing, as it may be outside Linux."""
    if found := getattr(_libc, name, None):
        found.argtypes = types
    return found


_int64 = ctypes.c_int64
_fallocate = _function("fallocate64", ctypes.c_int, ctypes.c_int, _int64, _int64)
_sync_range = _function("sync_file_range", ctypes.c_int, _int64, _int64, ctypes.c_uint)
_mincore = _function("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class _File(MappedMemory):
    """A file of records, mapped in full; only its first records have disk space."""

    fd: int
    table: tuple[str, str]  # the table's name, and the folder for its files
    record_bytes: int
    allocated: int = 0

    def allocate(self, rows: int) -> None:
        """Allocate disk space for the first records, so that writing to them cannot fail."""
        begin, end = self.allocated * self.record_bytes, rows * self.record_bytes
        if end <= begin:
            return
        try:
            os.posix_fallocate(self.fd, begin, end - begin)
        except OSError:
            first = -(-begin // _PAGE) * _PAGE  # the previous page may also hold earlier rows
            if end > first:
                _fallocate(self.fd, _PUNCH_HOLE, first, end - first)
            raise
        self.allocated = rows

    def zero(self, tensor: torch.Tensor) -> None:
        """Fill rows with zeros; they keep their disk space."""
        for part in self.parts_written(tensor):
            tensor[part].zero_()

    def parts_written(self, tensor: torch.Tensor) -> Iterator[slice]:
        """Yield ranges of a tensor's rows in which vectors or states have been written to."""
        origin = (tensor.data_ptr() - self.address) // self.record_bytes
        count = min(len(tensor), self.allocated - origin)
        for begin, end in self.bytes_written(origin * self.record_bytes):
            first = max(0, begin // self.record_bytes - origin)
            if first >= count:
                return
            yield slice(first, min(count, -(-end // self.record_bytes) - origin))

    def bytes_written(self, begin: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the bounds of each written part of the file, from `begin` on."""
        while True:
            try:
                begin = os.lseek(self.fd, begin, os.SEEK_DATA)
                end = os.lseek(self.fd, begin, os.SEEK_HOLE)
            except OSError:  # no more data
                return
            yield begin, end
            begin = end

    def first_rows(
        self, tensor: torch.Tensor, rows: int, spaces: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return a copy of the first rows of a tensor, in a file of their own if possible."""
        shape = rows, *tensor.shape[1:]
        try:
            copy = RowFiles(*self.table, rows).zeros(shape, tensor.dtype)
        except OSError:  # the folder is gone, or the disk is full
            copy = torch.empty(shape, dtype=tensor.dtype, device="cpu")
        return copy.copy_(tensor[:rows])

    def bytes_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the offset and length, in bytes, of pages `first` to `end` - 1."""
        return first * _PAGE, min(end * _PAGE, len(self)) - first * _PAGE

    def leave(self, rows: slice) -> None:
        """Write rows to the disk, and drop them from memory."""
        first = rows.start * self.record_bytes // _PAGE
        end = -(-rows.stop * self.record_bytes // _PAGE)
        self.begin_writing(first, end)
        self.wait()
        self.drop(first, end)

    def begin_writing(self, first: int, end: int) -> None:
        """Start writing pages to the disk; the system handles errors by retrying."""
        _sync_range(self.fd, *self.bytes_of(first, end), _WRITE)

    def wait(self) -> None:
        """Wait for the writes that `begin_writing` started."""
        _sync_range(self.fd, 0, 0, _WAIT)

    def drop(self, first: int, end: int) -> None:
        """Drop written pages from memory."""
        at = self.bytes_of(first, end)
        self.madvise(mmap.MADV_DONTNEED, *at)
        os.posix_fadvise(self.fd, *at, os.POSIX_FADV_DONTNEED)


class RowFiles:
    """The file that holds a table's rows: one record per row, with its vector and its states.

    The file has no name. It cannot be mistaken for a checkpoint or removed, two jobs never use the
    same one, and its space is freed when the process ends, even if it is killed.

    Rows asked for together are read from the disk together. Above a limit, pages that have not been
    asked for lately are dropped from memory, chosen by the clock algorithm (F. J. Corbato, "A
    paging experiment with the Multics system", 1968).

    Args:
        name: name of the table, for error messages.
        folder: where to create the file.
        capacity: number of rows.
        max_resident_bytes: the limit; None means half of the system's memory.
    """

    def __init__(
        self, name: str, folder: str, capacity: int, max_resident_bytes: int | None = None
    ) -> None:
        self.name, self.folder = name, folder
        self.max_resident_bytes = max_resident_bytes
        self._capacity, self._allocated = capacity, 0
        self._main: weakref.ref[_File] | None = None  # the weight's file
        # All files with records of the table; states may be in older files than the weight.
        self._files: weakref.WeakSet[_File] = weakref.WeakSet()
        self._states: dict[str, torch.Tensor] = {}  # columns that no state uses yet
        self._known = np.empty(0, np.uint8)  # state of each page
        self._resident = self._hand = 0  # number of pages in memory; next page to look at
        self._leaving = _NO_PAGES  # pages being written

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.name, self.folder, self._capacity, self.max_resident_bytes
        return _with_space, (self._allocated, *made)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in a file of their own; raise OSError if there is no space for it."""
        return self._new_file(shape[0], shape[0], {"": (shape[1:], dtype)})[0][""]

    def vectors(self, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new table's weight, zeros ``[capacity, dim]``; raise OSError like `zeros`."""
        return self._new_main({"": ((dim,), dtype)})

    def states(
        self, weight: torch.Tensor, columns: Mapping[str, Column]
    ) -> dict[str, torch.Tensor]:
        """Return new states for a weight, all zeros, in the same records as its vectors.

        Args:
            weight: the weight; it may move to new memory.
            columns: shape of a row and dtype of each state, by name.

        Raises:
            OSError: the disk has no space for larger records; the weight is unchanged.
            RuntimeError: the weight was made in inference mode.
        """
        self.prepare(weight, columns)
        states, self._states = self._states, {}
        return states

    def prepare(self, weight: torch.Tensor, columns: Mapping[str, Column]) -> None:
        """Make room for states next to a weight's rows, which move to new memory; see `states`.

        This is best done while the table is small, since all vectors are copied.
        """
        there = {name: (tuple(t.shape[1:]), t.dtype) for name, t in self._states.items()}
        wanted = {name: (tuple(shape), dtype) for name, (shape, dtype) in columns.items()}
        file = self._file()  # after an interrupt, this may be another file
        here = file is not None and weight.untyped_storage().data_ptr() == file.address
        if here and there == wanted:
            return
        if weight.is_inference():
            raise RuntimeError(
                f"{self.name}: the layer was made in inference mode, and rows in files "
                f"(storage='mmap:{self.folder}') could not be trained; make it outside"
            )
        made, file = self._lay_out({"": (weight.shape[1:], weight.dtype), **columns}, weight)
        weight.data = made.pop("")
        self._take(file, made)

    def _new_main(self, columns: Mapping[str, Column], rows: torch.Tensor | None = None) -> Any:
        """Create a one-column file, make it the weight's file, and return its column."""
        made, file = self._lay_out(columns, rows)
        self._take(file, {})
        return made[""]

    def _lay_out(
        self, columns: Mapping[str, Column], before: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], _File]:
        """Make a file, copy the vectors in `before` to it, and return its columns and the file."""
        made, file = self._new_file(self._capacity, self._allocated, columns)
        self._files.add(file)
        if before is not None:
            before = before.detach()[: self._allocated]
            for rows in parts_written(before):
                for first in range(rows.start, rows.stop, _ROWS_AT_A_TIME):
                    part = slice(first, min(first + _ROWS_AT_A_TIME, rows.stop))
                    made[""][part] = before[part]
                    file.leave(part)
        return made, file

    def _take(self, file: _File, states: dict[str, torch.Tensor]) -> None:
        """Make `file` the weight's file; `states` are its columns for future states."""
        pages = -(-len(file) // _PAGE)
        self._known = untouched_zeros([pages], torch.uint8, "cpu", first=1).numpy()
        self._resident = self._hand = 0
        self._leaving = _NO_PAGES
        self._states, self._main = states, weakref.ref(file)

    def _new_file(
        self, rows: int, allocated: int, columns: Mapping[str, Column]
    ) -> tuple[dict[str, torch.Tensor], _File]:
        """Return the columns of a new file with `rows` records, and the file itself."""
        begins, end = [], 0
        for shape, dtype in columns.values():
            end = -(-end // dtype.itemsize) * dtype.itemsize
            begins.append(end)
            end += math.prod(shape) * dtype.itemsize
        record = max(1, -(-end // _ALIGNMENT)) * _ALIGNMENT
        try:
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as made:
                size = max(1, rows) * record
                os.ftruncate(made.fileno(), size)
                file = _File(made.fileno(), size)
                file.fd, file.record_bytes = os.dup(made.fileno()), record
                file.table = self.name, self.folder
                weakref.finalize(file, os.close, file.fd)
            file.madvise(mmap.MADV_RANDOM)  # else a read would also load adjacent pages
            file.allocate(allocated)
        except OSError as error:
            raise self._refused(error, allocated, record) from None
        tensors = {}
        for (name, (shape, dtype)), begin in zip(columns.items(), begins, strict=True):
            flat = mapped(file, [size // dtype.itemsize], dtype)
            inner = torch.empty(tuple(shape), device="meta").stride()
            strides = record // dtype.itemsize, *inner
            tensors[name] = flat.as_strided((rows, *shape), strides, begin // dtype.itemsize)
        return tensors, file

    def holding(self, rows: torch.Tensor) -> torch.Tensor:
        """Create a weight as `vectors` does; copy those of `rows` that have disk space into it."""
        return self._new_main({"": (rows.shape[1:], rows.dtype)}, rows)

    def allocate(self, rows: int) -> None:
        """Allocate disk space for the first rows.

        Raises:
            OSError: the disk is full; rows that already had space keep it.
        """
        files = list(self._files)
        try:
            for file in files:
                file.allocate(rows)
        except OSError as error:
            record_bytes = sum(file.record_bytes for file in files)
            raise self._refused(error, rows, record_bytes) from None
        self._allocated = max(self._allocated, rows)

    def _refused(self, error: OSError, rows: int, row_bytes: int) -> OSError:
        told = f"storage='mmap:{self.folder}' for {rows:,} rows of {row_bytes:,} bytes"
        return OSError(error.errno, f"{self.name}: {told}: {os.strerror(error.errno or 0)}")

    def ask_for(self, rows: torch.Tensor) -> None:
        """Start reading rows from the disk; if too many are in memory, drop others.

        Args:
            rows: int32 or int64, any shape; -1 stands for no row.
        """
        if (file := self._file()) is None:
            return
        numbers = rows.detach().numpy().reshape(-1)
        begins = numbers[numbers >= 0].astype(np.int64) * file.record_bytes
        firsts, lasts = begins // _PAGE, (begins + (file.record_bytes - 1)) // _PAGE
        most_of_record = (file.record_bytes - 2) // _PAGE + 2
        asked = np.concatenate([np.minimum(firsts + k, lasts) for k in range(most_of_record)])
        gone = self._known[asked] == _GONE
        absent = np.unique(asked[gone])
        most = self._most_pages() - len(absent)
        if self._resident + len(self._leaving) > most:
            self._known[asked[~gone]] = _ASKED  # so that other pages are dropped first
            self._drop(file, most - most // 64)
            absent = np.unique(asked[self._known[asked] == _GONE])
        self._known[asked] = _ASKED
        self._resident += len(absent)
        for first, end in _runs(absent):
            file.madvise(mmap.MADV_WILLNEED, *file.bytes_of(first, end))

    def have_passed(self) -> None:
        """Record that all rows are being read, so any of them may be loaded into memory."""
        file = self._file()
        for begin, end in () if file is None else file.bytes_written():
            known = self._known[begin // _PAGE : -(-end // _PAGE)]
            known[known == _GONE] = _OLD
        self._resident = int(np.count_nonzero(self._known))

    @property
    def record_bytes(self) -> int:
        """Size of a record in bytes; 0 before there is a file."""
        return 0 if (file := self._file()) is None else file.record_bytes

    def resident_bytes(self) -> int:
        """Return the total size of the file's pages that are in memory."""
        if (file := self._file()) is None:
            return 0
        pages = np.zeros(-(-len(file) // _PAGE), np.uint8)
        if _mincore(file.address, len(file), pages.ctypes.data):
            raise OSError(ctypes.get_errno(), "mincore")
        return int((pages & 1).sum()) * _PAGE

    def _file(self) -> _File | None:
        """Return the weight's file."""
        file = None if self._main is None else self._main()
        if file is None and (others := list(self._files)):
            file = others[0]  # an interrupt came before the weight got a new file
            self._take(file, {})
        return file

    def _most_pages(self) -> int:
        """Return the maximum number of pages to keep in memory."""
        most = total_bytes() // 2 if self.max_resident_bytes is None else self.max_resident_bytes
        return max(1, most // _PAGE)

    def _drop(self, file: _File, most: int) -> None:
        """Drop pages until at most `most` are left, beginning with those not recently asked for.

        This call only starts writing them to the disk; the next call removes them from memory, so
        no step has to wait.
        """
        file.wait()
        for first, end in _runs(self._leaving[self._known[self._leaving] == _GONE]):
            file.drop(first, end)
        self._leaving = _NO_PAGES
        pages = -(-self._allocated * file.record_bytes // _PAGE)
        for _ in range(2 * (pages // _PAGES_AT_A_TIME + 1) + 1):
            if self._resident <= most:
                return
            begin = self._hand if self._hand < pages else 0
            if begin == 0:  # count again, in case an earlier call was interrupted
                self._resident = int(np.count_nonzero(self._known))
            known = self._known[begin : min(begin + _PAGES_AT_A_TIME, pages)]
            old = np.flatnonzero(known == _OLD)[: self._resident - most]
            if 0 < len(old) == self._resident - most:  # the clock's hand stops here
                known = known[: old[-1] + 1]
            known[known == _ASKED], known[old] = _OLD, _GONE
            self._resident -= len(old)
            self._hand = begin + len(known)
            leaving = begin + old
            for first, end in _runs(leaving):
                file.begin_writing(first, end)
            self._leaving = np.concatenate([self._leaving, leaving])


def _with_space(rows: int, *made: Any) -> RowFiles:
    files = RowFiles(*made)
    files.allocate(rows)
    return files


def _runs(numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield each run of consecutive numbers as its first number and its last number + 1."""
    if len(numbers):
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        firsts, ends = numbers[[0, *breaks]], numbers[[*(breaks - 1), -1]] + 1
        yield from zip(firsts.tolist(), ends.tolist(), strict=True)
