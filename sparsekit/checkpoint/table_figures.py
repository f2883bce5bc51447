"""Tells what the tables of a checkpoint have: rows, norms, ages, scores, vectors that stand out.

Files are read piece by piece, so a table may be larger than the memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .. import optim
from .._nearest import did_you_mean
from ..errors import CheckpointError
from ..nn.memory_report import Bytes
from ..optim.row_optimizer import RowOptimizer
from ..tables.hash_table import HashTable
from ..tables.initializers import Constant, Initializer, Normal, Uniform
from ..tables.scores import LFU, LRU, Score, UserScore
from .encoding import decoded
from .folder import chain, resolved
from .histogram import Histogram, Spread
from .manifest import MANIFEST, Manifest, Table
from .nearest import Alike, Drawn
from .reshard import OnProgress, live_pieces, verify
from .table_files import Chain, columns_of, opened, parts_of
from .tensor_file import TensorFile

# Maximum number of keys to name as examples.
_EXAMPLES = 5
# States of which dead rows need no particular value: `row_step` is the last step of a row under
# optimizers that bring rows up to date late.
_ANY_VALUE = {"row_step"}
# Parts of a table by the columns of files, where the two have other names.
_PARTS = {"keys": "index", "rows": "changes", "removed": "changes"}
# Scores that read words as they are stored: counts of LFU before they are halved.
_SCORES: dict[str, Score] = {one.name: one for one in (LRU(), LFU(0), UserScore(None))}
_INITIALIZERS: dict[str, type[Initializer]] = {
    kind.__name__: kind for kind in (Uniform, Normal, Constant)
}


@dataclass
class Some:
    """Rows of a kind.

    Attributes:
        rows: number of rows.
        keys: keys of the first of these rows, at most 5.
    """

    rows: int = 0
    keys: list[int] = field(default_factory=list)

    def add(self, keys: torch.Tensor) -> None:
        """Add rows with these keys, int64 ``[n]``."""
        self.rows += len(keys)
        self.keys += keys[: _EXAMPLES - len(self.keys)].tolist()


@dataclass(frozen=True)
class Part:
    """Size of a part of a table in bytes, over all ranks.

    Attributes:
        in_files: in the files of the checkpoint and of those that it follows.
        in_memory: as for `sparsekit.memory_report`; None for what memory does not have, or what
            depends on the layer.
    """

    in_files: int
    in_memory: Bytes | None


@dataclass(frozen=True)
class TableFigures:
    """Describes one table of a checkpoint, over all ranks.

    Attributes:
        name: name of the table.
        dim: number of elements in a vector.
        dtype: name of the vectors' dtype.
        hash_table: false if keys are row numbers.
        rows: number of rows.
        capacity: number of rows that there is room for; its `load` is rows / capacity.
        rows_of_ranks: number of rows of each rank.
        skew: rows of the fullest rank, divided by the mean over ranks; 1 without rows.
        lowest_key: None without rows.
        highest_key: None without rows.
        norms: distribution of the Euclidean norms of vectors without nan and inf.
        zero: rows whose vectors are 0.
        nan: rows whose vectors have a nan.
        inf: rows whose vectors have an inf, and no nan.
        dead: rows that nothing has updated since their insertion: the vector is the initial vector
            of its key, and all states of the row are as for a new one. None if it is unknown.
        why_unknown: why dead rows are unknown; empty if they are not.
        score_kind: ``"lru"``, ``"lfu"`` or ``"user"``; None if rows have no scores.
        clock: the table's clock, which is moved by the user if ``clock_by_user``, and else counts
            lookups in training; None if rows have no scores.
        ages: distribution of the clock's units since the last lookup in training.
        scores: distribution of the counts of LFU as they are stored, which is before halving, or of
            the user's scores. None for LRU, whose scores are the clock of the last lookup.
        alike: vectors that are equal or nearly so, among some of the rows that are neither dead nor
            have 0, nan or inf for a vector.
        colliding_pairs: expected number of pairs of ids with one key if keys are 64-bit hashes of
            ids: n (n - 1) / 2^65 for n rows. None if keys span less than 2^62, as such hashes
            hardly do.
        sharing_ids: expected fraction of ids that share their key with another id if keys are
            hashes of ids modulo m: (n - 1) / (m - 1) for n rows, the fraction of the other m - 1
            keys that are in use. None without `modulo`.
        parts: sizes of keys (in memory, of the index), vectors, scores, states and others, by name.
    """

    name: str
    dim: int
    dtype: str
    hash_table: bool
    rows: int
    capacity: int
    rows_of_ranks: list[int]
    skew: float
    lowest_key: int | None
    highest_key: int | None
    norms: Spread | None
    zero: Some
    nan: Some
    inf: Some
    dead: Some | None
    why_unknown: str
    score_kind: str | None
    clock: int | None
    clock_by_user: bool
    ages: Spread | None
    scores: Spread | None
    alike: Alike
    colliding_pairs: float | None
    sharing_ids: float | None
    parts: dict[str, Part]

    @property
    def load(self) -> float:
        """Return rows / capacity."""
        return self.rows / self.capacity


def table_figures(
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    modulo: int | None = None,
    on_progress: OnProgress = lambda _: None,
) -> list[TableFigures]:
    """Tell what tables of a checkpoint and its chain have.

    Memory does not grow with tables: it takes pieces of at most 8 MiB, with several copies, and
    counters of 24 MiB. Only the keys of a chain's changes are kept.

    Args:
        path: a checkpoint, or a folder whose latest checkpoint is used. It is verified first.
        names: names of tables, in this order; None for all.
        modulo: number, at least 2, modulo which keys are hashes of ids; None if they are not.
        on_progress: called with the size in bytes of each file that has been verified.

    Raises:
        CheckpointError: a file is damaged; the message names it.
        ValueError: there is no table of a name, or a key is not in [0, modulo).
    """
    links = chain(resolved(path))
    tables = links[-1][1].tables
    for name in names or ():
        if name not in tables:
            hint = did_you_mean(name, tables)
            raise ValueError(f"no table named {name}{hint}; tables: {', '.join(tables)}")
    verify(links[-1][0], on_progress)
    chosen = dict.fromkeys(tables if names is None else names)
    return [_Pass(links, name).figures(modulo) for name in chosen]


class _Pass:
    """Goes through the rows of a table once."""

    def __init__(self, links: Chain, name: str) -> None:
        self.name = name
        self.parts = parts_of(links, name)
        self.table = self.parts[-1][1]
        self.rows = 0
        self.lowest, self.highest = 2**63 - 1, -(2**63)
        self.norms = Histogram()
        self.ages, self.scores = Histogram(whole=True), Histogram(whole=True)
        self.zero, self.nan, self.inf, self.dead = Some(), Some(), Some(), Some()
        self.drawn = Drawn(self.table.dim, getattr(torch, self.table.dtype))
        self.initializer = _initializer(self.table.initializer)
        self.fresh = _fresh_states(*links[-1], name)
        with live_pieces(self.parts) as pieces:
            for file, begin, keys, kept in pieces:
                if len(kept):
                    self._add(file, begin, keys, kept)

    def _add(self, file: TensorFile, begin: int, keys: torch.Tensor, kept: torch.Tensor) -> None:
        """Add the live rows of a piece."""
        count, some = len(keys), len(kept) < len(keys)

        def read(name: str) -> torch.Tensor:
            column = file.read(name, begin, count)
            return column[kept] if some else column

        keys = keys[kept]
        self.rows += len(keys)
        self.lowest = min(self.lowest, int(keys.min()))
        self.highest = max(self.highest, int(keys.max()))
        vectors = read("vectors")
        nan = vectors.isnan().any(1)
        inf = vectors.isinf().any(1) & ~nan
        zero = ~vectors.any(1)
        finite = ~(nan | inf)
        self.norms.add(torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)[finite])
        plain = finite & ~zero
        if self.initializer is not None:
            dead = _is_initial(vectors, keys, self.initializer, self.table.seed)
            for name, value in self.fresh.items() if dead.any() else ():
                state = read(name).reshape(len(keys), -1)
                dead &= (state == torch.tensor(value, dtype=state.dtype)).all(1)
            self.dead.add(keys[dead])
            plain &= ~dead
        self.drawn.add(keys[plain], vectors[plain])
        for kind, rows in ((self.zero, zero), (self.nan, nan), (self.inf, inf)):
            kind.add(keys[rows])
        if self.table.scores is not None:
            clock, score = self.table.scores.clock, _SCORES[self.table.scores.kind]
            words = read("scores")
            self.ages.add(clock - score.touched(words))
            self.scores.add(score.order(words, clock))

    def figures(self, modulo: int | None) -> TableFigures:
        """Return what the rows have been found to have."""
        table, rows = self.table, self.rows
        why = ""
        if self.initializer is None:
            why = "the checkpoint does not tell how vectors start"
            if table.initializer:
                why = f"vectors start from {table.initializer}, which is no function of their keys"
        if modulo is not None and rows and not 0 <= self.lowest <= self.highest < modulo:
            wrong = self.lowest if self.lowest < 0 else self.highest
            raise ValueError(f"modulo {modulo}: table {self.name} has the key {wrong}")
        sizes = [shard.size for shard in table.shards]
        scores = table.scores
        spans = rows > 0 and self.highest - self.lowest >= 2**62
        lru = scores is not None and scores.kind == "lru"
        return TableFigures(
            name=self.name,
            dim=table.dim,
            dtype=table.dtype,
            hash_table=table.hash_table,
            rows=rows,
            capacity=table.capacity * len(sizes),
            rows_of_ranks=sizes,
            skew=max(sizes) * len(sizes) / sum(sizes) if sum(sizes) else 1.0,
            lowest_key=self.lowest if rows else None,
            highest_key=self.highest if rows else None,
            norms=self.norms.spread(),
            zero=self.zero,
            nan=self.nan,
            inf=self.inf,
            dead=None if why else self.dead,
            why_unknown=why,
            score_kind=table.score_kind,
            clock=None if scores is None else scores.clock,
            clock_by_user=scores is not None and scores.set_by_user,
            ages=self.ages.spread(),
            scores=None if lru else self.scores.spread(),
            alike=self.drawn.alike(),
            colliding_pairs=rows * (rows - 1) / 2**65 if spans else None,
            sharing_ids=None if modulo is None else max(rows - 1, 0) / (modulo - 1),
            parts=_sizes(self.parts, rows),
        )


def _initializer(text: str) -> Initializer | None:
    """Return the initializer with this text; None if its vectors are no function of keys."""
    match = re.fullmatch(r"(\w+)\((.*)\)", text)
    if match is None or match[1] not in _INITIALIZERS:
        return None
    try:
        numbers = [pair.partition("=") for pair in match[2].split(", ")]
        return _INITIALIZERS[match[1]](**{name: float(number) for name, _, number in numbers})
    except (TypeError, ValueError):
        return None


def _is_initial(
    vectors: torch.Tensor, keys: torch.Tensor, initializer: Initializer, seed: int
) -> torch.Tensor:
    """Return whether vectors ``[n, dim]`` are the initial vectors of their keys, bool ``[n]``."""
    initial = torch.empty_like(vectors)
    initializer.write_(initial, keys, seed=seed)
    if not isinstance(initializer, Normal):
        return (vectors == initial).all(1)
    # A GPU may draw a normal number that differs in the last bit of a float32.
    eps = max(torch.finfo(vectors.dtype).eps, torch.finfo(torch.float32).eps)
    return ((vectors - initial).abs() <= eps * (initial.abs() + abs(initializer.mean))).all(1)


def _fresh_states(folder: Path, manifest: Manifest, name: str) -> dict[str, float]:
    """Return what the states of a new row are, by name."""
    table = manifest.tables[name]
    fresh = dict.fromkeys((state for state in table.states if state not in _ANY_VALUE), 0.0)
    if table.optimizer is None:
        return fresh
    saved = manifest.optimizers[table.optimizer]
    try:
        kind = getattr(optim, saved["kind"], None)
        for group in decoded(saved["groups"], {}):
            # A module that is itself a table has the parameter "weight".
            if {f"{name}.weight", "weight"}.isdisjoint(group["params"]):
                continue
            if isinstance(kind, type) and issubclass(kind, RowOptimizer):
                initial = object.__new__(kind)._initial_states(group)
            else:  # among torch's optimizers, only Adagrad has states that do not start at 0
                initial = {"sum": float(group.get("initial_accumulator_value", 0.0))}
            fresh |= {state: initial[state] for state in fresh.keys() & initial.keys()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / MANIFEST}: is damaged: settings of the optimizer of {name}: {error!r:.80}"
        ) from None
    return fresh


def _sizes(parts: Sequence[tuple[Path, Table]], rows: int) -> dict[str, Part]:
    """Return the sizes of the parts of a table, by name."""
    in_files: dict[str, int] = {}
    for folder, table in parts:
        for shard in table.shards:
            with opened(folder, table, shard) as file:
                for column, place in file.places.items():
                    size = math.prod(place.shape) * place.dtype.itemsize
                    part = _PARTS.get(column, column)
                    in_files[part] = in_files.get(part, 0) + size
    newest = parts[-1][1]
    ranks = len(newest.shards)
    index = 0
    if newest.hash_table:
        tensors = HashTable(newest.capacity, device="meta").tensors()
        index = ranks * sum(tensor.nbytes for tensor in tensors)
    in_memory = {"index": Bytes(index, index)}
    room = newest.capacity * ranks
    for each in columns_of(newest, 1)[1:]:  # all but keys
        in_memory[each.name] = Bytes(rows * each.nbytes, room * each.nbytes)
    names = dict.fromkeys([*in_memory, *in_files])
    return {name: Part(in_files.get(name, 0), in_memory.get(name)) for name in names}
