"""Controls large blocks of CPU memory: a pool, 2 MiB pages, and zeros that take no memory."""

import ctypes
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version

from ._load import OPS_LIBRARY

_library = ctypes.CDLL(str(OPS_LIBRARY))
_library.sparsekit_empty_cache.argtypes = []
_library.sparsekit_empty_cache.restype = ctypes.c_size_t
_library.sparsekit_pool_bytes.argtypes = [ctypes.POINTER(ctypes.c_size_t)] * 3
_library.sparsekit_pool_bytes.restype = None
_library.sparsekit_prefer_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_library.sparsekit_prefer_huge_pages.restype = None


_HUGE_PAGE = 2 << 20
# Tensors of fewer bytes are ordinary ones, as the number of mappings of a process is limited.
_LEAST_MAPPED = 1 << 20
# A mapping with this flag does not count as memory until it is written to. The number is Linux's;
# Python names it from 3.13 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# The mappings of `untouched_zeros`, by the address of their tensors. A tensor keeps its mapping.
_mappings: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


class PoolBytes(NamedTuple):
    """Size in bytes of the pool from which ops allocate CPU memory of 2 MiB or more.

    Attributes:
        in_use: size of the blocks that tensors use.
        idle: size of the blocks that are kept for later tensors.
        recent_peak: the largest ``in_use`` while the last 128 to 256 blocks were allocated.
    """

    in_use: int
    idle: int
    recent_peak: int


def pool_bytes() -> PoolBytes:
    """Return the size of the memory pool; ``idle <= recent_peak + 64 MiB`` always holds."""
    counts = [ctypes.c_size_t() for _ in PoolBytes._fields]
    _library.sparsekit_pool_bytes(*map(ctypes.byref, counts))
    return PoolBytes(*(count.value for count in counts))


def empty_cache() -> int:
    """Release the memory that sparsekit's ops keep for reuse.

    The memory of CPU outputs and workspace of 2 MiB or more is not freed with its tensor, but kept
    for a later one, since allocating memory can take longer than the op itself. Without this call,
    a block is released after 128 later tensors have not used it. The oldest blocks are also
    released while idle blocks exceed the recent peak by more than 64 MiB (see `pool_bytes`). An
    output in such a block cannot grow: ``resize_`` to more elements raises RuntimeError. CUDA
    memory belongs to torch; use `torch.cuda.empty_cache` to free it.

    Returns:
        The number of bytes released.
    """
    return _library.sparsekit_empty_cache()


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Advise the system to back an untouched CPU tensor with 2 MiB pages, and return the tensor.

    With such pages, access to a random row of a large table rarely has to walk through page tables.
    This is only a hint to the system. Tensors on other devices and empty tensors are returned
    unchanged.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
        _library.sparsekit_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def total_bytes() -> int:
    """Return the size of the system's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def untouched_zeros(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    few: bool = False,
) -> torch.Tensor:
    """Return a tensor of zeros that on the CPU takes memory only where it is written to.

    Large tensors lie in pages of 2 MiB.

    Args:
        shape: sizes of the dimensions.
        dtype: dtype of the elements.
        device: device of the tensor; None means torch's default.
        few: whether only a few of the first ones may be written to. The first 2 MiB are then in
            small pages, which take a random access a little longer.

    Raises:
        RuntimeError: there is no memory, or not as much address space, for the tensor.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    if like.device.type != "cpu" or type(like) is not torch.Tensor or size < _LEAST_MAPPED:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=flags)
    except (OSError, OverflowError) as error:
        raise RuntimeError(
            f"no memory for a tensor of shape {list(shape)} and {dtype}, {size:,} bytes: {error}"
        ) from None
    begin = _address(mapping)
    aligned = -begin % _HUGE_PAGE
    tensor = torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=aligned)
    prefer_huge_pages(tensor[_HUGE_PAGE // dtype.itemsize :] if few else tensor)
    _mappings[begin + aligned] = mapping
    return tensor.view(tuple(shape))


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def untouched_like(
    tensors: Mapping[str, torch.Tensor], rows: int | None = None
) -> dict[str, torch.Tensor]:
    """Return `untouched_zeros` in the shapes of tensors; those that share memory share it again.

    Args:
        tensors: tensors with rows that do not overlap.
        rows: number of rows of the results; None means that of each tensor.
    """
    spaces: dict[Any, torch.Tensor] = {}
    made = {}
    for name, tensor in tensors.items():
        shared, count = tensor.untyped_storage()._cdata, len(tensor) if rows is None else rows
        if shared not in spaces:
            elements = [count * tensor.stride(0)]
            spaces[shared] = untouched_zeros(elements, tensor.dtype, tensor.device)
        place = (count, *tensor.shape[1:]), tensor.stride(), tensor.storage_offset()
        made[name] = spaces[shared].as_strided(*place)
    return made


def first_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor; see `first_rows_of`."""
    return first_rows_of({"": tensor}, rows)[""]


def first_rows_of(tensors: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Return the first rows of tensors, in memory that ends with them.

    A copy or a file of the results has these rows alone, unlike one of ``tensor[:rows]``, which is
    returned of a tensor that is not one of `untouched_zeros`. Those that share memory share it
    again.
    """
    spaces: dict[int, torch.Tensor] = {}
    made = {}
    for name, tensor in tensors.items():
        part = tensor[:rows]
        if is_mapped(tensor) and rows == 0:
            part = torch.empty_like(part)
        elif is_mapped(tensor):
            begin = tensor.untyped_storage().data_ptr()
            if begin not in spaces:
                mapping = _mappings[begin]
                spaces[begin] = torch.frombuffer(
                    mapping,
                    dtype=tensor.dtype,
                    count=rows * tensor.stride(0),
                    offset=begin - _address(mapping),
                )
            part = spaces[begin].as_strided(part.shape, part.stride(), part.storage_offset())
        made[name] = part
    return made


def with_length(tensor: torch.Tensor, rows: int, few: bool = True) -> torch.Tensor:
    """Return a tensor with this number of rows: a copy of the given ones, and zeros after them.

    Args:
        tensor: the given rows.
        rows: the number of rows, at least as many.
        few: as in `untouched_zeros`.
    """
    longer = untouched_zeros((rows, *tensor.shape[1:]), tensor.dtype, tensor.device, few)
    longer[: len(tensor)] = tensor
    return longer


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory of `untouched_zeros`."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return plain and tensor.untyped_storage().data_ptr() in _mappings


def zero_(tensor: torch.Tensor) -> None:
    """Fill a tensor with zeros; whole pages of `untouched_zeros` go back to the system."""
    if not (tensor.is_contiguous() and tensor.nbytes >= _LEAST_MAPPED and is_mapped(tensor)):
        tensor.zero_()
        return
    storage = tensor.untyped_storage().data_ptr()
    mapping = _mappings[storage]
    origin = _address(mapping)
    begin, page = tensor.data_ptr() - origin, mmap.PAGESIZE
    end = begin + tensor.nbytes
    first, last = -(-begin // page) * page, end // page * page
    increment_version([tensor])  # before the writes, between which an interrupt may come
    try:
        mapping.madvise(mmap.MADV_DONTNEED, first, last - first)
    except OSError:  # such as pages that are locked in memory
        tensor.zero_()
        return
    for start, stop in ((begin, first), (last, end)):
        ctypes.memset(origin + start, 0, stop - start)
