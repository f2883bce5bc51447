"""A reader of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import DataFormatError
from ..hashing import xxh64
from .batch import Batch, KeyedJaggedTensor
from .columns import Columns, Keys, Kind
from .reader import Chunk, Fault, OnError, Reader, Unit, list_files
from .text import Files

__all__ = ["ParquetReader"]


class ParquetReader(Reader):
    """Stream Parquet files in batches, a row group in memory at a time.

    A categorical column has integers, strings or binary, or lists of these, whose items are the
    keys of a bag. Integers of ``kind="int"`` become keys where they lie, without a copy, if they
    are int64, without nulls and not shuffled. Nulls are `Keys.missing`, in a list nothing.

    Args:
        files: One path or several, with the same columns.
        batch_size: Rows in a batch.
        sparse: Names of categorical columns, whose values are hashed; or name -> `Keys` or its
            kind, of ``"hash"`` and ``"int"``.
        dense: Names of columns of numbers or booleans.
        label: Name of the column of labels, which must not be null.
        missing: The number of a null or NaN in a dense column.
        on_error: ``"raise"``, or ``"skip"`` to leave out rows without a label or with an infinite
            number; `skipped` counts them.
        shuffle: Another order in each epoch: row groups and, within each, its rows.
        seed: Of that order.
        rank: Which share of the rows is read; None: that of torch.distributed, if it is there.
        world_size: Of how many shares.

    Raises:
        ImportError: pyarrow is missing (``pip install sparsekit[data]``).
        TypeError, ValueError: an argument out of its range, or a column that is not there or of
            another type.
        OSError: a file cannot be read.
        DataFormatError: no Parquet file, or a truncated or damaged one; a row that cannot be read.

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
        paths = list_files(name, files)
        self._features = list(self.columns.sparse)
        units: list[Unit] = []
        for path in paths:
            groups, schema = look_at(path)
            self.columns.check_there(name, str(path), schema.names)
            for column in self.columns.names():
                self._check_type(f"{name}: {path}: column {column!r}", schema, column)
            first = np.cumsum([0, *groups])
            units += [
                _RowGroup(path, i, int(first[i]), rows, self.columns, missing)
                for i, rows in enumerate(groups)
            ]
        super().__init__(
            units,
            paths,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            on_error=on_error,
            rank=rank,
            world_size=world_size,
        )

    def _check_type(self, place: str, schema: Any, column: str) -> None:
        """Raise ValueError where a column has another type than its use wants."""
        from pyarrow import types

        kind = schema.field(column).type
        number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        if column not in self.columns.sparse:
            if not number:
                raise ValueError(f"{place} must have numbers or booleans, but has {kind}")
            return
        item = kind.value_type if _is_list(kind) or types.is_dictionary(kind) else kind
        if _is_list(kind) and types.is_dictionary(item):
            item = item.value_type
        text = (
            types.is_string(item)
            or types.is_large_string(item)
            or types.is_binary(item)
            or types.is_large_binary(item)
            or types.is_string_view(item)
            or types.is_binary_view(item)
            or types.is_fixed_size_binary(item)
        )
        hashed = self.columns.sparse[column].kind == "hash"
        if not types.is_integer(item) and not (hashed and text):
            wanted = "integers, strings or binary" if hashed else "integers for kind 'int'"
            raise ValueError(f"{place} must have {wanted}, or lists of them, but has {kind}")


