"""Batches of tensors, as readers yield them and layers accept them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Batch", "KeyedJaggedTensor"]


class KeyedJaggedTensor:
    """Bags of several features, in torchrec's layout; torchrec itself is not required.

    `EmbeddingGroup` and `DistributedEmbedding` accept it. To pass it to torchrec, convert it with
    ``torchrec.KeyedJaggedTensor(k.keys(), k.values(), offsets=k.offsets())``.

    Args:
        keys: Names of the features.
        values: Keys of all bags, int64 ``[n]``, ordered by feature, then by sample.
        offsets: Start of each bag in values, int64 ``[len(keys) * batch + 1]``: the bag of feature
            f in sample i is ``values[offsets[f * batch + i] : offsets[f * batch + i + 1]]``.
    """

    def __init__(self, keys: Sequence[str], values: torch.Tensor, offsets: torch.Tensor) -> None:
        self._keys = list(keys)
        self._values = values
        self._offsets = offsets

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def values(self) -> torch.Tensor:
        """Return the keys of all bags, int64 ``[n]``."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """Return the start of each bag in `values`, int64 ``[len(keys()) * stride() + 1]``."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """Return the number of keys in each bag, int64 ``[len(keys()) * stride()]``."""
        return self._offsets.diff()

    def stride(self) -> int:
        """Return the number of samples in the batch."""
        return (len(self._offsets) - 1) // max(1, len(self._keys))

    def __getitem__(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(values, offsets)`` of one feature, ``[m]`` and ``[batch + 1]``, for a layer.

        Raises:
            KeyError: no feature has this name.
        """
        if name not in self._keys:
            raise KeyError(f"no feature {name!r}; there are {self._keys}")
        begin = self._keys.index(name) * self.stride()
        offsets = self._offsets[begin : begin + self.stride() + 1]
        return self._bags(offsets, *offsets[[0, -1]].tolist())

    def to_dict(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return a dict from each feature's name to its ``(values, offsets)``."""
        batch = self.stride()
        # Convert in one call, to wait for a GPU only once.
        ends = self._offsets[::batch].tolist() if batch else [0] * (len(self._keys) + 1)
        return {
            name: self._bags(self._offsets[i * batch : (i + 1) * batch + 1], ends[i], ends[i + 1])
            for i, name in enumerate(self._keys)
        }

    def _bags(
        self, offsets: torch.Tensor, first: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._values[first:last], offsets - first

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Copy the bags to a device; tensors that are already there are shared, not copied."""
        return KeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            self._offsets.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> KeyedJaggedTensor:
        """Copy the bags to pinned memory, so that a non-blocking `to` does not block the CPU."""
        return KeyedJaggedTensor(self._keys, self._values.pin_memory(), self._offsets.pin_memory())

    def __repr__(self) -> str:
        return (
            f"KeyedJaggedTensor({len(self._keys)} features, batch {self.stride()}, "
            f"{len(self._values)} keys)"
        )


class Batch(NamedTuple):
    """A batch of rows from a data set.

    Attributes:
        label: float32 ``[rows]``, or None if the reader has no label.
        dense: float32 ``[rows, columns]``.
        sparse: The bags of all categorical features.
    """

    label: torch.Tensor | None
    dense: torch.Tensor
    sparse: KeyedJaggedTensor

    @property
    def rows(self) -> int:
        """Return the number of rows, which may be 0."""
        return len(self.dense)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Copy the batch to a device."""
        label = None if self.label is None else self.label.to(device, non_blocking=non_blocking)
        dense = self.dense.to(device, non_blocking=non_blocking)
        return Batch(label, dense, self.sparse.to(device, non_blocking))

    def pin_memory(self) -> Batch:
        """Copy the batch to pinned memory, so that copies to a GPU need not block the CPU."""
        label = None if self.label is None else self.label.pin_memory()
        return Batch(label, self.dense.pin_memory(), self.sparse.pin_memory())


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of several batches."""
    if len(batches) == 1:
        return batches[0]
    labels = [batch.label for batch in batches if batch.label is not None]
    names = batches[0].sparse.keys()
    of_batch = [batch.sparse.to_dict() for batch in batches]
    pieces = [bags[name] for name in names for bags in of_batch]
    return Batch(
        torch.cat(labels) if labels else None,
        torch.cat([batch.dense for batch in batches]),
        joined(names, [(values, offsets.diff()) for values, offsets in pieces]),
    )


def joined(
    names: Sequence[str], pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> KeyedJaggedTensor:
    """Concatenate pieces, ordered by feature; each has keys and the number of keys per bag."""
    values = [values for values, _ in pieces]
    lengths = [lengths for _, lengths in pieces]
    offsets = torch.zeros(sum(map(len, lengths)) + 1, dtype=torch.int64)
    if pieces:
        torch.cumsum(torch.cat(lengths), 0, out=offsets[1:])
    # Do not copy a single piece.
    flat = values[0] if len(values) == 1 else torch.cat(values) if values else offsets[:0]
    return KeyedJaggedTensor(names, flat, offsets)
