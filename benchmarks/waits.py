"""Counts how often the host waits for the device, since each wait leaves the GPU idle.

torch counts its own waits while torch.cuda.set_sync_debug_mode is on; ops of sparsekit wait without
torch and count for themselves.
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
    """Waits of one call."""

    torch: int
    sparsekit: int

    @property
    def all(self) -> int:
        """Return the total."""
        return self.torch + self.sparsekit


def count(call: Callable[[], object], library: Path = LIBRARY) -> Waits:
    """Run a call and count its waits.

    Args:
        call: called once here. Call it before, too, since a first call waits more often.
        library: library that counts the waits; the host runner's does so without a device.
    """
    own = ctypes.CDLL(str(library)).sparsekit_num_waits
    own.restype = ctypes.c_int64
    before = own()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch also warns about the mode itself
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
