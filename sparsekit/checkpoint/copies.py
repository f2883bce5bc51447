"""Copies tensors, so that a background checkpoint can write them while training continues."""

from __future__ import annotations

import torch

from ..memory import is_mapped, untouched_zeros
from ..row_files import RowFiles


class Copies:
    """Host memory for copies of tensors, kept for the next save because allocation is slow."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def of(
        self, name: str, tensor: torch.Tensor, rows: int, files: RowFiles | None = None
    ) -> torch.Tensor:
        """Copy the first rows of a tensor, overwriting any earlier copy with the same name.

        Rows of a file-backed table are copied to a new file each time.
        """
        if files is not None and is_mapped(tensor):
            return files.zeros((rows, *tensor.shape[1:]), tensor.dtype).copy_(tensor[:rows])
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            # Allocate room for all rows: memory that is never written costs nothing.
            kept = self._kept[name] = untouched_zeros(tensor.shape, tensor.dtype, "cpu")
        return kept[:rows].copy_(tensor[:rows])
