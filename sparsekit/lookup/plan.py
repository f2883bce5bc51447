"""Plans of lookups: facts about their tables that are kept from call to call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast
from weakref import ref

import torch

from ..distributed.exchange import Exchange
from ..ops._group import FeatureColumn
from ..tables.embedding_table import EmbeddingTable
from .request import check_weight

# Most forms of input that are remembered; a batch size is part of the form.
_MOST_FORMS = 64


class Tensors(NamedTuple):
    """Tensors of several tables, for the ops; the last three are those of hash tables."""

    weights: list[torch.Tensor]
    seeds: list[torch.Tensor]
    buckets: list[torch.Tensor]
    hash_seeds: list[torch.Tensor]
    sizes: list[torch.Tensor]


class TableBatch:
    """Tables of one dtype that all insert keys or none: what one call of the ops can take.

    Tensors are read at each call, since a state that is loaded may bring new ones. The tables
    themselves are not kept alive, so that a layer may keep this and is freed all the same as soon
    as nobody uses it.

    Attributes:
        positions: of the requests for these tables, among all of a call.
        places: which of the tables each of those requests asks.
        dims: of the tables.
        divisor: of gradients.
        dtype: of the weights.
        wire_dtype: of vectors and gradients between ranks.
        row_bytes: of each table, between ranks.
        sum_bytes: of a sum of rows of each table, between ranks.
        key_ends: of each table, the end of its range of keys; -1 if any key will do.
        dedupe: whether a rank sends each of its keys once.
        described: int64 ``[T, 3]``, the ops' ``tables``.
        initializers: float64 ``[T, 3]``.
        hashed: which of the tables have a hash table.
        features: the ops' descriptors of requests, by all that they depend on.
        max_norms: of tables that have one, the largest norm of a row, and which norm.
        seen: whether these tables need no look at what is in them any more.
        buffers: of each table, by name.
    """

    def __init__(
        self, positions: Sequence[int], asked: Sequence[EmbeddingTable], inserts: bool
    ) -> None:
        self.positions = positions
        self.inserts = inserts
        places: dict[EmbeddingTable, int] = {}
        self.places = [places.setdefault(table, len(places)) for table in asked]
        tables = list(places)
        for table in tables:
            table.refuse_meta()
        self._tables = [ref(table) for table in tables]
        self.dims = [table.embedding_vec_size for table in tables]
        # Names of those that have other rows on other ranks.
        self.shards_of = [table.name if table.world_size > 1 else None for table in tables]
        self.divisor = tables[0].gradient_divisor
        self.dtype = tables[0].weight.dtype
        self.wire_dtype = tables[0].dtype_on_wire
        self.row_bytes = [dim * self.wire_dtype.itemsize for dim in self.dims]
        self.sum_bytes = [x.embedding_vec_size * x.sum_dtype_on_wire.itemsize for x in tables]
        self.key_ends = [-1 if x.table is not None else x.capacity * x.world_size for x in tables]
        self.dedupe = all(table.dedupe for table in tables)
        self.hashed = [t for t, table in enumerate(tables) if table.table is not None]
        numbers = {t: number for number, t in enumerate(self.hashed)}
        self.described = torch.tensor(
            [(numbers.get(t, -1), x.capacity, x.world_size) for t, x in enumerate(tables)],
            device="cpu",
        )
        self.max_norms = {
            t: (x.max_norm, x.norm_type) for t, x in enumerate(tables) if x.max_norm is not None
        }
        initial = [table.initializer.numbers for table in tables]
        self.initializers = torch.tensor(initial, dtype=torch.float64, device="cpu")
        # A module's way to find its attributes takes longer than a small lookup.
        self._parameters: list[Any] = [table._parameters for table in tables]
        self.buffers: list[Any] = [table._buffers for table in tables]
        self._hash_tables: list[Any] = [
            table.table._buffers for table in tables if table.table is not None
        ]
        self._shapes = [(table.capacity, table.embedding_vec_size) for table in tables]
        self.seen = False
        self._process = -1  # that has been found to be one that may insert
        self.features: dict[Any, torch.Tensor] = {}

    @property
    def tables(self) -> list[EmbeddingTable]:
        """The tables, each once."""
        return [cast(EmbeddingTable, table()) for table in self._tables]

    def tensors(self) -> Tensors:
        """The tensors of a lookup, which comes next.

        Raises:
            TypeError, ValueError: a weight that a lookup cannot take.
            RuntimeError: as `EmbeddingTable.prepare`, or as `HashTable.refuse_sharing`.
        """
        weights = self._weights()
        if [weight.shape for weight in weights] != self._shapes:
            for table in self.tables:
                check_weight(table)
        if self.inserts and self._process != os.getpid():  # a fork has all that has been kept
            for table in self.tables:
                if table.table is not None:
                    table.table.refuse_sharing()
            self._process = os.getpid()
        if not self.seen or self._written(weights):
            for table in self.tables:
                table.prepare(self.inserts)
            self.seen = not self.inserts  # which is so once keys are in
        return Tensors(
            weights,
            [buffers["seed"] for buffers in self.buffers],
            [buffers["buckets"] for buffers in self._hash_tables],
            [buffers["hash_seed"] for buffers in self._hash_tables],
            [buffers["size"] for buffers in self._hash_tables],
        )

    def take_gradients(self) -> list[bool]:
        """For each table, whether there will be gradients of a lookup."""
        if not torch.is_grad_enabled():
            return [False] * len(self.dims)
        return [weight.requires_grad for weight in self._weights()]

    def _written(self, weights: list[Any]) -> bool:
        """Look for writes to weights since they were last looked at."""
        try:
            for t in self.hashed:
                weight = weights[t]
                if weight._version != weight.noted_version:
                    return True
        except (AttributeError, RuntimeError):  # one that is no layer's, or has no version
            return True
        return False

    def _weights(self) -> list[Any]:
        try:
            return [parameters["weight"] for parameters in self._parameters]
        except KeyError:  # a parametrization, of which the weight is the result
            return [table.weight for table in self.tables]

    def owners(self) -> tuple[list[torch.Tensor], list[int]]:
        """Maps of owners, each once, and which of them each table has; -1 stands for none.

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

    def grads_or_zeros(
        self, grads: Sequence[torch.Tensor | None], dims: Sequence[int], features: torch.Tensor
    ) -> list[torch.Tensor]:
        """Gradients of all requests; zeros where there is none."""
        given = [grad for grad in grads if grad is not None]
        if len(given) == len(grads):
            return given
        bags = features.new_zeros(len(grads))
        column = features.T
        bags.index_add_(0, column[FeatureColumn.tensor], column[FeatureColumn.bags])
        each = zip(grads, bags.tolist(), self.places, strict=True)
        return [given[0].new_zeros(n * dims[t]) if g is None else g for g, n, t in each]

    def have_keys(self) -> None:
        """Note that keys have been inserted."""
        for table in self.tables:
            table.checked_modes.add(True)
        self.seen = True


