"""Runs the steps of a save or load on all ranks, so that all succeed or all raise."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from ..distributed import exchange_of
from ..distributed.exchange import attempt
from ..errors import CheckpointError
from .snapshot import named_tables

T = TypeVar("T")

_MOST_TEXT = 4096
_SLOTS = 1 << 14


class Together:
    """Runs functions on the ranks of a process group; an error on one is raised on all.

    Args:
        module: module whose device decides how the ranks communicate.
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
        """Call a function on each rank and return its result; if one rank raises, all raise."""
        if self._exchange is None:
            return make()
        made = attempt(make)
        error = made if isinstance(made, Exception) else None
        # A path may not be UTF-8.
        titled = f"checkpoint: {what}".encode(errors="backslashreplace").decode()
        self._exchange.agree(titled, error)
        return cast(T, made)

    def on_first(self, what: str, make: Callable[[], None]) -> None:
        """Call a function on rank 0; if it raises, all raise."""
        self.do(what, make if self.rank == 0 else lambda: None)

    def text_of_first(self, what: str, make: Callable[[], str]) -> str:
        """Call a function on rank 0 and return its result, at most 4096 bytes, on all ranks.

        Raises:
            CheckpointError: the text is longer.
        """
        if self._exchange is None:
            return make()
        room = torch.zeros(_MOST_TEXT, dtype=torch.uint8)

        def fill() -> None:
            content = os.fsencode(make())
            if len(content) > _MOST_TEXT:
                raise CheckpointError(f"{what}: {len(content)} bytes are more than {_MOST_TEXT}")
            room[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)

        self.on_first(what, fill)
        shared = room.to(self._exchange.device)
        group = self._exchange.group
        dist.broadcast(shared, dist.get_global_rank(group, 0), group)
        return os.fsdecode(bytes(shared.cpu().numpy()).rstrip(b"\0"))

    def union(self, names: set[str]) -> Callable[[str], bool]:
        """Return a function that tests whether any rank has a name; false positives are rare."""
        if self._exchange is None:
            return names.__contains__
        slots = torch.zeros(_SLOTS, dtype=torch.int32)
        for name in names:
            slots[_slot(name)] = 1
        shared = slots.to(self._exchange.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX, self._exchange.group)
        found = shared.tolist()
        return lambda name: bool(found[_slot(name)])


def _slot(name: str) -> int:
    return zlib.crc32(name.encode(errors="backslashreplace")) % _SLOTS
