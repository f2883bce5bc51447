"""Reports on a checkpoint's tables: rows, norms, ages, scores and unusual vectors.

Files are read piece by piece, so a table may be larger than memory.
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

# Maximum number of keys to list as examples.
_EXAMPLES = 5
# States to ignore when looking for dead rows: `row_step` is the last step applied to a row, in
# optimizers that let rows fall behind.
_ANY_VALUE = {"row_step"}
# For each file column: the part of the table that it belongs to, unless both have the same name.
_PARTS = {"keys": "index", "rows": "changes", "removed": "changes"}
# Scores used to decode stored words, by name; LFU(0) does not halve counts.
_SCORES: dict[str, Score] = {one.name: one for one in (LRU(), LFU(0), UserScore(None))}
_INITIALIZERS: dict[str, type[Initializer]] = {
    kind.__name__: kind for kind in (Uniform, Normal, Constant)
}


@dataclass
class Some:
    """Describes some of a table's rows: their number, and a few of their keys.

    Attributes:
        rows: number of rows.
        keys: keys of the first rows, at most 5.
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
        in_files: size in the files of the checkpoint's whole chain.
        in_memory: size in memory, as reported by `sparsekit.memory_report`; None for a part that is
            not in memory, or whose size there depends on the layer.
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
        capacity: number of rows that the table has room for; `load` is rows / capacity.
        rows_of_ranks: number of rows on each rank.
        skew: number of rows on the fullest rank, divided by the mean over ranks; 1 without rows.
        lowest_key: the lowest key; None if there are no rows.
        highest_key: the highest key; None if there are no rows.
        norms: distribution of the Euclidean norms of vectors without nan and inf.
        zero: rows whose vectors are 0.
        nan: rows whose vectors contain a nan.
        inf: rows whose vectors contain an inf, but no nan.
        dead: rows that nothing has updated since their insertion: the vector is its key's initial
            vector, and all states are those of a new row. None if unknown.
        why_unknown: the reason why ``dead`` is unknown; empty if it is known.
        score_kind: ``"lru"``, ``"lfu"`` or ``"user"``; None if rows have no scores.
        clock: the table's clock, which the user sets if ``clock_by_user``; otherwise it counts
            lookups in training. None if rows have no scores.
        ages: distribution of the time since each row's last lookup in training, in clock units.
        scores: distribution of LFU counts as stored, before halving, or of the user's scores. None
            for LRU, whose scores are the clock at the last lookup.
        alike: equal or nearly equal vectors, in a sample of the rows that are not dead and whose
            vectors are finite and nonzero.
        colliding_pairs: expected number of pairs of ids with the same key if keys are 64-bit hashes
            of ids: n (n - 1) / 2^65 for n rows. None if keys span less than 2^62, which is unlikely
            for such hashes.
        sharing_ids: expected fraction of ids that share their key with another id if keys are
            hashes of ids modulo m: (n - 1) / (m - 1) for n rows, the fraction of the other m - 1
            keys that is in use. None without `modulo`.
        parts: sizes of the index (in files: the keys), vectors, scores, states and others, by name.
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
    """Compute the figures of a checkpoint's tables, including rows from its whole chain.

    Memory use does not depend on table size: it is a few copies of a piece of at most 8 MiB, 24 MiB
    of counters, and the keys that incremental checkpoints changed.

    Args:
        path: a checkpoint, or a folder whose latest checkpoint is used. The checkpoint is verified
            first.
        names: names of the tables to report on, in this order; None for all.
        modulo: m >= 2 if keys are hashes of ids modulo m; None if they are not.
        on_progress: called with the size in bytes of each file that has been verified.

    Raises:
        CheckpointError: a file is damaged; the message names it.
        ValueError: there is no table with a given name, or a key is not in [0, modulo).
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
    """Reads a table's rows once, and collects the table's figures."""

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
        self.initializer = initializer_of(self.table.initializer)
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
        """Return the figures for the rows that were read."""
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


def initializer_of(text: str) -> Initializer | None:
    """Parse an initializer; return None if its vectors do not depend on keys alone."""
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
    """Return whether each vector ``[n, dim]`` is its key's initial vector, bool ``[n]``."""
    initial = torch.empty_like(vectors)
    initializer.write_(initial, keys, seed=seed)
    if not isinstance(initializer, Normal):
        return (vectors == initial).all(1)
    # Normal numbers drawn on a GPU may differ in the last bit of a float32.
    eps = max(torch.finfo(vectors.dtype).eps, torch.finfo(torch.float32).eps)
    return ((vectors - initial).abs() <= eps * (initial.abs() + abs(initializer.mean))).all(1)


def _fresh_states(folder: Path, manifest: Manifest, name: str) -> dict[str, float]:
    """Return the states of a new row, by name."""
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
    """Return the sizes of a table's parts, by name."""
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
    for each in columns_of(newest, 1)[1:]:  # all columns but the keys
        in_memory[each.name] = Bytes(rows * each.nbytes, room * each.nbytes)
    names = dict.fromkeys([*in_memory, *in_files])
    return {name: Part(in_files.get(name, 0), in_memory.get(name)) for name in names}
