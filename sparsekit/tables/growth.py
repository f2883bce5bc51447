"""Grows the index of a hash table in small steps, so that no lookup takes long."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from .. import ops
from ..device_rooms import DEVICES
from ..errors import TableFullError
from ..memory import prefer_huge_pages
from ..ops.hash_table import SLOTS_PER_BUCKET
from . import saved_state as saved
from .counter import Counter
from .rows_of import RowsOf

# Smallest capacity that grows in steps. A smaller table grows at once, in less than a millisecond.
_STEPWISE = 1 << 16
# Fraction of the capacity C that is in use when work on a larger index begins.
_BEGIN = 0.7
# Buckets to clear or to copy for each new key: 2/3 C are cleared and C/3 copied while C/4 keys
# are added, so the index is replaced when 0.95 C rows are in use. Starting earlier wastes room.
_BUCKETS_PER_KEY = 4
# Additional buckets to clear or to copy in each lookup with new keys.
_LEAST_BUCKETS = 1024
# Maximum number of rows to bring into reach ahead of need.
_ROWS_AHEAD = 1 << 14

# Counts growth steps of all tables.
changes_of_growth = Counter()


def new_buckets(
    capacity: int, load_factor: float, device: torch.device | str | None
) -> torch.Tensor:
    """Return uninitialized buckets for this number of rows.

    Raises:
        RuntimeError: there is no memory for them.
    """
    num_buckets = math.ceil(capacity / (SLOTS_PER_BUCKET * load_factor))
    return prefer_huge_pages(torch.empty(num_buckets, 8, dtype=torch.int64, device=device))


class Growth:
    """A larger index being built: it is cleared, and then gets all keys from the one it replaces.

    Keys inserted before it has been cleared are copied with the others; keys inserted later go into
    both indexes.

    Attributes:
        before: buckets of the index to replace.
        buckets: buckets of the larger index.
        writes: `CanGrow._writes` of the index to replace; lookups do not change it.
        capacity: largest number of rows in the larger index.
        rows: number of rows in use at the last step; -1 if a step was interrupted, since it is then
            unknown which keys have been copied.
    """

    def __init__(
        self,
        before: torch.Tensor,
        buckets: torch.Tensor,
        writes: int | None,
        capacity: int,
        rows: int,
    ) -> None:
        self.before = before
        self.buckets = buckets
        self.writes = writes
        self.capacity = capacity
        self.rows = rows
        self._cleared = self._copied = 0
        self._rows_to_copy = 0

    @property
    def takes_keys(self) -> bool:
        """Return whether new keys must be inserted into the larger index too."""
        return self._cleared == len(self.buckets)

    @property
    def is_done(self) -> bool:
        """Return whether the larger index has all keys."""
        return self.takes_keys and self._copied == len(self.before)

    def step(self, hash_seed: torch.Tensor, rows: int) -> None:
        """Continue building the index after a lookup that left this number of rows in use."""
        count = _LEAST_BUCKETS + _BUCKETS_PER_KEY * (rows - self.rows)
        self.rows = -1
        if self.takes_keys:
            self._copy(hash_seed, count)
        else:
            self._clear(count, rows)
        self.rows = rows

    def finish(self, hash_seed: torch.Tensor) -> None:
        """Do all remaining work on the larger index."""
        rows, self.rows = self.rows, -1
        if not self.takes_keys:
            self._clear(len(self.buckets), rows)
        self._copy(hash_seed, len(self.before))

    def _clear(self, count: int, rows: int) -> None:
        end = min(self._cleared + count, len(self.buckets))
        ops.hash_table_clear_(self.buckets[self._cleared : end])
        self._cleared, self._rows_to_copy = end, rows

    def _copy(self, hash_seed: torch.Tensor, count: int) -> None:
        part = self.before[self._copied : self._copied + count]
        if len(part):
            ops.hash_table_copy_(self.buckets, part, hash_seed, self._rows_to_copy)
            self._copied += len(part)


class CanGrow(torch.nn.Module):
    """Base of `HashTable`: makes room for more rows, which keep their numbers.

    Attributes:
        name: name of the table, for error messages.
        rank: rank that holds this shard.
        capacity: number of rows that there is room for.
        max_capacity: largest capacity that the table may grow to.
        reach: number of leading rows that optimizers have initial states for: those in use and some
            more. Later rows have never been in use. On a device, it is the number of rows with
            memory, at least the capacity, since the host does not know which are in use.
        load_factor: fraction of the buckets' places that a full table uses.
        rows_of: the table's reference to the layer whose rows it assigns.
    """

    name: str
    rank: int
    capacity: int
    max_capacity: int
    reach: int
    load_factor: float
    # An embedding layer replaces this; see `EmbeddingTable`.
    rows_of = RowsOf()
    _growth: Growth | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return buckets, hash_seed and size, the tensors that the ops work on."""
        raise NotImplementedError

    def reserve(self, rows: int) -> None:
        """Raise the capacity to at least `rows`; rows keep their numbers.

        The capacity at least doubles, as far as max_capacity and memory allow. On CUDA the call
        waits for the device.

        Raises:
            TableFullError: there is no memory for a larger index, or rows is above max_capacity;
                the table is unchanged.
        """
        if rows <= self.capacity:
            self.extend_reach(rows)
            return
        size = int(self.tensors()[2])
        if rows > self.max_capacity:
            raise TableFullError(self.name, self.rank, size, self.max_capacity, rows - size)
        growth = self._current_growth(size)
        if growth is None or growth.capacity < rows:
            try:
                growth = self._new_growth(max(rows, 2 * self.capacity), size)
            except (RuntimeError, OSError):
                try:  # there may be memory for fewer rows
                    growth = self._new_growth(rows, size)
                except (RuntimeError, OSError) as error:
                    told = self.name, self.rank, size, self.capacity, rows - size
                    raise TableFullError(*told) from error
        growth.finish(self.tensors()[1])
        self._replace(growth)
        self.extend_reach(rows)

    def extend_reach(self, rows: int) -> None:
        """Bring the first `rows` rows into reach."""
        if rows > self.reach:
            # Rows beyond the capacity have no memory on a device, and no space in a file.
            ahead = min(2 * self.reach, self.reach + _ROWS_AHEAD, self.capacity)
            if self.tensors()[0].device.type in DEVICES:
                ahead = self.capacity
            reach = min(max(rows, ahead), self.max_capacity)
            self.rows_of.open(self.reach, reach)
            self.reach = reach
            changes_of_growth.next()

    def grow_on(self, before: int, after: int) -> None:
        """Do part of the work of growing, after a lookup has inserted keys.

        Args:
            before: rows in use before the lookup.
            after: rows in use after it.
        """
        self.extend_reach(after)
        growth = self._current_growth(before)
        if growth is None:
            many = after >= _BEGIN * self.capacity and self.capacity >= _STEPWISE
            if not many or self.capacity == self.max_capacity:
                return
            try:
                growth = self._growth = self._new_growth(2 * self.capacity, after)
            except (RuntimeError, OSError):  # no memory or disk space: not an error yet
                return
        changes_of_growth.next()
        growth.step(self.tensors()[1], after)
        changes_of_growth.next()
        if growth.is_done:
            self._replace(growth)

    def larger(self) -> torch.Tensor | None:
        """Return the larger index's buckets if new keys must go there too, else None."""
        growth = self._current_growth(None)
        return growth.buckets if growth is not None and growth.takes_keys else None

    def stop_growing(self) -> None:
        """Discard the larger index being built, before a change that it would miss."""
        if self._growth is not None:
            changes_of_growth.next()
            self._growth = None

    def _current_growth(self, rows: int | None) -> Growth | None:
        """Return the growth in progress, but discard it if it has missed a change to the table."""
        growth = self._growth
        if growth is not None and (
            growth.before is not self.tensors()[0]
            or growth.writes != self._writes()
            or rows not in (None, growth.rows)
        ):
            growth = None
            self.stop_growing()
        return growth

    def _writes(self) -> int | None:
        """Return a number that changes when code other than a lookup writes to the index."""
        buckets, hash_seed, _ = self.tensors()
        if buckets.is_inference() or hash_seed.is_inference():
            return None
        return buckets._version + hash_seed._version

    def _new_growth(self, capacity: int, rows: int) -> Growth:
        capacity, buckets = min(capacity, self.max_capacity), self.tensors()[0]
        self.rows_of.allocate(capacity)  # before a lookup writes to the rows
        larger = new_buckets(capacity, self.load_factor, buckets.device)
        if buckets.device.type in DEVICES:
            self.extend_reach(capacity)
        return Growth(buckets, larger, self._writes(), capacity, rows)

    def _replace(self, growth: Growth) -> None:
        own = cast(dict[str, Any], self._buffers)
        changes_of_growth.next()  # counted before and after, in case of an interrupt in between
        saved.replace_all(
            [
                (own, {"buckets": growth.buckets}),
                (self.__dict__, {"capacity": growth.capacity, "_growth": None}),
            ]
        )
        changes_of_growth.next()
        self.rows_of.have_grown()
