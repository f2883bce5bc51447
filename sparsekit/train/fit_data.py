"""The data of a call of fit: what is checked of them, and what a checkpoint remembers."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable
from typing import Any

import torch

from ..data import Prefetcher
from ..errors import check_int

# Bytes of a tensor that are on the CPU at a time for its checksum.
_PIECE = 64 << 20


class FitData:
    """A tuple of tensors with the size of a batch, or a loader that has one of its own.

    Args:
        data: as `Trainer.fit` takes it.
        batch_size: of tensors: samples of each rank.
        global_batch_size: the same of all ranks together, in place of batch_size.
        ranks: how many there are.

    Attributes:
        samples: of an epoch; 0 where a loader has them.
        batch: samples in a batch of tensors, of all ranks together; else 0.
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
        """Raise TypeError or ValueError for what cannot be trained on."""
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
        """Whether it has a state, from which it goes on by itself; of a Prefetcher, its source."""
        return hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")

    @functools.cached_property
    def facts(self) -> dict[str, int]:
        """Facts that tell these data from others: of tensors their contents, else sizes.

        A reader has none: its own state tells.
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
    except (TypeError, NotImplementedError):  # of a stream
        return None


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """CRC-32 of dtypes, shapes and contents."""
    code = 0
    for tensor in tensors:
        code = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), code)
        flat = tensor.detach().reshape(-1)
        for part in flat.split(max(1, _PIECE // max(1, flat.element_size()))):
            code = zlib.crc32(part.cpu().contiguous().view(torch.uint8).numpy(), code)
    return code
