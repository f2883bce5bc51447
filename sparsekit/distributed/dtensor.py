"""Tensors of which each rank has a shard, as torch's fully_shard and tables have them."""

import sys
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from .shard_gradient import plain


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of a DTensor or of a table's gradient, not copied; any other tensor as it is."""
    return tensor._local_tensor if _is_dtensor(tensor) else plain(tensor)


def groups_of(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over which ranks a DTensor is sharded, one group for each such dimension of its mesh."""
    if not _is_dtensor(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[Any]:
    # Not imported here, since it takes long; where nobody has, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
