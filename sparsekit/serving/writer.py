"""Writes snapshots: files with tables of trained vectors, which servers map into memory."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from . import encoding
from .draft import Draft
from .format import (
    BUCKET,
    COMBINERS,
    DISTRIBUTIONS,
    FIRST_FALLBACK,
    FORMAT_VERSION,
    MISSES,
    MOST_DIM,
    MOST_NAME_BYTES,
    MOST_ROWS,
    MOST_TABLES,
    PAGE,
    SNAPSHOT_HEADER,
    SNAPSHOT_MAGIC,
    TABLE_RECORD,
    page_after,
)

# Size in bytes of the float32 vectors encoded at a time.
_PIECE = 8 << 20


class SnapshotWriter:
    """Writes a snapshot, table by table and piece by piece; only keys are kept in memory.

    The file gets its name once it is complete and on the disk. It may replace an older snapshot:
    processes that have the older one open continue to read it. Use the writer in a ``with``
    statement, whose end finishes the file or, after an error, removes what has been written::

        with SnapshotWriter("model.sks") as snapshot:
            users = snapshot.table("user", 64, rows="int8", miss="zeros")
            for keys, vectors in pieces:
                users.append(keys, vectors)

    Args:
        path: name of the file.
        log_id: ID of the delta log that the snapshot belongs to, an unsigned 64-bit integer; 0 if
            none.
        version: sequence number of the last delta that the snapshot includes; 0 if none.
        dense_version: the trainer's number for the dense part that belongs to it.
        step: training step; None if unknown.
        written_at: time of the version, in nanoseconds since 1970 UTC; None for now.
        note: text that says where the snapshot comes from.

    Raises:
        FileExistsError: there is something other than a snapshot at the path.
        OSError: the file cannot be created; the error names it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        log_id: int = 0,
        version: int = 0,
        dense_version: int = 0,
        step: int | None = None,
        written_at: int | None = None,
        note: str = "",
    ) -> None:
        self.path = Path(path)
        self._tables: list[TableWriter] = []
        self._filling: TableWriter | None = None
        self._note = note.encode("utf-8", "backslashreplace")
        self._end = 0  # end of what has been written; 0 before the first rows
        self._header = np.zeros((), SNAPSHOT_HEADER)
        for name, number in (("log_id", log_id), ("version", version)):
            self._header[name] = number
        self._header["dense_version"] = dense_version
        self._header["step"] = -1 if step is None else step
        self._header["written_at"] = time.time_ns() if written_at is None else written_at
        _refuse_other_files(self.path)
        self._draft = Draft(self.path)

    def table(
        self,
        name: str,
        dim: int,
        *,
        rows: str = "float32",
        miss: str = "zeros",
        initializer: tuple[str, float, float] = ("constant", 0.0, 0.0),
        seed: int = 0,
        fallbacks: int = 0,
        combiner: str = "sum",
        padding_key: int | None = None,
        index_seed: int | None = None,
    ) -> TableWriter:
        """Add a table. Add all tables before any has rows, then fill them one by one.

        Args:
            name: name of the table.
            dim: number of elements in a vector.
            rows: format of rows: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or
                ``"int4"``.
            miss: how lookups treat a key without a row: ``"initial"``, its initial vector in
                training; ``"zeros"``; ``"fallback"``, one of the rows that unknown keys share; or
                ``"error"``.
            initializer: for ``miss="initial"``: ``"constant"`` with a value, ``"uniform"`` with low
                and high, or ``"normal"`` with mean and standard deviation.
            seed: seed of initial vectors, a 64-bit integer.
            fallbacks: for ``miss="fallback"``: number n of rows that unknown keys share. These rows
                must be appended to the table with the n smallest int64 numbers as their keys.
            combiner: how the layer pools: ``"sum"``, ``"mean"``, ``"sqrtn"``, ``"max"``, or
                ``"none"``. A hint for readers.
            padding_key: key that lookups leave out; None if there is none.
            index_seed: seed of the index's hash function; None draws a random seed, so that no
                client can choose keys that collide.

        Raises:
            ValueError: an argument is out of range, or there is already a table with this name.
            RuntimeError: a table already has rows.
        """
        where = f"{self.path}: table {name}"
        if self._end:
            raise RuntimeError(f"{where}: add all tables before any has rows")
        if any(table.name == name for table in self._tables):
            raise ValueError(f"{where}: there are two tables of this name")
        text = name.encode("utf-8", "replace")
        if text.decode() != name or "\0" in name:
            raise ValueError(f"{where}: the name must be UTF-8 without zeros, got {name!r}")
        for argument, value, most in (
            ("dim", dim, MOST_DIM),
            ("the name's number of bytes", len(text), MOST_NAME_BYTES),
            ("the number of tables", len(self._tables) + 1, MOST_TABLES),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"{where}: {argument} must be in [1, {most}], got {value}")
        if (miss == "fallback") != (fallbacks > 0):
            raise ValueError(f"{where}: miss={miss!r} cannot have fallbacks={fallbacks}")
        if fallbacks > MOST_ROWS:
            raise ValueError(f"{where}: fallbacks must be <= {MOST_ROWS}, got {fallbacks}")
        distribution, a, b = initializer
        record = np.zeros((), TABLE_RECORD)
        record["row_format"] = encoding.row_format(where, rows)
        for field, word, words in (
            ("miss", miss, MISSES),
            ("combiner", combiner, COMBINERS),
            ("distribution", distribution, DISTRIBUTIONS),
        ):
            if word not in words:
                listed = ", ".join(words)
                raise ValueError(f"{where}: {field} must be one of {listed}; got {word!r}")
            record[field] = words.index(word)
        if not max(abs(a), abs(b)) <= float(np.finfo(np.float32).max):
            raise ValueError(f"{where}: initializer must have finite numbers, got {initializer}")
        record["name_bytes"], record["dim"] = len(text), dim
        record["row_bytes"] = encoding.row_bytes(rows, dim)
        record["initial_seed"], record["a"], record["b"] = seed % 2**64, a, b
        record["num_fallbacks"] = fallbacks
        record["has_padding_key"] = padding_key is not None
        record["padding_key"] = padding_key or 0
        drawn = secrets.randbits(64) - 2**63
        record["index_seed"] = drawn if index_seed is None else index_seed
        table = TableWriter(self, name, rows, record)
        self._tables.append(table)
        return table

    def finish(self) -> None:
        """Write the rest, sync the file to disk, and give it its name.

        Raises:
            ValueError: a key occurs twice, or a fallback row is missing.
            OSError: the disk is full, for example; the error names the file.
        """
        self._begin()
        for table in self._tables:
            table.close()
        names = [table.name.encode() for table in self._tables]
        records = np.array([table.record for table in self._tables], TABLE_RECORD)
        offset = PAGE + records.nbytes
        for record, text in zip(records, names, strict=True):
            record["name_offset"] = offset
            offset += len(text)
        directory = b"".join([records.tobytes(), *names, self._note])
        header = self._header
        header["magic"], header["format_version"] = SNAPSHOT_MAGIC, FORMAT_VERSION
        header["num_tables"], header["file_bytes"] = len(records), self._end
        header["directory_bytes"] = len(directory)
        header["note_offset"], header["note_bytes"] = offset, len(self._note)
        header["directory_crc"] = encoding.crc32(directory)
        header["crc"] = encoding.crc32(header.tobytes()[:-4])  # crc is the last field
        draft = self._draft
        with draft.naming():
            os.ftruncate(draft.file.fileno(), self._end)
            draft.file.seek(0)
        draft.write(header.tobytes() + directory)
        draft.publish()

    def abandon(self) -> None:
        """Remove what has been written. Does nothing after `finish`."""
        self._draft.end()

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.abandon()

    def _begin(self) -> None:
        """Leave room for the header and the directory, whose sizes are now known."""
        if not self._end:
            names = sum(int(table.record["name_bytes"]) for table in self._tables)
            directory = TABLE_RECORD.itemsize * len(self._tables) + names + len(self._note)
            self._end = page_after(PAGE + directory)

    def _begin_rows(self, table: TableWriter) -> int:
        """Let a table write rows from now on; return the file offset for the first row."""
        self._begin()
        if self._filling is not None:
            self._filling.close()
        self._filling = table
        with self._draft.naming():
            self._draft.file.seek(self._end)
        return self._end

    def _write_rows(self, rows: np.ndarray) -> None:
        self._draft.write(rows.data)
        self._end += rows.nbytes

    def _write_index(self, keys: np.ndarray, seed: int, num_buckets: int) -> tuple[int, int]:
        """Write the index of the rows just written; return its offset and its CRC-32."""
        offset = page_after(self._end)
        size = num_buckets * BUCKET.itemsize
        file = self._draft.file.fileno()
        before = offset % mmap.ALLOCATIONGRANULARITY
        with self._draft.naming():
            # If the disk is full, raise an error here; otherwise writing to the mapping would kill
            # the process.
            os.posix_fallocate(file, offset, size)
            pages = mmap.mmap(file, before + size, offset=offset - before)
        # Do not unmap here: an error's traceback may still refer to the mapping.
        buckets = np.frombuffer(pages, np.uint8, size, before)
        encoding.build_index(keys, seed, buckets)
        self._end = page_after(offset + size)
        return offset, encoding.crc32(buckets)


