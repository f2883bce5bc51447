"""Large blocks of CPU memory: in pages of 2 MiB, and kept for reuse."""

import ctypes

import torch

from ._load import OPS_LIBRARY

_library = ctypes.CDLL(str(OPS_LIBRARY))
_library.sparsekit_empty_cache.restype = ctypes.c_size_t
_library.sparsekit_prefer_huge_pages.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def empty_cache() -> int:
    """Return the memory that sparsekit's ops keep for reuse to the system.

    Outputs and workspace of 2 MiB and more on the CPU are not returned when a tensor goes, but used
    for a later one, since new memory can cost more time than what an op does with it. What no
    op has used for 128 such tensors is returned without this call. On CUDA memory is torch's, and
    `torch.cuda.empty_cache` does this.

    Returns:
        The number of bytes.
    """
    return _library.sparsekit_empty_cache()


def prefer_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory on the CPU, not yet touched, shall come in pages of 2 MiB.

    A row of a large table is then found without a walk through page tables. Only a hint to the
    system. Other devices and tensors without memory are left as they are.
    """
    if tensor.device.type == "cpu" and type(tensor) is torch.Tensor:
        _library.sparsekit_prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
