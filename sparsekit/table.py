"""A hash table from int64 keys to rows 0, 1, 2, ..., whose state is plain tensors."""

import math
from typing import cast

import torch

from . import ops
from .errors import TableFullError, check_int
from .memory import prefer_huge_pages
from .ops._checks import KEY_DTYPES
from .ops.hash_table import SLOTS_PER_BUCKET

# Keys and table have been checked when this is called.
_find = torch.ops.sparsekit.hash_table_find.default


class HashTable(torch.nn.Module):
    """Maps any int64 keys to dense row numbers in order of first occurrence.

    The state is two buffers, so ``state_dict``, ``to`` and ``deepcopy`` work as for any module:
    ``buckets`` int64 ``[num_buckets, 8]`` (one bucket is one 64-byte line with 5 slots) and
    ``size`` int64 ``[1]``. Any number of threads may find at the same time; while one inserts, no
    other may use the table.

    Args:
        capacity: most keys it can hold, in [1, 2^31 - 1]. It holds exactly so many.
        device: where the buffers live.
        load_factor: share of slots in use when full, in (0, 1]. Lower is faster and larger: a row
            takes 12.8 / load_factor bytes.
        name: how errors call it.

    Raises:
        TypeError: a capacity that is no int, or a load_factor that is no number.
        ValueError: one of them out of range.

    Example:
        >>> table = HashTable(capacity=1000)
        >>> table.find_or_insert(torch.tensor([42, -7, 42]))
        tensor([0, 1, 0])
        >>> table.find(torch.tensor([-7, 5]))
        tensor([ 1, -1])
    """

    buckets: torch.Tensor
    size: torch.Tensor

    def __init__(
        self,
        capacity: int,
        *,
        device: torch.device | str | None = None,
        load_factor: float = 0.6,
        name: str = "HashTable",
    ) -> None:
        super().__init__()
        self.capacity = check_int(name, "capacity", capacity, 1, 2**31 - 1)
        if not isinstance(load_factor, (float, int)):
            raise TypeError(f"{name}: load_factor must be a number, got {load_factor!r}")
        if not 0 < load_factor <= 1:
            raise ValueError(f"{name}: load_factor must be in (0, 1], got {load_factor}")
        self.load_factor = load_factor
        self.name = name
        self.rank = 0  # whose shard this is, for errors
        num_buckets = math.ceil(self.capacity / (SLOTS_PER_BUCKET * load_factor))
        buckets = torch.empty(num_buckets, 8, dtype=torch.int64, device=device)
        self.register_buffer("buckets", prefer_huge_pages(buckets))
        self.register_buffer("size", torch.zeros(1, dtype=torch.int64, device=device))
        ops.hash_table_clear_(self.buckets)

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows of keys: int64 in the shape of keys (int64 or int32, any shape), -1 = absent."""
        self._check_keys(keys)
        buckets, _ = self._state()
        if keys.dim() == 1:
            return _find(buckets, keys)
        return _find(buckets, keys.reshape(-1)).view(keys.shape)

    def find_or_insert(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows of keys; absent keys get the next free rows, in order of first occurrence.

        Args:
            keys: int64 or int32, any shape, any values, repeats allowed.

        Returns:
            int64 in the shape of keys.

        Raises:
            TableFullError: more new keys than free rows; the table is as it was.
            TypeError, ValueError: keys is no such tensor, or lies on another device.
        """
        self._check_keys(keys)
        if keys.dim() == 1:
            return self.find_or_insert_with_status(keys)[0]
        return self.find_or_insert_with_status(keys.reshape(-1))[0].view(keys.shape)

    def find_or_insert_with_status(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`find_or_insert` of 1-D keys, and int64 ``[2]`` that begins with the size before it."""
        rows, status = ops.hash_table_find_or_insert_(*self._state(), keys, self.capacity)
        before, entries_refused = status.tolist()
        if entries_refused < 0:  # only on a device; the CPU's op raises by itself
            raise ValueError(
                f"{self.name}: the table is damaged: its size is {before} of {self.capacity}, and "
                f"no slot was free for the new keys"
            )
        if entries_refused > 0:
            refused = len(ops.unique(keys[rows < 0])[0])
            raise TableFullError(self.name, self.rank, len(self), self.capacity, refused)
        return rows, status

    def _check_keys(self, keys: torch.Tensor) -> None:
        if not isinstance(keys, torch.Tensor):
            raise TypeError(f"{self.name}: keys must be a tensor, got {type(keys).__name__}")
        if keys.dtype not in KEY_DTYPES:
            raise TypeError(f"{self.name}: keys must be int64 or int32, got {keys.dtype}")
        buckets, _ = self._state()
        if keys.device != buckets.device:
            raise ValueError(
                f"{self.name}: keys is on {keys.device}, the table on {buckets.device}"
            )

    def _state(self) -> tuple[torch.Tensor, torch.Tensor]:
        # A module's way to find its attributes takes longer than a small lookup in the table.
        buffers = cast(dict[str, torch.Tensor], self._buffers)
        return buffers["buckets"], buffers["size"]

    def keys(self) -> torch.Tensor:
        """All keys, int64 ``[len(table)]``; the key of row i is at position i."""
        return ops.hash_table_keys(self.buckets, self.size)

    def __len__(self) -> int:
        return int(self.size)

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    def extra_repr(self) -> str:
        """Size, capacity and load factor."""
        return f"size={len(self)}, capacity={self.capacity}, load_factor={self.load_factor}"
