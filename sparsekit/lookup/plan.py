"""Lookup plans: facts about a lookup's tables, cached from call to call."""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Sequence
from typing import Any, cast
from weakref import ref

import torch

from .._overrides import without_overrides
from .._pybind import each_dict_has, each_equal, lists_are
from .._reports import errors_are_deferred
from ..distributed.exchange import Exchange
from ..tables.embedding_table import EmbeddingTable, check_same_process, table_changes
from ..tables.kept_tensors import OF_HASH_TABLE, KeptTensors, Tensors
from ..tables.reports import Inserting, bounds_of
from .request import check_weight
from .scored import scored_of

_changes = operator.attrgetter("changes")


class TableBatch:
    """Tables for one call to an op: they share a dtype, and all or none of them insert keys.

    Tensors are read at each call, since loading a state may replace them; until one is replaced,
    lists of several tensors are passed to the ops as `KeptTensors`. The tables are held by weak
    references, so that a layer that keeps this object is freed once nothing else uses it.

    Attributes:
        positions: positions of the requests for these tables among all of a call's requests.
        table_of_request: for each of these requests, the index of its table.
        dims: for each table, the length of a vector.
        divisor: number that gradients are divided by.
        dtype: dtype of the weights.
        wire_dtype: dtype of vectors and gradients sent between ranks.
        row_bytes: for each table, size in bytes of a row on the wire.
        sum_bytes: for each table, size in bytes of a bag's sum on the wire.
        key_ends: for each table, the end of its range of keys; -1 if all keys are valid.
        dedupe: whether a rank sends each distinct key only once.
        described: int64 ``[T, 3]``, the argument ``tables`` of the ops.
        initializers: float64 ``[T, 3]``, the argument ``initializers`` of the ops.
        hashed, growing: indices of tables with a hash table, and indices of tables that grow.
        reads: for each request, whether it is read-only; empty if none is.
        first: tables to insert keys into before read-only requests look keys up, or None.
        counted: indices of the tables whose owners must know how often each key is inserted.
        names: name of each table.
        inserting: a description of each table that inserts keys, for `Report`.
        bounds: result of `bounds_of` for ``inserting``.
        features: cache of the ops' arguments ``features`` and of `Descriptors.limits`; the cache
            key contains everything that they depend on.
        max_norms: for each table with a limit, the largest allowed norm of a row, and the norm's p.
        files: for each table whose rows are stored in files, those files.
        scored: the tables whose rows have scores; None if there are none.
        seen: whether the content of these tables has been checked.
        buffers: buffers of each table, by name.
    """

    def __init__(
        self,
        positions: Sequence[int],
        asked: Sequence[EmbeddingTable],
        inserts: bool,
        reads: Sequence[bool] = (),
    ) -> None:
        self.positions = positions
        self.reads = reads
        writing = [t for t, read in zip(asked, reads, strict=True) if not read] if reads else asked
        asks_first = bool(reads) and any(table.inserts for table in writing)
        self.first = TableBatch((), list(dict.fromkeys(writing)), inserts) if asks_first else None
        self.inserts = inserts = inserts and not reads
        indices: dict[EmbeddingTable, int] = {}
        self.table_of_request = [indices.setdefault(table, len(indices)) for table in asked]
        tables = list(indices)
        for table in tables:
            table.refuse_meta()
        self._tables = [ref(table) for table in tables]
        self.dims = [table.embedding_vec_size for table in tables]
        # For each table: its name if it is sharded over ranks, else None.
        self.shards_of = [table.name if table.world_size > 1 else None for table in tables]
        self.divisor = tables[0].gradient_divisor
        self.dtype = tables[0].weight.dtype
        self.wire_dtype = tables[0].dtype_on_wire
        self.row_bytes = [dim * self.wire_dtype.itemsize for dim in self.dims]
        self.sum_bytes = [x.embedding_vec_size * x.sum_dtype_on_wire.itemsize for x in tables]
        self.key_ends = [-1 if x.table is not None else x.capacity * x.world_size for x in tables]
        self.dedupe = all(table.dedupe for table in tables)
        self.names = [table.name for table in tables]
        self.hashed = [t for t, table in enumerate(tables) if table.table is not None]
        self.growing = [t for t in self.hashed if tables[t].grows]
        self.describe(tables)
        self.max_norms = {
            t: (x.max_norm, x.norm_type) for t, x in enumerate(tables) if x.max_norm is not None
        }
        self.files = {t: x.files for t, x in enumerate(tables) if x.files is not None}
        initial = [(x.initializer if inserts else x.absent).numbers for x in tables]
        self.initializers = torch.tensor(initial, dtype=torch.float64, device="cpu")
        self.scored = scored_of(tables, inserts, writing)
        self.counted = [] if self.scored is None else self.scored.counted
        if reads:
            self.counted = [t for t, table in enumerate(tables) if table in writing]
        # Keep the modules' dicts: attribute access on a module takes longer than a small lookup.
        self._parameters: list[Any] = [table._parameters for table in tables]
        self.buffers: list[Any] = [table._buffers for table in tables]
        self._hash_tables: list[Any] = [x.table._buffers for x in tables if x.table is not None]
        self._shapes = [(table.capacity, table.embedding_vec_size) for table in tables]
        self.growth: Any = None  # see `larger_of`
        self.seen = False
        self._process = -1  # id of the last process where `refuse_sharing` passed
        # The last call's tensors and, from the second call on, the same as op arguments.
        self._last: Tensors | None = None
        self._kept: KeptTensors | None = None
        # The weights of tables with a hash table, and each hash table's `OF_HASH_TABLE` tensors.
        self._hashed_weights: list[Any] = []
        self._last_of_hash_tables: list[Any] = []
        self.features: dict[Any, Any] = {}

    def describe(self, tables: Sequence[EmbeddingTable]) -> None:
        """Describe the tables to the ops, with their current capacities."""
        numbers = {t: number for number, t in enumerate(self.hashed)}
        sizes = [((x.table or x).capacity, x.world_size) for x in tables]
        rows = [(numbers.get(t, -1), *size) for t, size in enumerate(sizes)]
        self.described = torch.tensor(rows, device="cpu")
        own = [table.table for table in tables] if self.inserts else []
        self.inserting = [Inserting.of(t, x) for t, x in enumerate(own) if x is not None]
        self.bounds = bounds_of(self.inserting)

    @property
    def tables(self) -> list[EmbeddingTable]:
        """The distinct tables."""
        return [cast(EmbeddingTable, table()) for table in self._tables]

    def tensors(self) -> tuple[Tensors, Tensors]:
        """Check the tables where needed, and return their tensors for the next lookup.

        Returns:
            The tensors, in the last call's lists if they are unchanged, and also as op arguments.

        Raises:
            TypeError, ValueError: a lookup cannot use a table's weight.
            RuntimeError: see `EmbeddingTable.prepare` and `HashTable.refuse_sharing`.
        """
        last, kept = self._last, self._kept
        if last is not None and kept is not None and self._is_steady(last, kept):
            return last, Tensors(*kept.arguments)
        weights = self._weights()
        if len(weights) == 1:
            misshapen, unseen = self._news_of(weights)
        else:
            misshapen, unseen = without_overrides(self._news_of, weights)
        if misshapen:
            for table in self.tables:
                check_weight(table)
        # A forked process inherits this object, and must run the check itself.
        if self.inserts and self._process != os.getpid():
            for table in self.tables:
                if table.table is not None:
                    table.table.refuse_sharing()
            self._process = os.getpid()
        if unseen:
            for table in self.tables:
                table.prepare(self.inserts)
            self.seen = not self.inserts  # if tables insert, `have_keys` sets `seen`
        of_hash_tables = [[own[name] for own in self._hash_tables] for name in OF_HASH_TABLE]
        tensors = Tensors(weights, [own["seed"] for own in self.buffers], *of_hash_tables)
        return (tensors, tensors) if len(weights) == 1 else self._kept_of(tensors)

    def _is_steady(self, last: Tensors, kept: KeptTensors) -> bool:
        """Return whether the tables still have these tensors, and nothing needs to be checked."""
        return (
            self.seen
            and (not self.inserts or self._process == os.getpid())
            and each_dict_has(self._parameters, ["weight"], last.weights)
            and each_dict_has(self.buffers, ["seed"], last.seeds)
            and each_dict_has(self._hash_tables, OF_HASH_TABLE, self._last_of_hash_tables)
            and without_overrides(self._are_noted, self._hashed_weights)
            and kept.in_place()
        )

    def _news_of(self, weights: list[Any]) -> tuple[bool, bool]:
        """Return whether any weight's shape has changed, and whether contents must be checked."""
        misshapen = [weight.shape for weight in weights] != self._shapes
        return misshapen, not self.seen or not self._are_noted(self._of_hashed(weights))

    def _of_hashed(self, weights: list[Any]) -> list[Any]:
        """Return the weights of the tables that have a hash table."""
        return weights if len(self.hashed) == len(weights) else [weights[t] for t in self.hashed]

    @staticmethod
    def _are_noted(weights: list[Any]) -> bool:
        """Return whether the weights' versions show that only this library has written to them."""
        return each_equal(weights, "_version", "noted_version")

    def _kept_of(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Return the tensors and op arguments, reused if the last call had the same tensors."""
        last, kept = self._last, self._kept
        if last is None or not all(map(lists_are, last, tensors)):
            self._last, self._kept = tensors, None
            return tensors, tensors
        if kept is None or not kept.in_place():
            kept = self._kept = KeptTensors(last)
            self._hashed_weights = self._of_hashed(last.weights)
            self._last_of_hash_tables = list(itertools.chain(*zip(*last[2:], strict=True)))
        return last, Tensors(*kept.arguments)

    def take_gradients(self) -> list[bool]:
        """Return, for each table, whether a lookup's backward will need the table's gradient."""
        if not torch.is_grad_enabled():
            return [False] * len(self.dims)
        return [weight.requires_grad for weight in self._weights()]

    def _weights(self) -> list[Any]:
        try:
            return [parameters["weight"] for parameters in self._parameters]
        except KeyError:  # a parametrization computes the weight
            return [table.weight for table in self.tables]

    def owners(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return the distinct owner maps, and the index of each table's map; -1 means no map.

        Without a map the owner is ``unsigned(key) % world_size``.
        """
        maps: list[torch.Tensor] = []
        numbers: dict[int, int] = {id(None): -1}
        of_tables = []
        for buffers in self.buffers:
            owners = buffers["owners"]
            number = numbers.get(id(owners))
            if number is None:
                number = numbers[id(owners)] = len(maps)
                maps.append(owners)
            of_tables.append(number)
        return maps, of_tables

    def have_keys(self) -> None:
        """Record that keys have been inserted."""
        for table in self.tables:
            table.checked_modes.add(True)
        self.seen = True


class LookupPlan:
    """The facts that a call needs about its tables; a table may occur more than once.

    Attributes:
        batches: the tables, grouped into batches that one call to an op can handle.
        columns: for each batch, the range of its tables among all tables.
        derived: values that callers derive from the tables, keyed by form of input; see `remember`.
        strategies: the distinct values of the tables' `strategy` option.
        most_keys: for each table, the maximum number of keys that a rank may request from another
            rank; None unless all tables have a limit.
        redirects: whether any table has fallback rows; see `redirected`.
        fits_alone: whether `check_exchange` has found that all tables are in a single process.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], reads: Sequence[bool] = ()) -> None:
        self._tables = [ref(table) for table in tables]
        self.reads = reads
        reading = {x for x, r in zip(tables, reads, strict=False) if r and x.table is not None}
        self._changes = [table.changes for table in tables]
        positions: dict[tuple[Any, ...], list[int]] = {}
        for i, table in enumerate(tables):
            # Use these flags, not `inserts_all`, so that evaluation groups tables as training does.
            modes = table.inserts, table.admits_all, table in reading
            key = table.weight.dtype, table.dtype_on_wire, table.gradient_divisor, modes
            positions.setdefault(key, []).append(i)
        self.batches = []
        for own in positions.values():
            of_batch, mixed = [tables[i] for i in own], tables[own[0]] in reading
            asks = of_batch, of_batch[0].inserts_all, [reads[i] for i in own if mixed]
            self.batches.append(TableBatch(own, *asks))
        ends = list(itertools.accumulate(len(batch.dims) for batch in self.batches))
        self.columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.derived: dict[Any, Any] = {}
        distinct = [table for batch in self.batches for table in batch.tables]
        self.redirects = any(table.fallback is not None for table in distinct)
        self.strategies = {table.strategy for table in distinct}
        most = [t.max_keys_per_rank for t in distinct if t.strategy != "reduce_scatter"]
        limits = [limit for limit in most if limit is not None]
        self.most_keys = limits if len(limits) == len(distinct) else None
        self._signature: tuple[Any, str] = None, ""
        # Seeds and shards last read by `signature`, their tensors, and the tensors' versions.
        self._numbers: list[int] = []
        self._words: list[torch.Tensor] = []
        self._versions: list[int | None] = []
        self.fits_alone = False
        # A weak reference, so that an exchange is freed together with its group.
        self._fits: ref[Exchange] | None = None

    def is_of(self, tables: Sequence[EmbeddingTable]) -> bool:
        """Return whether the plan was made for these tables and none has changed since."""
        # A live table has one weak reference without a callback, so equal references are identical.
        changes = list(map(_changes, tables))
        return list(map(ref, tables)) == self._tables and changes == self._changes

    def up_to_date(self) -> LookupPlan:
        """Return this plan, or a new one if a table has changed since the plan was made."""
        tables = self.tables
        return self if self.is_of(tables) else LookupPlan(tables, self.reads)

    @property
    def first(self) -> EmbeddingTable:
        """The table of the first request."""
        return cast(EmbeddingTable, self._tables[0]())

    @property
    def tables(self) -> list[EmbeddingTable]:
        """The table of each request."""
        return [cast(EmbeddingTable, table()) for table in self._tables]

    def signature(self) -> str:
        """Return a string with the facts that all ranks must agree on before a lookup.

        Raises:
            RuntimeError: a table has been overwritten by another rank's table.
            ValueError: an entry in a table's owner map is not a rank.
        """
        # Collect everything that may have changed, in a form that is quick to compare.
        buffers = [of_table for batch in self.batches for of_table in batch.buffers]
        words = [b[name] for b in buffers for name in ("seed", "shard")]
        versions = _versions(words)
        same = len(words) == len(self._words) and all(map(operator.is_, words, self._words))
        same = same and versions == self._versions and None not in versions
        # A write through .data does not change the version, so read the words again, unless that
        # would wait for a device.
        if not (same and errors_are_deferred(words[0].device)):
            # Read everything in one go, since each read from a device waits for the device.
            self._numbers = torch.cat(words).tolist()
            self._words, self._versions = words, versions
        numbers = self._numbers
        maps = [owners for batch in self.batches for owners in batch.owners()[0]]
        taking = [taken for batch in self.batches for taken in batch.take_gradients()]
        now = numbers, _versions(maps), taking
        if self._signature[0] != now:
            tables = [table for batch in self.batches for table in batch.tables]
            of_tables = {
                table: table.signature(numbers[3 * i], numbers[3 * i + 1 : 3 * i + 3], taking[i])
                for i, table in enumerate(tables)
            }
            reads = f", of which these insert nothing: {self.reads}" if self.reads else ""
            self._signature = now, ", ".join([of_tables[x] for x in self.tables]) + reads
        return self._signature[1]

    def check_exchange(self, exchange: Exchange | None) -> None:
        """Check that all tables were made for this exchange.

        Raises:
            RuntimeError: a table was made on a different rank, or for a different number of ranks.
            ValueError: the tables have different process groups or devices.
        """
        fits = self.fits_alone if exchange is None else self._fits and self._fits() is exchange
        if fits:
            return
        check_same_process(self.tables, exchange)
        if exchange is None:
            self.fits_alone = True
        else:
            self._fits = ref(exchange)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the version of each tensor, or None for an inference tensor, which has no version."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


class PlanCache:
    """A cache that holds the plan of its owner's last call; a copy of the cache starts empty.

    Args:
        reads: for each request in a call, whether it is read-only; empty if none is.
    """

    def __init__(self, reads: Sequence[bool] = ()) -> None:
        self._reads = reads
        self._plan: LookupPlan | None = None
        # The last call's tables, if there were several, and the change count at that time.
        self._tables: Sequence[EmbeddingTable] | None = None
        self._changes = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCache, (self._reads,)

    def plan_for(self, tables: Sequence[EmbeddingTable]) -> LookupPlan:
        """Return the plan for a lookup in these tables.

        Raises:
            RuntimeError: a table is on the meta device.
        """
        plan, changes = self._plan, table_changes.count
        # A group passes the same list each time, and does not change it.
        if plan is not None and tables is self._tables and changes == self._changes:
            return plan
        if plan is None or not plan.is_of(tables):
            plan = self._plan = LookupPlan(tables, self._reads)
        self._tables, self._changes = tables if len(tables) > 1 else None, changes
        return plan
