"""Models of which some tensors differ from rank to rank, beside those that ranks keep alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


class Sharded:
    """A module that has tensors of which each rank holds a part of its own."""

    def sharded_state(self) -> Iterable[str]:
        """Names of those tensors, as in its state_dict."""
        raise NotImplementedError


def sharded_tensors(module: torch.nn.Module) -> set[str]:
    """Names of the tensors in a module that are sharded."""
    return {
        f"{name}.{tensor}" if name else tensor
        for name, part in module.named_modules()
        if isinstance(part, Sharded)
        for tensor in part.sharded_state()
    }


def ignored_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tables, which are sharded already: tools that replicate or shard a model must skip them.

    Args:
        module: with sparsekit layers anywhere in it, or without.

    Returns:
        Their parameters and buffers by the names they have in the module: the tensors are for
        torch's ``fully_shard``, the names for DistributedDataParallel, which leaves tables alone
        by itself as well.

    Example:
        >>> ignored = ignored_parameters(model)
        >>> fully_shard(model, ignored_params=set(ignored.values()))
        >>> DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    """
    names = sharded_tensors(module)
    tensors = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    return {name: tensor for name, tensor in tensors if name in names}


def wrap_ddp(module: torch.nn.Module, **keywords: Any) -> torch.nn.Module:
    """DistributedDataParallel of the dense part; the tables, which are sharded, are left alone.

    DistributedDataParallel itself leaves them alone as well, and raises where nothing else is left.

    Args:
        module: with sparsekit layers anywhere in it.
        keywords: for ``torch.nn.parallel.DistributedDataParallel``.

    Returns:
        The wrapped module, or module itself when there is one rank only or nothing dense.
    """
    tables = sharded_tensors(module)
    dense = [p for name, p in module.named_parameters() if name not in tables and p.requires_grad]
    if not dense or not dist.is_initialized() or dist.get_world_size() == 1:
        return module
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(module, tables)
    return wrapper(module, **keywords)
