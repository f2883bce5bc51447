"""Checks the data passed to fit, and describes it for checkpoints."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from ..data import Prefetcher
from ..errors import check_int

# Number of bytes to copy to the CPU at a time when computing the checksum of a tensor.
_PIECE = 64 << 20


class FitData:
    """Training data: either a tuple of tensors with a batch size, or a loader of batches.

    Args:
        data: argument of `Trainer.fit`.
        batch_size: number of samples per rank in a batch of tensors.
        global_batch_size: total number of samples in a batch on all ranks, instead of batch_size.
        ranks: number of ranks.

    Attributes:
        samples: number of samples per epoch if the data is tensors; 0 for a loader.
        batch: total number of samples per batch if the data is tensors; 0 for a loader.
    """

    def __init__(
        self,
        data: tuple[torch.Tensor, ...] | Iterable[Any],
        batch_size: int | None,
        global_batch_size: int | None,
        ranks: int,
    ) -> None:
        self.data: Any = data
        self.of_tensors = isinstance(data, tuple)
        self._sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        self._lengths = sorted({len(tensor) for tensor in self.data}) if self.of_tensors else []
        self.samples = self._lengths[0] if self._lengths else 0
        self.batch = (global_batch_size or (batch_size or 0) * ranks) if self.of_tensors else 0

    def check(self) -> None:
        """Raise TypeError or ValueError if the data cannot be used for training."""
        given = {name: size for name, size in self._sizes.items() if size is not None}
        if not self.of_tensors:
            for name, size in given.items():
                raise ValueError(
                    f"{name}={size} is for tensors; {type(self.data).__name__} has its own"
                )
            return
        if len(self._lengths) != 1 or self._lengths == [0]:
            raise ValueError(f"data must be tensors of one length >= 1, got {self._lengths}")
        if len(given) != 1:
            raise ValueError(
                f"tensors need batch_size, of each rank, or global_batch_size, of all ranks "
                f"together; got {', '.join(f'{n}={size}' for n, size in self._sizes.items())}"
            )
        for name, size in given.items():
            check_int("Trainer", name, size, 1, 2**31 - 1)

    def __str__(self) -> str:
        if not self.of_tensors:
            return "batches of loaders"
        return f"{self._lengths} samples in batches of {self.batch}"

    @property
    def _loader(self) -> Any:
        return self.data.batches if isinstance(self.data, Prefetcher) else self.data

    @property
    def is_reader(self) -> bool:
        """Return whether the loader (or a Prefetcher's source) can save and load its position."""
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    @functools.cached_property
    def facts(self) -> dict[str, int]:
        """Return numbers that identify the data: sizes, and a checksum if the data is tensors.

        For a reader, the result is empty, since the reader's state identifies the data.
        """
        if self.of_tensors:
            sizes = {"samples": self.samples, "checksum": checksum(self.data)}
            return {**sizes, "global_batch_size": self.batch}
        if self.is_reader:
            return {}
        loader = self._loader
        found = {
            "batches": _length(loader),
            "samples": _length(getattr(loader, "dataset", None)),
            "batch_size": getattr(loader, "batch_size", None),
        }
        return {name: number for name, number in found.items() if isinstance(number, int)}


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a stream has no length
        return None


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return the CRC-32 of the tensors' dtypes, shapes and contents."""
    code = 0
    for tensor in tensors:
        code = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), code)
        flat = tensor.detach().reshape(-1)
        for part in flat.split(_PIECE // flat.element_size()):
            code = zlib.crc32(part.cpu().contiguous().view(torch.uint8).numpy(), code)
    return code
