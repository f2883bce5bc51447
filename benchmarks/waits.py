"""Counts how often the host waits for the device, since each wait leaves the GPU idle.

torch warns of its own waits while torch.cuda.set_sync_debug_mode is on. sparsekit's ops do not wait
through torch, and count their waits themselves.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import sparsekit

LIBRARY = Path(sparsekit.__file__).parent / "lib" / "libsparsekit_cuda.so"


@dataclass(frozen=True)
class Waits:
    """Counts of waits in one call, by torch and by sparsekit."""

    torch: int
    sparsekit: int

    @property
    def all(self) -> int:
        """Return the total number of waits."""
        return self.torch + self.sparsekit


def count(call: Callable[[], object], library: Path = LIBRARY) -> Waits:
    """Run a call and count its waits.

    Args:
        call: called once. Call it beforehand to warm up, since the first call waits more often.
        library: library that counts the waits; pass the host runner's library if there is no GPU.
    """
    own = ctypes.CDLL(str(library)).sparsekit_num_waits
    own.restype = ctypes.c_int64
    before = own()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # record every warning, not only the first of each kind
        with _debug_mode():
            call()
    of_torch = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    return Waits(len(of_torch), own() - before)


@contextmanager
def _debug_mode() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
