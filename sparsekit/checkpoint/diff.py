"""Compares two checkpoints."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..tables.hash_table import HashTable
from .files import naming
from .folder import chain, resolved
from .manifest import DENSE, Table
from .reshard import OnProgress, live_pieces, verify
from .table_files import Chain, columns_of, parts_of
from .tensor_file import Place, TensorFile, carried

# A row's location is one integer: the low bits hold the row's index, the others the file's index.
_ROW_BITS = 40
# Maximum number of memory maps at a time. Each keeps a file open, and the number of open files is
# limited.
_MOST_MAPS = 32


@dataclass
class TableDifference:
    """Differences between a table in checkpoint A and the same table in checkpoint B.

    Attributes:
        same: number of keys in both A and B whose vectors, scores and states are equal, bit for
            bit.
        only_a: number of keys that are in A but not in B.
        only_b: number of keys that are in B but not in A.
        changed: for each column (``vectors``, ``scores`` or a state): the number of rows that
            differ in it, and the largest absolute difference (nan if any difference is nan).
        shape: a difference that makes the rows incomparable, such as "dim 8 and 16"; empty if there
            is none.
    """

    same: int = 0
    only_a: int = 0
    only_b: int = 0
    changed: dict[str, tuple[int, float]] = field(default_factory=dict)
    shape: str = ""

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.changed or self.shape)


@dataclass
class Difference:
    """Differences between two checkpoints, A and B; falsy if there are none.

    Attributes:
        only_a: names of tables and dense tensors that are in A but not in B.
        only_b: names of tables and dense tensors that are in B but not in A.
        tables: the differences of each table that is in both A and B, by the table's name.
        dense: names of the dense tensors that differ, including tensors of optimizers.
    """

    only_a: list[str]
    only_b: list[str]
    tables: dict[str, TableDifference]
    dense: list[str]

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.dense or any(self.tables.values()))


def diff(
    a: str | os.PathLike[str], b: str | os.PathLike[str], on_progress: OnProgress = lambda _: None
) -> Difference:
    """Compare the tables (key by key) and dense tensors of two checkpoints.

    Rows are read from each checkpoint's whole chain. A key may be on different ranks in A and B.
    The comparison takes about 30 bytes of memory per row.

    Args:
        a: a checkpoint, or a folder whose latest checkpoint is used. Both checkpoints are verified
            first.
        b: the other checkpoint, or a folder of checkpoints.
        on_progress: called with the size in bytes of each file that has been verified.

    Raises:
        CheckpointError: a checkpoint is damaged; the message names the file.
    """
    a, b = resolved(a), resolved(b)
    for path in (a, b):
        verify(path, on_progress)
    chains = chain(a), chain(b)
    ours, theirs = (links[-1][1].tables for links in chains)
    with TensorFile(a / DENSE) as one, TensorFile(b / DENSE) as other:
        shared = one.places.keys() & other.places.keys()
        dense = sorted(name for name in shared if not _equal(one, other, name))
        names = ({*ours, *one.places}, {*theirs, *other.places})
    return Difference(
        only_a=sorted(names[0] - names[1]),
        only_b=sorted(names[1] - names[0]),
        tables={name: _table(*chains, name) for name in ours if name in theirs},
        dense=dense,
    )


def _equal(one: TensorFile, other: TensorFile, name: str) -> bool:
    a, b = one.places[name], other.places[name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(np.array_equal(carried(one.read(name)), carried(other.read(name))))


def _table(ours: Chain, theirs: Chain, name: str) -> TableDifference:
    a, b = (links[-1][1].tables[name] for links in (ours, theirs))
    for what in ("dim", "dtype", "states", "score_kind"):
        if getattr(a, what) != getattr(b, what):
            return TableDifference(shape=f"{what} {getattr(a, what)} and {getattr(b, what)}")
    found = TableDifference()
    names = [column.name for column in columns_of(a, 0) if column.name != "keys"]
    shared = 0
    with (
        contextlib.closing(_Rows(parts_of(ours, name))) as known,
        live_pieces(parts_of(theirs, name)) as pieces,
    ):
        for file, begin, keys, kept in pieces:
            rows = known.table.find(keys[kept])
            both = (rows >= 0).nonzero().squeeze(1)
            shared += len(both)
            found.only_b += len(kept) - len(both)
            if not len(both):
                continue
            same = torch.ones(len(both), dtype=torch.bool)
            for column in names:
                values = file.read(column, begin, len(keys))[kept[both]]
                same &= _compare(found, column, known.gather(column, rows[both], values), values)
            found.same += int(same.sum())
    found.only_a = len(known.at) - shared
    return found


def _compare(
    found: TableDifference, column: str, ours: torch.Tensor, theirs: torch.Tensor
) -> torch.Tensor:
    """Record the differences in a column; return a mask of the equal rows."""
    differs = torch.from_numpy(
        (carried(ours) != carried(theirs)).reshape(len(ours), -1).any(axis=1)
    )
    if differs.any():
        gap = (ours[differs].double() - theirs[differs].double()).abs().max()
        count, most = found.changed.get(column, (0, 0.0))
        most = max(most, float(gap)) if gap == gap and most == most else float("nan")
        found.changed[column] = count + int(differs.sum()), most
    return ~differs


class _Rows:
    """Finds the file that contains a given key of a table, and the key's row in that file."""

    def __init__(self, parts: Sequence[tuple[Path, Table]]) -> None:
        # Count the rows in the files: an incremental file may have fewer rows than the table had.
        rows = sum(shard.rows for _, part in parts for shard in part.shards)
        self.table = HashTable(max(1, rows))
        self._files: dict[Path, dict[str, Place]] = {}
        self._mapped = functools.lru_cache(_MOST_MAPS)(_mapped)
        numbers: dict[Path, int] = {}
        where = [torch.empty(0, dtype=torch.int64)]
        with live_pieces(parts) as pieces:
            for file, begin, keys, kept in pieces:
                number = numbers.setdefault(file.path, len(numbers))
                self._files[file.path] = file.places
                self.table.find_or_insert(keys[kept])
                where.append((number << _ROW_BITS) + begin + kept)
        self.at = torch.cat(where)

    def close(self) -> None:
        """Close the mapped files."""
        self._mapped.cache_clear()

    def gather(self, column: str, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Read a column for the given rows of the table, in the dtype and shape of ``like``."""
        gathered = torch.empty_like(like)
        into, at = carried(gathered), self.at[rows]
        numbers, places = (at >> _ROW_BITS).numpy(), (at & ((1 << _ROW_BITS) - 1)).numpy()
        files = list(self._files.items())
        for number in np.unique(numbers):
            here = numbers == number
            path, columns = files[number]
            into[here] = self._mapped(path, columns[column])[places[here]]
        return gathered


def _mapped(path: Path, place: Place) -> np.ndarray:
    """Map a tensor from a file; the system loads only the pages that are read."""
    with naming(path, "cannot be read"):
        return np.memmap(path, f"<u{place.dtype.itemsize}", "r", place.begin, place.shape)


def lines(difference: Difference, names: Mapping[str, str]) -> Iterator[str]:
    """Yield lines of text that describe a difference.

    Args:
        difference: result of `diff`.
        names: the names to print for the two checkpoints, under the keys ``"a"`` and ``"b"``.
    """
    for where, only in (("a", difference.only_a), ("b", difference.only_b)):
        yield from (f"only in {names[where]}: {name}" for name in only)
    for name, table in difference.tables.items():
        if not table:
            yield f"{name}: {table.same:,} rows are the same"
            continue
        if table.shape:
            yield f"{name}: {table.shape}"
            continue
        yield (
            f"{name}: {table.same:,} rows are the same, {table.only_a:,} only in {names['a']}, "
            f"{table.only_b:,} only in {names['b']}"
        )
        for column, (count, most) in table.changed.items():
            yield f"  {column}: {count:,} rows differ, by at most {most:.6g}"
    yield from (f"{name}: differs" for name in difference.dense)
