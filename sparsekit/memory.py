"""Large blocks of CPU memory: in pages of 2 MiB, and kept for reuse."""

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
    """Bytes of the memory that CPU outputs and workspace of 2 MiB and more come from.

    Attributes:
        in_use: of blocks that tensors have.
        idle: of blocks that are kept for later tensors.
        recent_peak: the largest ``in_use`` there was while the last 128 to 256 blocks were taken.
    """

    in_use: int
    idle: int
    recent_peak: int


def pool_bytes() -> PoolBytes:
    """Count the memory of large CPU tensors; ``idle <= recent_peak + 64 MiB`` always holds."""
    counts = [ctypes.c_size_t() for _ in PoolBytes._fields]
    _library.sparsekit_pool_bytes(*map(ctypes.byref, counts))
    return PoolBytes(*(count.value for count in counts))


def empty_cache() -> int:
    """Return the memory that sparsekit's ops keep for reuse to the system.

    Outputs and workspace of 2 MiB and more on the CPU are not returned when a tensor goes, but used
    for a later one, since new memory can cost more time than what an op does with it. What no
    op has used for 128 such tensors is returned without this call, and so is, the oldest first,
    what exceeds the most that has been in use at once lately by more than 64 MiB (`pool_bytes`).
    Such an output cannot grow: its ``resize_`` to more elements raises RuntimeError. On CUDA memory
    is torch's, and `torch.cuda.empty_cache` does this.

    Returns:
        The number of bytes.
    """
    return _library.sparsekit_empty_cache()


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory on the CPU, not yet touched, should come in pages of 2 MiB.

    A row of a large table is then found without a walk through page tables. Only a hint to the
    system. Other devices and tensors without memory are left as they are.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
        _library.sparsekit_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
