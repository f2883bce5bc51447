"""Maps from virtual shards of keys to the ranks that own them, for tables placed by hash."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from .. import hashing
from ..ops.bucketize import VIRTUAL_SHARDS

# By world size and device. Layers share them, so that the map which lookups of many tables read is
# one and stays in the caches.
_even_maps: WeakValueDictionary[tuple[int, torch.device], torch.Tensor] = WeakValueDictionary()


def even_map(world_size: int, device: torch.device) -> torch.Tensor:
    """int16 ``[65536]``, runs of virtual shards of equal length; nobody may write to it."""
    device = torch.empty(0, device=device).device  # cuda becomes cuda:0
    found = _even_maps.get((world_size, device))
    if found is None:
        with torch.inference_mode(False):
            shards = torch.arange(VIRTUAL_SHARDS, device=device)
            found = (shards * world_size >> 16).to(torch.int16)
        _even_maps[world_size, device] = found
    return found


def shared(owners: torch.Tensor, world_size: int) -> torch.Tensor:
    """The map that layers share if it is the same, else the one given."""
    if owners.is_meta:
        return owners
    even = even_map(world_size, owners.device)
    return even if torch.equal(owners, even) else owners


def check_map(name: str, owners: torch.Tensor, world_size: int) -> None:
    """Raise ValueError unless all values are ranks; ``name`` begins the message."""
    wrong = ((owners < 0) | (owners >= world_size)).nonzero()
    if len(wrong):
        shard = int(wrong[0])
        raise ValueError(
            f"{name}: owners[{shard}] in the state is {int(owners[shard])}, but must be a rank, in "
            f"[0, {world_size})"
        )


class Digest:
    """A hash of a map, made once for each map and each change of it."""

    def __init__(self) -> None:
        self._owners: torch.Tensor | None = None
        self._version = 0
        self._text = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> Digest:
        return Digest()

    def __reduce__(self) -> tuple[Any, ...]:
        return Digest, ()

    def of(self, owners: torch.Tensor) -> str:
        """16 hexadecimal digits."""
        version = 0 if owners.is_inference() else owners._version
        if owners is not self._owners or version != self._version:
            code = int(hashing.xxh64([owners.cpu().numpy().tobytes()]))
            self._text = f"{code % 2**64:016x}"
            self._owners, self._version = owners, version
        return self._text
