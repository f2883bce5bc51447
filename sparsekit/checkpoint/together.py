"""Runs the steps of a save or load on all ranks, so that either all succeed or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ..distributed import exchange_of
from ..distributed.exchange import attempt
from .snapshot import named_tables

T = TypeVar("T")


class Together:
    """Runs functions on the ranks of a process group; an error on one rank is raised on all.

    Args:
        module: module whose device determines how the ranks communicate.
        group: the process group; None is torch.distributed's default group.
    """

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
        tensor = next(module.parameters(), torch.empty(0))
        # Use a separate exchange: a background save must not interfere with the layers' lookups.
        self._exchange = exchange_of(group, tensor.device, "checkpoints")
        self.rank = self._exchange.rank if self._exchange else 0
        self.world_size = self._exchange.world_size if self._exchange else 1
        for name, layer in named_tables(module).items():
            if (layer.rank, layer.world_size) != (self.rank, self.world_size):
                raise ValueError(
                    f"{name}: the table is that of rank {layer.rank} of {layer.world_size}, but "
                    f"this is rank {self.rank} of {self.world_size}; pass the process_group of "
                    f"the layers, and save those of different groups by themselves"
                )

    def do(self, what: str, make: Callable[[], T]) -> T:
        """Call a function on each rank and return its result. If one rank raises, all raise."""
        if self._exchange is None:
            return make()
        made = attempt(make)
        error = made if isinstance(made, Exception) else None
        # Escape bytes in a path that are not valid UTF-8.
        titled = f"checkpoint: {what}".encode(errors="backslashreplace").decode()
        self._exchange.agree(titled, error)
        return cast(T, made)

    def on_first(self, what: str, make: Callable[[], None]) -> None:
        """Call a function on rank 0; if it raises, all ranks raise."""
        self.do(what, make if self.rank == 0 else lambda: None)

    def text_of_first(self, what: str, make: Callable[[], str]) -> str:
        """Call a function on rank 0 and return its result on all ranks."""
        shared = [""]

        def fill() -> None:
            shared[0] = make()

        self.on_first(what, fill)
        if self._exchange is not None:
            group = self._exchange.group
            dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group)
        return shared[0]

    def union(self, names: set[str]) -> set[str]:
        """Return the union of the names on all ranks."""
        of_ranks = [names] * self.world_size
        if self._exchange is not None:
            dist.all_gather_object(of_ranks, names, self._exchange.group)
        return set().union(*of_ranks)
