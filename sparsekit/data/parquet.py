"""Reads Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .._extras import needed
from ..errors import DataFormatError
from .batch import Batch, joined
from .columns import Columns, Keys, Kind
from .parquet_file import ParquetFiles
from .reader import Chunk, Fault, OnError, Reader, Unit, list_files
from .text import Files

__all__ = ["ParquetReader"]

# Limits on row groups that are read together: total number of rows, and total uncompressed bytes.
_ROWS_TOGETHER = 1 << 15
_BYTES_TOGETHER = 8 << 20


class ParquetReader(Reader):
    """Stream Parquet files in batches, holding one row group or a few small ones in memory.

    A categorical column contains integers, strings, binary values, or lists of any of these; each
    list is a bag. A null becomes `Keys.missing`; nulls in a list are dropped. A column may be null
    throughout.
    With ``kind="int"``, integers become keys without a copy if they are int64, have no nulls and
    are not shuffled.

    Other types are converted to keys as follows. Booleans become 0 and 1. A date is hashed as text,
    such as ``2024-01-31``; with ``kind="int"``, its key is the number of days since 1970. A decimal
    is hashed as text with all digits of its scale, such as ``1.50``; with ``kind="int"``, it must
    be a whole number of at most 18 digits. In dense columns, dates become days since 1970.
    Timestamps are refused: cast them to one of these types first.

    Args:
        files: One path or several; all files have the same columns.
        batch_size: Number of rows in each batch on this rank, as with a DataLoader.
        sparse: Names of categorical columns, whose values are hashed; or a dict from names to
            `Keys`, or to a kind of keys, ``"hash"`` or ``"int"``.
        dense: Names of columns of numbers, booleans, decimals or dates.
        label: Name of the label column, which must not contain nulls.
        missing: The number that replaces a null or NaN in a dense column.
        on_error: ``"raise"``, or ``"skip"`` to skip rows that lack a label or contain an infinite
            number; `skipped` counts these rows.
        shuffle: Whether to shuffle the row groups, and the rows within each group, in every epoch.
        seed, rank, world_size: As for `CsvReader`.

    Raises:
        ImportError: pyarrow is missing (``pip install 'sparsekit-torch[data]'``).
        TypeError, ValueError: an argument is out of range, or a column is missing or has the wrong
            type.
        OSError: a file cannot be read.
        DataFormatError: a file is not Parquet, is truncated or damaged, or has been rewritten with
            other rows or columns; or a row cannot be read.

    """

    def __init__(
        self,
        files: Files,
        batch_size: int,
        *,
        sparse: Sequence[str] | Mapping[str, Keys | Kind] = (),
        dense: Sequence[str] = (),
        label: str | None = None,
        missing: float = 0.0,
        on_error: OnError = "raise",
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        name = type(self).__name__
        self.columns = Columns.of(name, label, dense, sparse)
        for column, keys in self.columns.sparse.items():
            if keys.kind == "hex" or keys.separator is not None:
                raise ValueError(
                    f"{name}: sparse[{column!r}]: kind 'hex' and separator are for text, got {keys}"
                )
        needed("pyarrow", name)
        from .arrow_columns import check_type

        paths = list_files(name, files)
        self._features = list(self.columns.sparse)
        how = _How(ParquetFiles(), self.columns, missing)
        self._groups: list[_RowGroup] = []
        for path in paths:
            shape = how.files.shape(path)
            self.columns.check_there(name, str(path), shape.schema.names)
            for column in self.columns.names():
                check_type(
                    f"{name}: {path}: column {column!r}",
                    shape.schema.field(column).type,
                    self.columns.sparse.get(column),
                )
            first = 0
            for i, (rows, size) in enumerate(zip(shape.rows, shape.sizes, strict=True)):
                self._groups.append(_RowGroup(how, path, i, first, rows, size))
                first += rows
        super().__init__(
            self._groups,
            paths,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            on_error=on_error,
            rank=rank,
            world_size=world_size,
        )

    def _pieces(self, first: int, last: int | None) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Override `Reader._pieces` to read adjacent small row groups together."""
        run: list[tuple[_RowGroup, np.ndarray]] = []
        rows = size = passed = 0
        for number in self._order(self._epoch):
            if last is not None and passed >= last:
                break
            group = self._groups[number]
            begin, end = max(first - passed, 0), group.rows if last is None else last - passed
            passed += group.rows
            if begin >= min(end, group.rows):
                continue
            rows, size = rows + group.rows, size + group.size
            if run and (
                run[0][0].path != group.path or rows > _ROWS_TOGETHER or size > _BYTES_TOGETHER
            ):
                yield from _read_together(run)
                run, rows, size = [], group.rows, group.size
            run.append((group, self._order_of_chunk(number, 0, group.rows)[begin:end]))
        if run:
            yield from _read_together(run)