class LookupPlan:
    """All that a call needs to know of its tables, any of which may be asked more than once.

    Attributes:
        batches: the tables, by what one call of the ops can take.
        columns: where each of these has its tables, among all of them.
        derived: what a caller has made of the tables for some form of input; see `remember`.
        most_keys: of each table that a rank may ask another one for, if all of them have a limit.
        fits_alone: whether `check_exchange` has found that the tables are those of one process.
    """

    def __init__(self, tables: Sequence[EmbeddingTable]) -> None:
        self._tables = [ref(table) for table in tables]
        self._changes = [table.changes for table in tables]
        positions: dict[tuple[Any, ...], list[int]] = {}
        for i, table in enumerate(tables):
            key = (
                *(table.weight.dtype, table.dtype_on_wire),
                *(table.inserts, table.gradient_divisor),
            )
            positions.setdefault(key, []).append(i)
        self.batches = [
            TableBatch(own, [tables[i] for i in own], inserts)
            for (_, _, inserts, _), own in positions.items()
        ]
        ends = list(itertools.accumulate(len(batch.dims) for batch in self.batches))
        self.columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.derived: dict[Any, Any] = {}
        distinct = [table for batch in self.batches for table in batch.tables]
        most = [t.max_keys_per_rank for t in distinct if t.strategy != "reduce_scatter"]
        limits = [limit for limit in most if limit is not None]
        self.most_keys = limits if len(limits) == len(distinct) else None
        self._signature: tuple[Any, str] = None, ""
        self.fits_alone = False
        # Not kept alive: it ends with its group.
        self._fits: ref[Exchange] | None = None

    def is_of(self, tables: Sequence[EmbeddingTable]) -> bool:
        """True if it is that of these tables, and nothing about them has changed since."""
        return self.tables == tables and self._changes == [table.changes for table in tables]

    def up_to_date(self) -> LookupPlan:
        """Return this plan, or a new one if something about its tables has changed since."""
        tables = self.tables
        return self if self.is_of(tables) else LookupPlan(tables)

    @property
    def tables(self) -> list[EmbeddingTable]:
        """A table for each request."""
        return [cast(EmbeddingTable, table()) for table in self._tables]

    def signature(self) -> str:
        """The facts that all ranks must agree on before they look something up.

        Raises:
            RuntimeError: a table has been overwritten by that of another rank.
            ValueError: a table's owners has something that is no rank.
        """
        # All that may have changed, as far as it takes to see that nothing has.
        buffers = [of_table for batch in self.batches for of_table in batch.buffers]
        # In one piece, since on a device each reading waits for it.
        numbers = torch.cat([b[name] for b in buffers for name in ("seed", "shard")]).tolist()
        maps = [owners for batch in self.batches for owners in batch.owners()[0]]
        versions = [-1 if owners.is_inference() else owners._version for owners in maps]
        taking = [taken for batch in self.batches for taken in batch.take_gradients()]
        now = numbers, versions, taking
        if self._signature[0] != now:
            tables = [table for batch in self.batches for table in batch.tables]
            of_tables = {
                table: table.signature(numbers[3 * i], numbers[3 * i + 1 : 3 * i + 3], taking[i])
                for i, table in enumerate(tables)
            }
            self._signature = now, ", ".join([of_tables[table] for table in self.tables])
        return self._signature[1]

    def check_exchange(self, exchange: Exchange | None) -> None:
        """Check that this is what all tables were made for, and have in common.

        Raises:
            RuntimeError: a table was made on another rank, or for another number of them.
            ValueError: the tables have two process groups or devices.
        """
        fits = self.fits_alone if exchange is None else self._fits and self._fits() is exchange
        if fits:
            return
        asked = self.tables
        first = asked[0]
        group, device = first.process_group, first.weight.device
        ranks = (exchange.rank, exchange.world_size) if exchange else (0, 1)
        for table in asked:
            alike = table.process_group is group and table.weight.device == device
            own = exchange if alike else table.process_exchange()
            if own is not exchange or (table.rank, table.world_size) != ranks:
                table.check_ranks(own)
                raise ValueError(
                    f"{table.name} and {first.name} have two process groups or devices"
                )
        if exchange is None:
            self.fits_alone = True
        else:
            self._fits = ref(exchange)


def remember(values: dict[Any, Any], form: Any, value: Any) -> None:
    """Keep a value that follows from some form of input."""
    if len(values) >= _MOST_FORMS:
        values.clear()
    values[form] = value


class PlanCache:
    """The plan of a caller's last call. A copy of the caller begins anew."""

    def __init__(self) -> None:
        self._plan: LookupPlan | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PlanCache:
        return PlanCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCache, ()

    def plan_for(self, tables: Sequence[EmbeddingTable]) -> LookupPlan:
        """The plan of a call of these tables.

        Raises:
            RuntimeError: a table is on meta.
        """
        plan = self._plan
        if plan is None or not plan.is_of(tables):
            plan = self._plan = LookupPlan(tables)
        return plan
