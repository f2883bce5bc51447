"""The room of a table that grows: rows beyond its reach, which copies and files leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from ..device_rooms import DEVICES
from ..memory import first_rows, untouched_zeros, with_length
from ..row_files import RowFiles
from .hash_table import HashTable
from .options import TableOptions
from .row_states import reach_of
from .weight import EmbeddingWeight


class RowsWithRoom(torch.nn.Module):
    """Base of `TableTensors`: knows which rows of weight and scores are in reach."""

    name: str
    capacity: int
    embedding_vec_size: int
    on_full: str
    # The files that hold rows and their states; None if they are in memory.
    files: RowFiles | None = None
    weight: EmbeddingWeight
    table: HashTable | None
    scores: torch.Tensor | None

    def new_weight(self, options: TableOptions, rows: int) -> EmbeddingWeight:
        """Return a new table's weight, in files if the options say so.

        Args:
            options: checked options.
            rows: number of rows that are usable at first.

        Raises:
            OSError: there is no space for the rows on the disk.
        """
        dtype, device = cast(torch.dtype, options.dtype), cast(torch.device, options.device)
        shape = self.capacity, self.embedding_vec_size
        if options.storage != "memory":
            most = options.max_resident_bytes
            self.files = RowFiles(self.name, options.storage, self.capacity, most)
            self.files.allocate(rows)
            if type(torch.empty(0, device=device)) is torch.Tensor and device.type == "cpu":
                return EmbeddingWeight(self.files.vectors(shape[1], dtype))
        return EmbeddingWeight(untouched_zeros(shape, dtype, device, rows if self.grows else None))

    @property
    def grows(self) -> bool:
        """Return whether the table makes room for more rows when it has too few."""
        return self.on_full == "grow"

    @property
    def reach(self) -> int:
        """Number of leading rows that may be in use; see `EmbeddingWeight.reach`."""
        return self.capacity if self.table is None else self.table.reach

    def rows_of_state(self, keep_vars: bool) -> int | None:
        """Return how many leading rows a saved state has; None means all."""
        weight = self.weight
        if keep_vars or not isinstance(weight, EmbeddingWeight) or weight.is_meta:
            return None
        if reach_of(weight) is None or self.table is None:
            return weight.rows_to_copy()
        return len(self.table)

    def reach_on(self, device: torch.device) -> int | None:
        """Return how many leading rows need memory on a device; None means all.

        On a device in `DEVICES`, all rows within the capacity are brought into reach.
        """
        if self.table is None or not self.grows:
            return None
        if device.type in DEVICES:
            self.table.extend_reach(self.table.capacity)
        return self.table.reach

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.scores is not None and reach_of(self.weight) is not None:
            state["_buffers"] = {**self._buffers, "scores": first_rows(self.scores, self.reach)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        scores = self._buffers.get("scores")
        if scores is not None and len(scores) < self.capacity:
            self._buffers["scores"] = with_length(scores, self.capacity, self.reach)

    @contextmanager
    def rows_in_reach(self, fn: Callable[[Any], Any]) -> Iterator[None]:
        """Return a context in which weight and scores contain only the rows in reach.

        Applying a function to these two inside the context takes no memory for the other rows.

        Args:
            fn: the function that will be applied.

        Raises:
            NotImplementedError: fn moves or converts tensors in files.
            RuntimeError: fn shares memory with other processes.
        """
        weight = self.weight
        if not (self.grows or self.files) or not isinstance(weight, EmbeddingWeight):
            yield
            return
        sample = torch.empty(1, dtype=weight.dtype, device=weight.device)
        made = fn(sample)
        if made.device.type == "cpu" and made.is_shared() and self.files:
            raise RuntimeError(
                f"{self.name}: rows in files (storage='mmap:{self.files.folder}') cannot be "
                f"shared with other processes: share_memory_() would put all of them into memory"
            )
        if made.device.type == "cpu" and made.is_shared():
            raise RuntimeError(
                f"{self.name}: a table with on_full='grow' cannot share its memory with other "
                f"processes, since that would take all {self.capacity:,} rows that it may grow to; "
                f"make it with as many rows as you need, and on_full='error'"
            )
        if made is sample or made.is_meta:
            yield
            return
        if self.files and not weight.is_meta:
            raise NotImplementedError(
                f"{self.name}: rows in files (storage='mmap:{self.files.folder}') are "
                f"{weight.dtype} on {weight.device} and stay so: they are neither converted nor "
                f"emptied; make the layer with the dtype and device that you need"
            )
        whole = weight.data, self.scores
        first = self.reach_on(made.device)
        reach = 0 if weight.is_meta else self.reach
        try:
            weight.data = first_rows(whole[0], reach)
            if self.scores is not None:
                self.scores = first_rows(self.scores, reach)
            yield
            if self.files is None:
                longer = with_length(self.weight.data, self.capacity, first)
            else:
                longer = self.files.holding(self.weight.data)
            if self.scores is not None:
                self.scores = with_length(self.scores, self.capacity, first)
            self.weight.data = longer
        except BaseException:
            self.weight.data, self.scores = whole
            raise