@dataclass(frozen=True)
class _How:
    """Settings for reading row groups; see `ParquetReader`."""

    files: ParquetFiles
    columns: Columns
    missing: float


@dataclass(frozen=True)
class _RowGroup(Unit):
    how: _How
    path: Path
    number: int  # index of the group in the file
    first: int  # index of the group's first row in the file
    rows: int
    size: int  # size of the group in uncompressed bytes

    def count(self) -> int:
        return self.rows

    def chunks(self) -> Iterator[Chunk]:
        yield _TableChunk([self])


def _read_together(
    run: Sequence[tuple[_RowGroup, np.ndarray]],
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Read row groups from one file as a chunk; yield the chunk and the indices of rows to take."""
    groups = [group for group, _ in run]
    try:
        chunk = _TableChunk(groups)
    except DataFormatError:
        if len(run) == 1:
            raise
        # Retry one group at a time, so that all rows before a damaged group are read, and the error
        # names the damaged group.
        for one in run:
            yield from _read_together([one])
    else:
        order = [start + rows for start, (_, rows) in zip(chunk.starts, run, strict=True)]
        yield chunk, np.concatenate(order)


class _TableChunk(Chunk):
    """Row groups from one file, in memory; errors name the first group."""

    def __init__(self, groups: Sequence[_RowGroup]) -> None:
        from .arrow_columns import without_views

        path, numbers = groups[0].path, [group.number for group in groups]
        self._groups, self._how = groups, groups[0].how
        columns, place = self._how.columns.names(), f"row group {numbers[0]}"
        with self._how.files.open(path, place) as file:
            table = file.read_row_groups(numbers, columns=columns).combine_chunks()
        rows = sum(group.rows for group in groups)
        if table.num_rows != rows:
            raise DataFormatError(
                f"{path}, {place}: {table.num_rows} rows, where the file's end says {rows}"
            )
        self._table = without_views(table)
        # Index of the first row of each group.
        self.starts = np.cumsum([0, *(group.rows for group in groups[:-1])])

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def label_fault(self, row: int, reason: str) -> str:
        return self._fault(row, self._how.columns.label, reason)

    def read(self, rows: np.ndarray) -> tuple[Batch | None, list[Fault]]:
        from .arrow_columns import bags, floats

        # Consecutive rows can be sliced without a copy.
        adjacent = len(rows) > 0 and bool((np.diff(rows) == 1).all())
        table = self._table.slice(int(rows[0]), len(rows)) if adjacent else self._table.take(rows)
        faults: dict[int, str] = {}  # the last fault found in each row

        def note(column: str, bad: np.ndarray, reason: str) -> None:
            for place in np.flatnonzero(bad).tolist():
                faults[place] = self._fault(rows[place], column, reason)

        columns, label = self._how.columns, None
        if columns.label is not None:
            numbers = floats(table[columns.label], np.nan)
            note(columns.label, ~np.isfinite(numbers), "not a finite number")
            label = torch.from_numpy(numbers)
        dense = np.empty((len(rows), len(columns.dense)), np.float32)
        for i, name in enumerate(columns.dense):
            dense[:, i] = floats(table[name], self._how.missing)
            note(name, np.isinf(dense[:, i]), "an infinite number")
        if faults:
            return None, list(faults.items())
        pieces = [bags(table[name], keys) for name, keys in columns.sparse.items()]
        return Batch(label, torch.from_numpy(dense), joined(list(columns.sparse), pieces)), []

    def _fault(self, row: int, column: str | None, reason: str) -> str:
        """Return a message with the file, the row number (from 1), the column and the reason."""
        which = int(np.searchsorted(self.starts, row, "right")) - 1
        group = self._groups[which]
        number = group.first + row - self.starts[which] + 1
        return f"{group.path}, row {number}, column {column!r}: {reason}"
