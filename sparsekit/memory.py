"""Controls large blocks of CPU memory: a pool, 2 MiB pages, and untouched zeros."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version

from . import device_rooms
from ._load import OPS_LIBRARY

_library = ctypes.CDLL(str(OPS_LIBRARY))
_library.sparsekit_empty_cache.argtypes = []
_library.sparsekit_empty_cache.restype = ctypes.c_size_t
_library.sparsekit_pool_bytes.argtypes = [ctypes.POINTER(ctypes.c_size_t)] * 3
_library.sparsekit_pool_bytes.restype = None
_library.sparsekit_prefer_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_library.sparsekit_prefer_huge_pages.restype = None


_PAGE, _HUGE_PAGE = mmap.PAGESIZE, 2 << 20
# Smaller tensors are allocated normally, since a process can have only a limited number of
# mappings.
_LEAST_MAPPED = 1 << 20
# A mapping with this flag does not count as memory until it is written to. The number is from
# Linux; Python has had a name for it since 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class MappedMemory(mmap.mmap):
    """Anonymous memory, or a mapped file, for tensors; zero until written to."""

    def __new__(cls, file: int, size: int) -> MappedMemory:
        """Map a file from its start, or anonymous memory if the descriptor is -1."""
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file == -1 else mmap.MAP_SHARED
        return super().__new__(cls, file, size, flags=kind | _NO_RESERVE)

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def zero(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with zeros; pages entirely within it then take no memory."""
        if not tensor.is_contiguous() or tensor.nbytes < _LEAST_MAPPED:
            tensor.zero_()
            return
        begin = tensor.data_ptr() - self.address
        end = begin + tensor.nbytes
        first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
        increment_version([tensor])  # before any write, since an interrupt may stop the writes
        try:
            self.madvise(mmap.MADV_DONTNEED, first, last - first)
        except OSError:  # for example, if pages are locked in memory
            tensor.zero_()
            return
        for start, stop in ((begin, first), (last, end)):
            ctypes.memset(self.address + start, 0, stop - start)

    def parts_written(self, tensor: torch.Tensor) -> Iterator[slice]:
        """Return row ranges that cover at least all nonzero rows of a tensor in this mapping."""
        yield slice(0, len(tensor))

    def first_rows(
        self, tensor: torch.Tensor, rows: int, spaces: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Return the first rows of a tensor in this mapping, in a storage that ends after them.

        Args:
            tensor: the tensor.
            rows: number of rows, at least 1.
            spaces: storages of earlier results, by address; reused for this one if possible.
        """
        begin = tensor.untyped_storage().data_ptr()
        if begin not in spaces:
            count, offset = rows * tensor.stride(0), begin - self.address
            spaces[begin] = torch.frombuffer(self, dtype=tensor.dtype, count=count, offset=offset)
        shape = rows, *tensor.shape[1:]
        return spaces[begin].as_strided(shape, tensor.stride(), tensor.storage_offset())


# The mappings of tensors, by the tensors' addresses. A tensor keeps its mapping alive.
_mappings: WeakValueDictionary[int, MappedMemory] = WeakValueDictionary()


class PoolBytes(NamedTuple):
    """Sizes in bytes of the pool for CPU memory that ops use in blocks of 2 MiB or more.

    Attributes:
        in_use: size of the blocks that tensors are using.
        idle: size of the blocks that are kept for later tensors.
        recent_peak: the largest ``in_use`` while the last 128 to 256 blocks were allocated.
    """

    in_use: int
    idle: int
    recent_peak: int


def pool_bytes() -> PoolBytes:
    """Return the sizes of the memory pool; ``idle <= recent_peak + 64 MiB`` always holds."""
    counts = [ctypes.c_size_t() for _ in PoolBytes._fields]
    _library.sparsekit_pool_bytes(*map(ctypes.byref, counts))
    return PoolBytes(*(count.value for count in counts))


def empty_cache() -> int:
    """Release the memory that sparsekit's ops keep for reuse.

    CPU memory blocks of 2 MiB or more, for outputs and workspaces, are not freed with their
    tensors, but kept for later tensors, since allocating memory can take longer than the op itself.
    Without this call, a block is released once 128 later tensors have been allocated without using
    it. The oldest blocks are also released while idle blocks exceed the recent peak by more than 64
    MiB (see `pool_bytes`). An output in such a block cannot grow: ``resize_`` to more elements
    raises RuntimeError. CUDA memory belongs to torch; use `torch.cuda.empty_cache` to free it.

    Returns:
        The number of bytes released.
    """
    return _library.sparsekit_empty_cache()


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Advise the system to back an untouched CPU tensor with 2 MiB pages, and return the tensor.

    With such pages, access to a random row in a large table rarely has to walk page tables. This is
    only a hint to the system. Tensors on other devices and empty tensors are returned unchanged.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
        _library.sparsekit_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def total_bytes(device: torch.device | None = None) -> int:
    """Return the memory size in bytes of a CUDA device, or of the system for any other device."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * _PAGE


def untouched_zeros(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    first: int | None = None,
) -> torch.Tensor:
    """Return a tensor of zeros; on the CPU, it takes memory only where it is written to.

    Large tensors use 2 MiB pages.

    Args:
        shape: sizes of the dimensions.
        dtype: dtype of the elements.
        device: device of the tensor; None means torch's default.
        first: how many leading rows will be used soon; None means all. On a device only these have
            memory (see `device_rooms`). On the CPU, the first 2 MiB then use small pages, where
            random access takes a little longer.

    Raises:
        RuntimeError: there is not enough memory or address space for the tensor.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    plain = type(like) is torch.Tensor
    if plain and first is not None and like.device.type in device_rooms.DEVICES:
        return device_rooms.new_zeros(shape, dtype, like.device, first)
    size = math.prod(shape) * dtype.itemsize
    if like.device.type != "cpu" or not plain or size < _LEAST_MAPPED:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    try:
        mapping = MappedMemory(-1, size + _HUGE_PAGE)
    except (OSError, OverflowError) as error:
        raise RuntimeError(
            f"no memory for a tensor of shape {list(shape)} and {dtype}, {size:,} bytes: {error}"
        ) from None
    tensor = mapped(mapping, shape, dtype, -mapping.address % _HUGE_PAGE)
    flat = tensor.view(-1)
    prefer_huge_pages(flat if first is None else flat[_HUGE_PAGE // dtype.itemsize :])
    return tensor


def mapped(
    mapping: MappedMemory, shape: Sequence[int], dtype: torch.dtype, offset: int = 0
) -> torch.Tensor:
    """Return a tensor at this byte offset in a mapping; the tensor keeps the mapping alive."""
    tensor = torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=offset)
    _mappings[mapping.address + offset] = mapping
    return tensor.view(tuple(shape))


def untouched_like(
    tensors: Mapping[str, torch.Tensor], rows: int | None = None, first: int | None = None
) -> dict[str, torch.Tensor]:
    """Return `untouched_zeros` shaped like tensors; results share memory if the tensors do.

    Args:
        tensors: tensors with rows that do not overlap.
        rows: number of rows in each result; None means as many as in each tensor.
        first: as in `untouched_zeros`.
    """
    spaces: dict[Any, torch.Tensor] = {}
    made = {}
    for name, tensor in tensors.items():
        shared, count = tensor.untyped_storage()._cdata, len(tensor) if rows is None else rows
        if shared not in spaces:
            space = (count, tensor.stride(0)), tensor.dtype, tensor.device
            spaces[shared] = untouched_zeros(*space, first)
        place = (count, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset()
        made[name] = spaces[shared].as_strided(*place)
    return made


def first_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor; see `first_rows_of`."""
    return first_rows_of({"": tensor}, rows)[""]


def first_rows_of(tensors: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Return the first rows of tensors, in storages that end after them.

    Copying or saving a result's storage then includes only these rows, unlike with
    ``tensor[:rows]``. A tensor not made by `untouched_zeros` gives ``tensor[:rows]``. If tensors
    share memory, so do the results.
    """
    spaces: dict[int, torch.Tensor] = {}
    made = {}
    for name, tensor in tensors.items():
        if not is_mapped(tensor):
            made[name] = tensor[:rows]
        elif rows == 0:
            made[name] = torch.empty_like(tensor[:0])
        elif device_rooms.is_in_room(tensor):
            made[name] = device_rooms.first_rows(tensor, rows, spaces)
        else:
            made[name] = _mapping_of(tensor).first_rows(tensor, rows, spaces)
    return made


def with_length(tensor: torch.Tensor, rows: int, first: int | None) -> torch.Tensor:
    """Return a tensor with this number of rows: a copy of the given rows, followed by zeros.

    Args:
        tensor: the given rows.
        rows: number of rows in the result, at least that of ``tensor``.
        first: as in `untouched_zeros`; at least the number of rows given.
    """
    longer = untouched_zeros((rows, *tensor.shape[1:]), tensor.dtype, tensor.device, first)
    longer[: len(tensor)] = tensor
    return longer


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in memory made by `untouched_zeros`."""
    if device_rooms.is_in_room(tensor):
        return True
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return plain and tensor.untyped_storage().data_ptr() in _mappings


def zero_(tensor: torch.Tensor) -> None:
    """Fill a tensor with zeros; if `untouched_zeros` made it, whole pages then take no memory."""
    if device_rooms.is_in_room(tensor):
        tensor[: device_rooms.rows_with_memory(tensor)].zero_()
    elif is_mapped(tensor):
        _mapping_of(tensor).zero(tensor)
    else:
        tensor.zero_()


def parts_written(tensor: torch.Tensor) -> Iterator[slice]:
    """Return row ranges that cover at least all rows with nonzero values."""
    if is_mapped(tensor) and not device_rooms.is_in_room(tensor):
        yield from _mapping_of(tensor).parts_written(tensor)
    else:
        yield slice(0, device_rooms.rows_with_memory(tensor))


def _mapping_of(tensor: torch.Tensor) -> MappedMemory:
    return _mappings[tensor.untyped_storage().data_ptr()]
