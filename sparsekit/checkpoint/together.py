"""Ranks that save or load together: all succeed, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ..distributed import exchange_of
from .snapshot import named_tables

T = TypeVar("T")


class Together:
    """The ranks of a process group.

    Args:
        module: whose device decides how they talk.
        group: None is torch.distributed's default group.
    """

    def __init__(self, module: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
        tensor = next(module.parameters(), torch.empty(0))
        # A purpose of its own: a background save must not get between the lookups of layers.
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
        """Call a function on each rank; what it raises on one, all raise."""
        if self._exchange is None:
            return make()
        made: list[T] = []

        def offer() -> None:
            made.append(make())

        self._exchange.meet(f"checkpoint: {what}", offer)
        return made[0]

    def on_first(self, what: str, make: Callable[[], None]) -> None:
        """Call a function on rank 0; what it raises, all raise."""
        self.do(what, make if self.rank == 0 else lambda: None)

    def text_of_first(self, what: str, make: Callable[[], str]) -> str:
        """What a function returns on rank 0, at most 4096 bytes as UTF-8."""
        text = self.do(what, make if self.rank == 0 else str)
        if self._exchange is None:
            return text
        room = torch.zeros(4096, dtype=torch.uint8)
        content = text.encode()
        if content:
            room[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        room = room.to(self._exchange.device)
        group = self._exchange.group
        dist.broadcast(room, dist.get_global_rank(group, 0), group)
        return bytes(room.cpu().numpy()).rstrip(b"\0").decode()
