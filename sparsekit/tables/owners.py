"""Owner maps, from virtual shards (values of a key's hash) to the ranks that own the keys."""

from __future__ import annotations

import torch

from .. import hashing
from ..ops.bucketize import VIRTUAL_SHARDS

# Maps by world size and device. Layers share them, so that they stay in the CPU's cache.
_even: dict[tuple[int, torch.device], torch.Tensor] = {}


def even_map(world_size: int, device: torch.device) -> torch.Tensor:
    """Return the map, int16 ``[65536]``, that gives each rank an equal share of virtual shards.

    Layers share it, so do not write to it.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    known = _even.get((world_size, device))
    if known is not None:
        return known
    with torch.inference_mode(False):  # the map is also used outside inference mode
        shards = torch.arange(VIRTUAL_SHARDS, device=device)
        made = (shards * world_size >> 16).to(torch.int16)
    if type(made) is torch.Tensor:  # a fake tensor must not be cached
        _even[world_size, device] = made
    return made


def shared(owners: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return `even_map` if `owners` is equal to it, else `owners`."""
    even = even_map(world_size, owners.device)
    return even if torch.equal(even, owners) else owners


def check_ranks_of(name: str, owners: torch.Tensor, world_size: int) -> None:
    """Raise ValueError if an entry is not a rank; `name` is for the error message."""
    bad = (owners < 0) | (owners >= world_size)
    if bool(bad.any()):
        shard = int(bad.nonzero()[0])
        raise ValueError(
            f"{name}: owners[{shard}] is {int(owners[shard])}, but there are {world_size} rank(s)"
        )


class CodeOfMap:
    """A short hash of a layer's owner map, updated when the map is replaced or written to."""

    def __init__(self) -> None:
        self._made: tuple[torch.Tensor, int, str] | None = None

    def of(self, name: str, owners: torch.Tensor, world_size: int) -> str:
        """Return the hash of an owner map; a new map is checked by `check_ranks_of` first."""
        version = -1 if owners.is_inference() else owners._version
        made = self._made
        if made is None or made[0] is not owners or made[1] != version:
            check_ranks_of(name, owners, world_size)
            code = int(hashing.xxh64([owners.cpu().numpy().tobytes()]))
            made = self._made = owners, version, f"{code % 2**64:016x}"
        return made[2]

    def __reduce__(self) -> tuple[type[CodeOfMap], tuple[()]]:
        return CodeOfMap, ()
