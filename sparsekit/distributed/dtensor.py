"""Accesses this rank's shard of sharded tensors: DTensors from fully_shard, and tables."""

import sys
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from .shard_gradient import plain


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor or table gradient, and other tensors unchanged."""
    return tensor._local_tensor if _is_dtensor(tensor) else plain(tensor)


def groups_of(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups that a DTensor is sharded over, one for each sharded mesh dimension."""
    if not _is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[Any]:
    # Do not import torch.distributed.tensor here, since that is slow. If nothing else has imported
    # it, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
