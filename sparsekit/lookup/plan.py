"""Plans of lookups: facts about the tables, cached from call to call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, cast
from weakref import ref

import torch

from .._reports import errors_are_deferred
from ..distributed.exchange import Exchange
from ..tables.embedding_table import EmbeddingTable, table_changes
from .table_batch import TableBatch

_changes = operator.attrgetter("changes")

# Maximum number of input forms to cache; the batch size is part of a form.
_MOST_FORMS = 64


class LookupPlan:
    """The facts that a call needs about its tables; a table may occur more than once.

    Attributes:
        batches: the tables, grouped into batches that one call of an op can handle.
        columns: for each batch, the range of its tables among all tables.
        derived: values that a caller has derived from the tables for a form of input; see
            `remember`.
        strategies: the distinct values of the tables' option `strategy`.
        most_keys: for each table, the maximum number of keys that a rank may request from another
            rank; None unless all tables have a limit.
        fits_alone: whether `check_exchange` has found that all tables live on a single process.
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
        self.strategies = {table.strategy for table in distinct}
        most = [t.max_keys_per_rank for t in distinct if t.strategy != "reduce_scatter"]
        limits = [limit for limit in most if limit is not None]
        self.most_keys = limits if len(limits) == len(distinct) else None
        self._signature: tuple[Any, str] = None, ""
        # The seeds and shards that `signature` last read, the tensors they were read from, and the
        # versions of these tensors.
        self._numbers: list[int] = []
        self._words: list[torch.Tensor] = []
        self._versions: list[int | None] = []
        self.fits_alone = False
        # A weak reference, so that an exchange is freed together with its group.
        self._fits: ref[Exchange] | None = None

    def is_of(self, tables: Sequence[EmbeddingTable]) -> bool:
        """Return whether the plan was made for these tables and none has changed since."""
        # A living table has one weak reference without a callback, so equal ones are identical.
        return (
            list(map(ref, tables)) == self._tables and list(map(_changes, tables)) == self._changes
        )

    def up_to_date(self) -> LookupPlan:
        """Return this plan, or a new one if a table has changed since the plan was made."""
        tables = self.tables
        return self if self.is_of(tables) else LookupPlan(tables)

    @property
    def first(self) -> EmbeddingTable:
        """The table of the first request."""
        return cast(EmbeddingTable, self._tables[0]())

    @property
    def tables(self) -> list[EmbeddingTable]:
        """The table of each request."""
        return [cast(EmbeddingTable, table()) for table in self._tables]

    def signature(self) -> str:
        """Return a text of the facts that all ranks must agree on before a lookup.

        Raises:
            RuntimeError: a table has been overwritten by the table of another rank.
            ValueError: an entry of a table's owners is not a rank.
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
            self._signature = now, ", ".join([of_tables[table] for table in self.tables])
        return self._signature[1]

    def check_exchange(self, exchange: Exchange | None) -> None:
        """Check that all tables were made for this exchange.

        Raises:
            RuntimeError: a table was made on another rank, or for another number of ranks.
            ValueError: the tables have different process groups or devices.
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


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return the version of each tensor, or None for an inference tensor, which has no version."""
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def remember(values: dict[Any, Any], form: Any, value: Any) -> None:
    """Cache a value that depends only on the form of the input."""
    if len(values) >= _MOST_FORMS:
        values.clear()
    values[form] = value


class PlanCache:
    """A cache that holds the plan of its owner's last call; a copy starts empty."""

    def __init__(self) -> None:
        self._plan: LookupPlan | None = None
        # The tables of the last call if they were several, and the changes of all tables till then.
        self._tables: Sequence[EmbeddingTable] | None = None
        self._changes = -1

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanCache, ()

    def plan_for(self, tables: Sequence[EmbeddingTable]) -> LookupPlan:
        """Return the plan for a lookup in these tables.

        Raises:
            RuntimeError: a table is on the meta device.
        """
        plan, changes = self._plan, table_changes.count
        # A group passes the same list, and does not change it.
        if plan is not None and tables is self._tables and changes == self._changes:
            return plan
        if plan is None or not plan.is_of(tables):
            plan = self._plan = LookupPlan(tables)
        self._tables, self._changes = tables if len(tables) > 1 else None, changes
        return plan
