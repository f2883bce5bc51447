"""Large blocks of CPU memory: a pool that keeps them for reuse, and 2 MiB pages."""

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
    """Sizes of the pool that serves CPU outputs and workspace of 2 MiB or more, in bytes.

    Attributes:
        in_use: bytes of blocks that tensors use.
        idle: bytes of blocks that are kept for later tensors.
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

    CPU outputs and workspace of 2 MiB or more are not freed with their tensor but reused for a
    later one, since new memory can cost more time than the op itself. Without this call, a block is
    released once 128 such tensors have not used it; the oldest blocks are also released when idle
    blocks exceed the recent peak by more than 64 MiB (`pool_bytes`). Such an output cannot grow:
    its ``resize_`` to more elements raises RuntimeError. CUDA memory comes from torch, and
    `torch.cuda.empty_cache` frees it.

    Returns:
        The number of bytes released.
    """
    return _library.sparsekit_empty_cache()


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Advise the system to back an untouched CPU tensor with 2 MiB pages, and return the tensor.

    A row of a large table is then found without a walk through page tables. This is only a hint to
    the system. Tensors on other devices or without memory are left as they are.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
        _library.sparsekit_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
