"""Which rows have changed since the last checkpoint: a fingerprint of each row is kept.

Rows are written by optimizers, by `assign`, by hand; so nobody is asked who wrote, and what a row
holds is compared. A change of one 8-byte word is always seen, other changes but for one in 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .tensor_file import carried

# Bytes that are worked on at a time, so that what is in between stays in the cache.
_BLOCK = 1 << 18


class Fingerprints:
    """Of a table's rows."""

    def __init__(self, rows: int) -> None:
        self.of_rows = np.zeros(rows, dtype=np.uint64)
        self.count = 0  # of those that stand for a row

    def update(self, tensors: Sequence[torch.Tensor], rows: int) -> np.ndarray:
        """Take the fingerprints of rows ``[0, rows)`` of all tensors together.

        Args:
            tensors: each has at least as many rows as there is room for; on any device.
            rows: how many are in use.

        Returns:
            int64, rising: those whose fingerprint is new.
        """
        widths = [math.prod(t.shape[1:]) * t.dtype.itemsize for t in tensors]
        words = [-(-width // 8) for width in widths]
        factors = np.random.default_rng(0x5EED).integers(
            0, 2**64, size=(2, sum(words)), dtype=np.uint64, endpoint=False
        )
        factors |= np.uint64(1)
        step = max(1, _BLOCK // (8 * sum(words)))
        changed: list[np.ndarray] = []
        room = np.zeros((step, sum(words)), dtype=np.uint64)
        as_bytes = room.view(np.uint8)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            at = 0
            for tensor, width, span in zip(tensors, widths, words, strict=True):
                part = carried(tensor[begin : begin + count].cpu())
                flat = np.ascontiguousarray(part).reshape(count, -1).view(np.uint8)
                as_bytes[:count, 8 * at : 8 * at + width] = flat
                at += span
            mixed = room[:count] * factors[0]
            mixed ^= mixed >> np.uint64(32)
            mixed *= factors[1]
            new = mixed.sum(axis=1, dtype=np.uint64)
            old = self.of_rows[begin : begin + count]
            differs = new != old
            known = max(0, self.count - begin)  # the others are new rows
            differs[known:] = True
            changed.append(np.flatnonzero(differs) + begin)
            old[:] = new
        self.count = rows
        return np.concatenate(changed) if changed else np.empty(0, dtype=np.int64)