class TableWriter:
    """Writes the rows of a table; see `SnapshotWriter.table`.

    Attributes:
        name: name of the table.
        rows: format of rows.
        dim: number of elements in a vector.
        record: the table's entry in the directory, complete after `close`.
    """

    def __init__(self, snapshot: SnapshotWriter, name: str, rows: str, record: np.ndarray) -> None:
        self.name, self.rows, self.record = name, rows, record
        self.dim = int(record["dim"])
        self._snapshot = snapshot
        self._where = f"{snapshot.path}: table {name}"
        self._keys: list[np.ndarray] | None = []
        self._begun = False
        self._count = self._crc = 0

    def append(self, keys: npt.ArrayLike, vectors: npt.ArrayLike) -> None:
        """Append rows.

        Args:
            keys: int64 or int32 ``[n]``; no key may occur twice in a table.
            vectors: ``[n, dim]``, float32, or converted to it.

        Raises:
            TypeError, ValueError: an argument has the wrong dtype or shape, or the format cannot
                hold a vector; the message names its key.
            RuntimeError: the table is complete.
            OSError: the disk is full, for example.
        """
        keys, vectors = self._checked_keys(keys), np.asarray(vectors)
        if vectors.shape != (len(keys), self.dim) or vectors.dtype.kind != "f":
            raise ValueError(
                f"{self._where}: vectors must be floats [{len(keys)}, {self.dim}], got "
                f"{vectors.dtype} {list(vectors.shape)}"
            )
        for part in _pieces(len(keys), 4 * self.dim):
            try:
                rows = encoding.encode_rows(vectors[part], self.rows)
            except encoding.RowError as error:
                key = keys[part][error.row]
                raise ValueError(f"{self._where}: key {key} {error.reason}") from None
            self._append(keys[part], rows)

    def append_encoded(self, keys: npt.ArrayLike, rows: np.ndarray) -> None:
        """Append rows in the table's format, uint8 ``[n, row_bytes]``; see `append`."""
        keys, wanted = self._checked_keys(keys), int(self.record["row_bytes"])
        if rows.dtype != np.uint8 or rows.shape != (len(keys), wanted):
            raise ValueError(
                f"{self._where}: encoded rows must be uint8 [{len(keys)}, {wanted}], got "
                f"{rows.dtype} {list(rows.shape)}"
            )
        for part in _pieces(len(keys), wanted):
            self._append(keys[part], np.ascontiguousarray(rows[part]))

    def close(self) -> None:
        """Write the index. A table is closed when another begins, or when the snapshot is finished.

        Raises:
            ValueError: a key occurs twice, or a fallback row is missing.
            OSError: the disk is full, for example; the error names the file.
        """
        if self._keys is None:
            return
        if not self._begun:
            self._begin()
        keys = np.concatenate([np.empty(0, np.int64), *self._keys])
        self._keys = None
        record, count = self.record, int(self.record["num_fallbacks"])
        shared = np.sort(keys[keys < FIRST_FALLBACK + count]) if count else keys[:0]
        expected = np.arange(count, dtype=np.int64) + FIRST_FALLBACK
        if missing := sorted(set(expected.tolist()) - set(shared.tolist())):
            raise ValueError(f"{self._where}: key {missing[0]}, a fallback row, has no row")
        buckets = encoding.num_buckets(len(keys))
        try:
            place = self._snapshot._write_index(keys, int(record["index_seed"]), buckets)
        except ValueError as error:
            raise ValueError(f"{self._where}: {error}") from None
        record["num_rows"], record["num_buckets"] = len(keys), buckets
        record["index_offset"], record["index_crc"] = place
        record["rows_crc"] = self._crc

    def _begin(self) -> None:
        self._begun = True
        self.record["rows_offset"] = self._snapshot._begin_rows(self)

    def _checked_keys(self, keys: npt.ArrayLike) -> np.ndarray:
        array = np.asarray(keys)
        if array.dtype not in (np.int64, np.int32) or array.ndim != 1:
            raise TypeError(
                f"{self._where}: keys must be int64 or int32 [n], got {array.dtype} "
                f"{list(array.shape)}"
            )
        return array.astype(np.int64)

    def _append(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Append a piece of rows, contiguous uint8 ``[n, row_bytes]``."""
        if self._keys is None:
            raise RuntimeError(f"{self._where}: is complete; fill tables one after the other")
        if not self._begun:
            self._begin()
        if self._count + len(keys) > MOST_ROWS:
            raise ValueError(f"{self._where}: has more than {MOST_ROWS} rows")
        self._snapshot._write_rows(rows)
        self._crc = encoding.crc32(rows, self._crc)
        self._keys.append(keys)
        self._count += len(keys)


def _pieces(count: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, _PIECE // row_bytes)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _refuse_other_files(path: Path) -> None:
    """Raise FileExistsError if there is something other than a snapshot at a path."""
    if not os.path.lexists(path):
        return
    magic = b""
    if path.is_file():
        with open(path, "rb") as file:
            magic = file.read(len(SNAPSHOT_MAGIC))
    if magic != SNAPSHOT_MAGIC:
        raise FileExistsError(
            f"{path}: there is something already that is no snapshot, and is not replaced"
        )
