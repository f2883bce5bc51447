"""What a lookup needs of its tables, and what of that stays the same from call to call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import ref

import torch

from ...distributed.exchange import Exchange
from ..request import check_weight

if TYPE_CHECKING:
    from ..shard import ShardedTable

# What is kept for inputs of different forms, of different batch sizes for one.
_MOST_FORMS = 64


class Tensors(NamedTuple):
    """What the ops are to know of several tables; the last three of those with a hash table."""

    weights: list[torch.Tensor]
    seeds: list[torch.Tensor]
    buckets: list[torch.Tensor]
    hash_seeds: list[torch.Tensor]
    sizes: list[torch.Tensor]


class Alike:
    """Tables of one dtype, all of which insert keys or none: those of one call of the ops.

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
        self, positions: Sequence[int], asked: Sequence[ShardedTable], inserts: bool
    ) -> None:
        self.positions = positions
        self.inserts = inserts
        places: dict[ShardedTable, int] = {}
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
    def tables(self) -> list[ShardedTable]:
        """The tables, each once."""
        return [cast("ShardedTable", table()) for table in self._tables]

    def tensors(self) -> Tensors:
        """The tensors of a lookup, which comes next.

        Raises:
            TypeError, ValueError: a weight that a lookup cannot take.
            RuntimeError: as `ShardedTable.prepare`, or as `HashTable.refuse_sharing`.
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
        if not self.seen:
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

    def filled(
        self, grads: Sequence[torch.Tensor | None], dims: Sequence[int], features: torch.Tensor
    ) -> list[torch.Tensor]:
        """The gradients of requests, with zeros for those that there are not."""
        given = [grad for grad in grads if grad is not None]
        if len(given) == len(grads):
            return given
        bags = features.new_zeros(len(grads))
        bags.index_add_(0, features[:, 6], features[:, 3])
        each = zip(grads, bags.tolist(), self.places, strict=True)
        return [given[0].new_zeros(n * dims[t]) if g is None else g for g, n, t in each]

    def have_keys(self) -> None:
        """Note that keys have been inserted."""
        for table in self.tables:
            table.looked_at.add(True)
        self.seen = True


class Tables:
    """Tables that are asked in one call, in this order; any of them more than once.

    Attributes:
        alike: the tables by what one call of the ops can take.
        columns: where each of these has its tables, among all of them.
        derived: what a caller has made of the tables for some form of input; see `keep`.
        most_keys: of each table that a rank may ask another one for, if all of them have a limit.
    """

    def __init__(self, asked: Sequence[ShardedTable]) -> None:
        self._asked = [ref(table) for table in asked]
        self._changes = [table.changes for table in asked]
        positions: dict[tuple[Any, ...], list[int]] = {}
        for i, table in enumerate(asked):
            key = (
                *(table.weight.dtype, table.dtype_on_wire),
                *(table.inserts, table.gradient_divisor),
            )
            positions.setdefault(key, []).append(i)
        self.alike = [
            Alike(own, [asked[i] for i in own], inserts)
            for (_, _, inserts, _), own in positions.items()
        ]
        ends = list(itertools.accumulate(len(alike.dims) for alike in self.alike))
        self.columns = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.derived: dict[Any, Any] = {}
        tables = [table for alike in self.alike for table in alike.tables]
        most = [table.max_keys_per_rank for table in tables if table.strategy != "reduce_scatter"]
        limits = [limit for limit in most if limit is not None]
        self.most_keys = limits if len(limits) == len(tables) else None
        self._plan: tuple[Any, str] = None, ""
        self._fits_alone = False
        # Not kept alive: it ends with its group.
        self._fits: ref[Exchange] | None = None

    def are(self, asked: Sequence[ShardedTable]) -> bool:
        """Whether these are the tables, and nothing has been changed about them."""
        return self.asked == asked and self._changes == [table.changes for table in asked]

    def up_to_date(self) -> Tables:
        """These, or those made anew, if something has been changed since."""
        asked = self.asked
        return self if self.are(asked) else Tables(asked)

    @property
    def asked(self) -> list[ShardedTable]:
        """A table for each request."""
        return [cast("ShardedTable", table()) for table in self._asked]

    def plan(self) -> str:
        """What all ranks must agree on before they look something up.

        Raises:
            RuntimeError: a table has been overwritten by that of another rank.
            ValueError: a table's owners has something that is no rank.
        """
        # All that may have changed, as far as it takes to see that nothing has.
        buffers = [of_table for alike in self.alike for of_table in alike.buffers]
        # In one piece, since on a device each reading waits for it.
        numbers = torch.cat([b[name] for b in buffers for name in ("seed", "shard")]).tolist()
        maps = [owners for alike in self.alike for owners in alike.owners()[0]]
        versions = [-1 if owners.is_inference() else owners._version for owners in maps]
        taking = [taken for alike in self.alike for taken in alike.take_gradients()]
        now = numbers, versions, taking
        if self._plan[0] != now:
            tables = [table for alike in self.alike for table in alike.tables]
            of_tables = {
                table: table.plan(numbers[3 * i], numbers[3 * i + 1 : 3 * i + 3], taking[i])
                for i, table in enumerate(tables)
            }
            self._plan = now, ", ".join([of_tables[table] for table in self.asked])
        return self._plan[1]

    def check_exchange(self, exchange: Exchange | None) -> None:
        """Check that this is what all tables were made for, and have in common.

        Raises:
            RuntimeError: a table was made on another rank, or for another number of them.
            ValueError: the tables have two process groups or devices.
        """
        fits = self._fits_alone if exchange is None else self._fits and self._fits() is exchange
        if fits:
            return
        asked = self.asked
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
            self._fits_alone = True
        else:
            self._fits = ref(exchange)


def keep(values: dict[Any, Any], form: Any, value: Any) -> None:
    """Keep a value that follows from some form of input."""
    if len(values) >= _MOST_FORMS:
        values.clear()
    values[form] = value


class Kept:
    """The `Tables` of a caller's last call. A copy of the caller begins anew."""

    def __init__(self) -> None:
        self._tables: Tables | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return Kept()

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def of(self, asked: Sequence[ShardedTable], exchange: Exchange | None) -> Tables:
        """Those of this call; see `Tables.check_exchange`."""
        tables = self._tables
        if tables is None or not tables.are(asked):
            tables = self._tables = Tables(asked)
        tables.check_exchange(exchange)
        return tables