def look_at(path: Path) -> tuple[list[int], Any]:
    """Rows of each row group, and the schema."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("ParquetReader needs pyarrow: pip install sparsekit[data]") from error
    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            return groups, file.schema_arrow
    except (pyarrow.ArrowException, OSError) as error:
        raise DataFormatError(f"{path}: {error}") from error


class _RowGroup(Unit):
    def __init__(
        self, path: Path, group: int, first: int, rows: int, columns: Columns, missing: float
    ) -> None:
        self._path, self._group, self._first, self._rows = path, group, first, rows
        self._columns, self._missing = columns, missing

    def count(self) -> int:
        return self._rows

    def chunks(self) -> Iterator[Chunk]:
        import pyarrow
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self._path) as file:
                table = file.read_row_group(self._group, columns=self._columns.names())
        # What a damaged page leads to is not always an error of Arrow's own.
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataFormatError(f"{self._path}, row group {self._group}: {error}") from error
        if table.num_rows != self._rows:
            raise DataFormatError(
                f"{self._path}, row group {self._group}: {table.num_rows} rows, where the file's "
                f"end says {self._rows}"
            )
        yield _TableChunk(self, table.combine_chunks())

    def convert(self, table: Any, rows: np.ndarray) -> tuple[Batch | None, list[Fault]]:
        """A batch of a table that has the rows of these numbers."""
        faults: list[Fault] = []
        label = None
        if (name := self._columns.label) is not None:
            label = _floats(table[name], np.nan)
            self._note(faults, rows, name, ~np.isfinite(label), "not a finite number")
        dense = np.empty((len(rows), len(self._columns.dense)), np.float32)
        for i, name in enumerate(self._columns.dense):
            dense[:, i] = _floats(table[name], self._missing)
            self._note(faults, rows, name, np.isinf(dense[:, i]), "an infinite number")
        if faults:
            return None, list({place: (place, text) for place, text in faults}.values())
        bags = [self._bags(table[name], keys) for name, keys in self._columns.sparse.items()]
        offsets = torch.zeros(len(bags) * len(rows) + 1, dtype=torch.int64)
        if bags:
            torch.cumsum(torch.cat([lengths for _, lengths in bags]), 0, out=offsets[1:])
        values = [values for values, _ in bags]
        # One column stays where it lies.
        flat = values[0] if len(values) == 1 else torch.cat(values) if values else offsets[:0]
        keys = KeyedJaggedTensor(list(self._columns.sparse), flat, offsets)
        return Batch(
            None if label is None else torch.from_numpy(label), torch.from_numpy(dense), keys
        ), []

    def _note(
        self, faults: list[Fault], rows: np.ndarray, name: str, bad: np.ndarray, reason: str
    ) -> None:
        for place in np.flatnonzero(bad).tolist():
            number = self._first + int(rows[place]) + 1
            faults.append((place, f"{self._path}, row {number}, column {name!r}: {reason}"))

    def _bags(self, column: Any, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of all bags, and how many each has."""
        from pyarrow import compute

        column = _one_array(column)
        if _is_list(column.type):
            lengths = torch.from_numpy(
                compute.fill_null(compute.list_value_length(column), 0).to_numpy(False).astype("q")
            )
            items = column.flatten()
            if items.null_count:
                ends = torch.cumsum(lengths, 0)
                there = np.concatenate([[0], np.cumsum(items.is_valid().to_numpy(False))])
                lengths = torch.from_numpy(there[ends.numpy()] - there[(ends - lengths).numpy()])
                items = items.drop_null()
            empty = lengths == 0
            values = _keys(items, keys)
        else:
            valid = torch.from_numpy(column.is_valid().to_numpy(False).astype(bool))
            lengths, empty = valid.long(), ~valid
            values = _keys(column.drop_null() if column.null_count else column, keys)
        if keys.missing is None or not empty.any():
            return values, lengths
        places = (torch.cumsum(lengths, 0) - lengths)[empty].numpy()
        filled = np.insert(values.numpy(), places, keys.missing)
        return torch.from_numpy(filled), lengths + empty


class _TableChunk(Chunk):
    def __init__(self, group: _RowGroup, table: Any) -> None:
        self._group, self._table = group, table

    def __len__(self) -> int:
        return self._table.num_rows

    def read(self, rows: np.ndarray) -> tuple[Batch | None, list[Fault]]:
        # A slice copies nothing.
        if len(rows) and (np.diff(rows) == 1).all():
            return self._group.convert(self._table.slice(int(rows[0]), len(rows)), rows)
        return self._group.convert(self._table.take(rows), rows)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _one_array(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    combined = column.combine_chunks()
    return combined.combine_chunks() if hasattr(combined, "num_chunks") else combined


def _floats(column: Any, missing: float) -> np.ndarray:
    """float32 of its own, with `missing` for null and NaN."""
    from pyarrow import compute, float32

    column = compute.cast(column, float32(), safe=False)
    numbers = np.array(column.to_numpy(), np.float32)
    numbers[np.isnan(numbers)] = missing
    return numbers


def _keys(items: Any, keys: Keys) -> torch.Tensor:
    """int64 of an Arrow array without nulls."""
    from pyarrow import int64, types

    if keys.kind == "hash":
        return xxh64(items, keys.seed)
    if types.is_dictionary(items.type):
        items = items.dictionary_decode()
    if types.is_uint64(items.type):
        items = items.view(int64())
    if not types.is_int64(items.type):
        items = items.cast(int64())
    return (
        torch.utils.dlpack.from_dlpack(items) if len(items) else torch.empty(0, dtype=torch.int64)
    )
