"""A hash table from int64 keys to rows 0, 1, 2, ..., whose state is plain tensors."""

from __future__ import annotations

import os
import secrets
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version

from .. import ops
from .._pybind import RowBound
from ..errors import TableFullError, check_int
from ..ops._checks import KEY_DTYPES
from ..ops.hash_table import SLOTS_PER_BUCKET
from . import saved_state as saved
from .growth import CanGrow, new_buckets
from .kept_tensors import release_kept
from .rows_of import RowsOf  # noqa: F401 (where pickles of older versions look for it)

# Ops without their Python wrappers, since the keys and the table have already been checked.
_find = torch.ops.sparsekit.hash_table_find.default
_find_or_insert = torch.ops.sparsekit.hash_table_find_or_insert_.default


class HashTable(CanGrow):
    """A map from int64 keys to dense row numbers, in order of first occurrence.

    The state is three buffers, so ``state_dict``, ``to`` and ``deepcopy`` work as for any module:
    ``buckets`` int64 ``[num_buckets, 8]`` (a bucket takes 64 bytes and has places for 5 keys),
    ``hash_seed`` int64 ``[1]``, a random number that is needed to read the buckets, and ``size``
    int64 ``[1]``. Rows do not depend on the seed. Any number of threads may call `find` at the same
    time; while one thread inserts, no other thread may use the table. ``load_state_dict`` accepts
    the state of a table of any capacity, if its keys fit. It refuses a damaged state, and leaves
    the table unchanged.

    Args:
        capacity: number of keys that there is room for, in [1, 2^31 - 1].
        device: device of the buffers.
        load_factor: fraction of the buckets' places that a full table uses, in (0, 1]. A lower
            value is faster and takes more memory: 12.8 / load_factor bytes per row.
        name: name of the table, for error messages.
        max_capacity: largest number of keys, in [capacity, 2^31 - 1], that the table may grow to
            when keys do not fit; None means capacity.

    Raises:
        TypeError: capacity is not an int, or load_factor is not a number.
        ValueError: capacity or load_factor is out of range.

    Example:
        >>> table = HashTable(capacity=1000)
        >>> table.find_or_insert(torch.tensor([42, -7, 42]))
        tensor([0, 1, 0])
        >>> table.find(torch.tensor([-7, 5]))
        tensor([ 1, -1])
    """

    buckets: torch.Tensor
    hash_seed: torch.Tensor
    size: torch.Tensor

    def __init__(
        self,
        capacity: int,
        *,
        device: torch.device | str | None = None,
        load_factor: float = 0.6,
        name: str = "HashTable",
        max_capacity: int | None = None,
    ) -> None:
        super().__init__()
        self.capacity = check_int(name, "capacity", capacity, 1, 2**31 - 1)
        most = capacity if max_capacity is None else max_capacity
        self.max_capacity = check_int(name, "max_capacity", most, capacity, 2**31 - 1)
        self.reach = self.capacity
        if not isinstance(load_factor, (float, int)):
            raise TypeError(f"{name}: load_factor must be a number, got {load_factor!r}")
        if not 0 < load_factor <= 1:
            raise ValueError(f"{name}: load_factor must be in (0, 1], got {load_factor}")
        self.load_factor = load_factor
        self.name = name
        self.rank = 0  # rank that holds this shard, for error messages
        self.register_buffer("buckets", new_buckets(self.capacity, load_factor, device))
        for word in ("hash_seed", "size"):
            self.register_buffer(word, torch.empty(1, dtype=torch.int64, device=device))
        # If several processes share the table's memory, only this process may insert keys.
        self._maker = os.getpid()
        self.row_bound = RowBound()
        self.clear_()

    def refuse_sharing(self) -> None:
        """Raise RuntimeError if this process shares the memory of another process's table.

        Processes do not wait for one another's insertions, so two keys could get the same row.
        """
        buckets = self.tensors()[0]
        shares = buckets.is_cpu and (buckets.is_shared() or self.rows_of.in_files())
        if shares and self._maker != os.getpid():
            raise RuntimeError(
                f"{self.name}: processes share this table's memory, and only process "
                f"{self._maker}, which made it, may insert keys; this is process {os.getpid()}. "
                f"Look keys up in evaluation here (eval(), or insert=False), and train in several "
                f"processes as ranks: see docs/trainers.md"
            )

    def _note_maker(self) -> None:
        """Let this process insert keys, unless the table's memory is shared already."""
        if not self.tensors()[0].is_shared():
            self._maker = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        self._note_maker()  # the table may be pickled for another process
        return {**self.__dict__, "_growth": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        added = {"_maker": os.getpid(), "row_bound": RowBound()}
        most = {"max_capacity": state["capacity"], "reach": state["capacity"]}
        super().__setstate__({**added, **most, **state})
        self._note_maker()

    def clear_(self) -> None:
        """Remove all keys."""
        self.stop_growing()
        with self.rows_of.changing():
            ops.hash_table_clear_(self.buckets)
            # Do not use torch's generators, whose sequences belong to the user.
            self.hash_seed.fill_(secrets.randbits(64) - 2**63)
            self.size.zero_()
            self.rows_of.clear_from(0)

    def _apply(self, *args: Any, **kwargs: Any) -> HashTable:
        was_meta = self.buckets.is_meta
        self.stop_growing()
        self._note_maker()  # share_memory calls this method
        super()._apply(*args, **kwargs)
        if was_meta and not self.buckets.is_meta:
            self.clear_()  # memory is uninitialized after a move from meta
        return self

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return int64 rows in the shape of keys (int64 or int32, any shape); -1 means absent."""
        self._check_keys(keys)
        buckets, hash_seed, _ = self.tensors()
        if keys.dim() == 1:
            return _find(buckets, hash_seed, keys)
        return _find(buckets, hash_seed, keys.reshape(-1)).view(keys.shape)

    def find_or_insert(self, keys: torch.Tensor) -> torch.Tensor:
        """Return rows of keys; absent keys get the next free rows, in order of first occurrence.

        Args:
            keys: int64 or int32, any shape, any values, repeats allowed.

        Returns:
            int64 in the shape of keys.

        Raises:
            TableFullError: there are more new keys than free rows; the table is unchanged.
            RuntimeError: another thread is inserting into this table.
            TypeError, ValueError: keys has the wrong type or dtype, or is on another device.
        """
        self._check_keys(keys)
        if keys.dim() == 1:
            return self.find_or_insert_with_status(keys)[0]
        return self.find_or_insert_with_status(keys.reshape(-1))[0].view(keys.shape)

    def make_room_for(self, keys: int) -> bool:
        """On a device, grow if this many new keys might not fit; return whether the table grew.

        The call waits for the device only if the table grows, or might exceed max_capacity. If
        there is no memory to grow, the keys may still fit; only the lookup can tell.
        """
        capacity, size = self.capacity, self.tensors()[2]
        for bound in (self.row_bound.most_for(size), None):
            most = keys + (self._count_rows() if bound is None else bound)
            if most <= self.capacity:
                break
            if bound is not None and most > self.max_capacity:
                continue  # the bound may be far too high
            try:
                self.reserve(int(min(most, self.max_capacity)))
                break
            except TableFullError:
                continue
        return self.capacity != capacity

    def _count_rows(self) -> int:
        """Wait for the device; return the number of rows in use, and record it as the new bound."""
        rows = len(self)
        self.row_bound.learn(rows, self.row_bound.add(self.tensors()[2], 0))
        return rows

    def find_or_insert_with_status(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Insert 1-D keys; return their rows and the status of `hash_table_find_or_insert_`."""
        state = self.tensors()
        self.refuse_sharing()
        self.stop_growing()
        try:
            rows, status = _find_or_insert(*state, keys, self.capacity)
        except RuntimeError as error:
            if "another thread" not in str(error):
                raise
            raise RuntimeError(f"{self.name}: {error}") from None
        increment_version(state)
        before, entries_refused = status.tolist()
        if entries_refused < 0:  # set on CUDA only; the CPU's op raises an error
            raise ValueError(
                f"{self.name}: the table is damaged: its size is {before} of {self.capacity}, and "
                f"no slot was free for the new keys"
            )
        if entries_refused > 0:
            refused = len(ops.unique(keys[rows < 0])[0])
            if self.capacity == self.max_capacity:
                raise TableFullError(self.name, self.rank, len(self), self.capacity, refused)
            self.reserve(len(self) + refused)
            return self.find_or_insert_with_status(keys)
        if self.reach < self.max_capacity:
            self.extend_reach(len(self))
        return rows, status

    def _check_keys(self, keys: torch.Tensor) -> None:
        if not isinstance(keys, torch.Tensor):
            raise TypeError(f"{self.name}: keys must be a tensor, got {type(keys).__name__}")
        if keys.dtype not in KEY_DTYPES:
            raise TypeError(f"{self.name}: keys must be int64 or int32, got {keys.dtype}")
        buckets = self.tensors()[0]
        if keys.device != buckets.device:
            raise ValueError(
                f"{self.name}: keys is on {keys.device}, the table on {buckets.device}"
            )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return buckets, hash_seed and size, the tensors that the ops work on."""
        # Read the dict, since attribute access on a module takes longer than a small lookup.
        buffers = cast(dict[str, torch.Tensor], self._buffers)
        return buffers["buckets"], buffers["hash_seed"], buffers["size"]

    def restored(
        self, entries: dict[str, Any], device: torch.device | None
    ) -> dict[str, torch.Tensor]:
        """Return new buffers for this table with the keys and rows of a saved state.

        Only keys and rows are taken from the state; the keys are inserted into new buckets. The
        saved table may therefore have any number of buckets, and the new buckets are always
        consistent.

        Args:
            entries: the state, by the names of the buffers.
            device: device of the new buffers; None means the device of the saved buffers.

        Raises:
            TypeError, ValueError: the state is damaged or does not fit.
        """
        saved.refuse_meta(self.name, device)
        buckets = saved.entry(self.name, entries, "buckets", (torch.int64,), (None, 8))
        hash_seed = saved.entry(self.name, entries, "hash_seed", (torch.int64,), (1,))
        size = int(saved.entry(self.name, entries, "size", (torch.int64,), (1,)))
        if not 0 <= size <= self.max_capacity:
            raise ValueError(
                f"{self.name}: the state has {size} rows in use, which must be in [0, "
                f"{self.max_capacity}], the capacity here"
            )
        keys = self._keys_by_row(buckets, size).to(device or buckets.device)
        restored = self.buffers_of(keys, hash_seed.to(keys.device, copy=True))
        if int(restored["size"]) != size:
            raise ValueError(f"{self.name}: the state is damaged: a key has two rows")
        return restored

    def buffers_of(self, keys: torch.Tensor, hash_seed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return new buffers that map these keys to the rows 0, 1, 2, ...

        Raises:
            TableFullError: there are too many keys.
        """
        self.stop_growing()  # the keys of this table are about to be replaced
        self._make_room(len(keys))
        buckets = new_buckets(self.capacity, self.load_factor, keys.device)
        size = torch.zeros(1, dtype=torch.int64, device=keys.device)
        ops.hash_table_clear_(buckets)
        ops.hash_table_find_or_insert_(buckets, hash_seed, size, keys, self.capacity)
        return {"buckets": buckets, "hash_seed": hash_seed, "size": size}

    def _make_room(self, rows: int) -> None:
        """Make room as `reserve` does, even in a table that is on meta or uninitialized."""
        buckets, _, size = self.tensors()
        if rows > self.capacity and (buckets.is_meta or not 0 <= int(size) <= self.capacity):
            capacity = min(max(rows, 2 * self.capacity), self.max_capacity)
            self.rows_of.allocate(capacity)
            made = {"buckets": new_buckets(capacity, self.load_factor, buckets.device)}
            saved.replace_all([(self._buffers, made), (self.__dict__, {"capacity": capacity})])
            if not buckets.is_meta:
                self.clear_()
            self.rows_of.have_grown()
            self.extend_reach(rows)
        else:
            self.reserve(rows)

    def _keys_by_row(self, buckets: torch.Tensor, size: int) -> torch.Tensor:
        keys = torch.empty(size, dtype=torch.int64, device=buckets.device)
        found = torch.zeros(size, dtype=torch.bool, device=buckets.device)
        count = 0
        for part in buckets.split(1 << 20):  # in parts, so that temporary memory stays small
            rows = part[:, SLOTS_PER_BUCKET:].contiguous().view(torch.int32)[:, :SLOTS_PER_BUCKET]
            used = rows >= 0
            rows = rows[used].to(torch.int64)
            count += len(rows)
            if bool((rows >= size).any()):
                raise ValueError(
                    f"{self.name}: the state is damaged: a key has row {int(rows.max())}, but "
                    f"{size} rows are in use"
                )
            keys[rows] = part[:, :SLOTS_PER_BUCKET][used]
            found[rows] = True
        if count != size or not bool(found.all()):
            raise ValueError(
                f"{self.name}: the state is damaged: its {size} rows do not have one key each"
            )
        return keys

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_messages: list[str],
    ) -> None:
        rest = strict, missing_keys, unexpected_keys, error_messages
        release_kept()  # so that torch can swap tensors
        entries = saved.entries(state_dict, prefix, self._buffers)
        # If a layer has loaded its table itself, the state has the table's own tensors; skip them.
        if entries and any(entries.get(name) is not own for name, own in self._buffers.items()):
            buffers = cast(dict[str, torch.Tensor], self._buffers)
            assign = local_metadata.get("assign_to_params_buffers", False)
            try:
                restored = self.restored(entries, None if assign else buffers["buckets"].device)
                with self.rows_of.changing():
                    if assign:
                        saved.replace_all([(buffers, restored)])
                    else:
                        saved.copy_all([(buffers[name], new) for name, new in restored.items()])
                    self.rows_of.clear_from(int(restored["size"]))
            except (TypeError, ValueError) as error:
                error_messages.append(str(error))
            state_dict.update({prefix + name: own for name, own in buffers.items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def keys(self) -> torch.Tensor:
        """Return all keys in row order, int64 ``[len(table)]``."""
        return ops.hash_table_keys(*self.tensors())

    def __len__(self) -> int:
        return int(self.size)

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    def extra_repr(self) -> str:
        """Return size, capacity and load factor."""
        size = "?" if self.size.is_meta else len(self)
        return f"size={size}, capacity={self.capacity}, load_factor={self.load_factor}"
