"""In what two checkpoints differ."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ..table import HashTable
from .folder import chain, resolved
from .load_table import Chain, parts_of
from .manifest import DENSE
from .reshard import Told, columns_of, live_pieces, verify
from .tensor_file import Place, TensorFile, carried

# A place of a row: number of the file, then of the row in it.
_ROW_BITS = 40


@dataclass
class TableDifference:
    """In what a table differs in two checkpoints, A and B.

    Attributes:
        same: rows of keys that both have, with equal vectors and states, bit for bit.
        only_a: keys that B lacks.
        only_b: keys that A lacks.
        changed: of rows that differ in it, for vectors and each state: how many, and the largest
            absolute difference (nan if a difference is).
        shape: in what the tables differ as such, such as "dim 8 and 16", or an empty text; rows are
            not compared then.
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
    """In what two checkpoints differ; false if in nothing.

    Attributes:
        only_a: tables and dense tensors that B lacks.
        only_b: those that A lacks.
        tables: of those that both have.
        dense: names of dense tensors, optimizers' among them, that differ.
    """

    only_a: list[str]
    only_b: list[str]
    tables: dict[str, TableDifference]
    dense: list[str]

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.dense or any(self.tables.values()))


def diff(
    a: str | os.PathLike[str], b: str | os.PathLike[str], told: Told = lambda _: None
) -> Difference:
    """Compare tables, with a whole chain's rows, by key, and dense tensors.

    Which rank has a row does not matter. Some 30 bytes for each row are in memory.

    Args:
        a: a checkpoint, or a folder of them, of which the latest is taken; it is verified.
        b: the other one.
        told: called with the bytes of each file as it is verified.

    Raises:
        CheckpointError: one is damaged; naming the file.
    """
    a, b = resolved(a), resolved(b)
    for path in (a, b):
        verify(path, told)
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
    for what in ("dim", "dtype", "states"):
        if getattr(a, what) != getattr(b, what):
            return TableDifference(shape=f"{what} {getattr(a, what)} and {getattr(b, what)}")
    places = HashTable(max(1, sum(shard.size for shard in a.shards)))
    where: list[torch.Tensor] = []
    files: dict[Path, tuple[int, dict[str, Place]]] = {}
    for file, begin, keys, kept in live_pieces(parts_of(ours, name)):
        number, _ = files.setdefault(file.path, (len(files), file.places))
        places.find_or_insert(keys[kept])
        where.append((number << _ROW_BITS) + begin + kept)
    at = torch.cat(where) if where else torch.empty(0, dtype=torch.int64)
    found = TableDifference()
    names = [column.name for column in columns_of(a, 0) if column.name != "keys"]
    maps = {n: [_mapped(path, p[n]) for path, (_, p) in files.items()] for n in names}
    shared = 0
    for file, begin, keys, kept in live_pieces(parts_of(theirs, name)):
        rows = places.find(keys[kept])
        both = (rows >= 0).nonzero().squeeze(1)
        shared += len(both)
        found.only_b += len(kept) - len(both)
        if not len(both):
            continue
        same = torch.ones(len(both), dtype=torch.bool)
        for column in names:
            theirs_now = file.read(column, begin, len(keys))[kept[both]]
            ours_now = _gather(maps[column], at[rows[both]], theirs_now)
            differs = torch.from_numpy(
                (carried(ours_now) != carried(theirs_now)).reshape(len(both), -1).any(axis=1)
            )
            same &= ~differs
            if differs.any():
                gap = (ours_now[differs].double() - theirs_now[differs].double()).abs().max()
                count, most = found.changed.get(column, (0, 0.0))
                most = max(most, float(gap)) if gap == gap and most == most else float("nan")
                found.changed[column] = count + int(differs.sum()), most
        found.same += int(same.sum())
    found.only_a = len(at) - shared
    return found


def _mapped(path: Path, place: Place) -> np.ndarray:
    """A tensor of a file, of which only what is looked at comes to memory."""
    integers = f"<u{place.dtype.itemsize}"
    if 0 in place.shape:
        return np.empty(place.shape, integers)
    return np.memmap(path, integers, "r", place.begin, place.shape)


def _gather(maps: list[np.ndarray], at: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows of the files, in the dtype and shape of other rows."""
    gathered = torch.empty_like(like)
    into = carried(gathered)
    numbers, rows = (at >> _ROW_BITS).numpy(), (at & ((1 << _ROW_BITS) - 1)).numpy()
    for number in np.unique(numbers):
        here = numbers == number
        into[here] = maps[number][rows[here]]
    return gathered


def lines(difference: Difference, names: Mapping[str, str]) -> Iterator[str]:
    """A difference in words.

    Args:
        difference: what `diff` returned.
        names: ``"a"`` and ``"b"`` -> what the two are called.
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
