"""Controls large blocks of CPU memory: a pool that reuses them, and 2 MiB pages."""

import ctypes
from typing import NamedTuple

import torch

from ._load import OPS_LIBRARY

_library = ctypes.CDLL(str(OPS_LIBRARY))
_library.sparsekit_empty_cache.argtypes = []
_library.sparsekit_empty_cache.restype = ctypes.c_size_t
_library.sparsekit_pool_bytes.argtypes = [ctypes.POINTER(ctypes.c_size_t)] * 3
_library.sparsekit_pool_bytes.restype = None
_library.sparsekit_prefer_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_library.sparsekit_prefer_huge_pages.restype = None


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
