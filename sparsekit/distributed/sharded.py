"""Finds the tensors of a model that are sharded over ranks rather than replicated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


class Sharded:
    """A module with tensors that are sharded over ranks."""

    def sharded_state(self) -> Iterable[str]:
        """Return the names of the sharded tensors, as used in the module's state_dict."""
        raise NotImplementedError


def sharded_tensors(module: torch.nn.Module) -> set[str]:
    """Return the names of the tensors in a module that are sharded."""
    return {
        f"{name}.{tensor}" if name else tensor
        for name, part in module.named_modules()
        if isinstance(part, Sharded)
        for tensor in part.sharded_state()
    }


def ignored_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of tables, which tools that replicate or shard a model must skip.

    Args:
        module: any module, with or without sparsekit layers.

    Returns:
        The tables' parameters and buffers, by their names in the module. Pass the tensors to
        torch's ``fully_shard``. DistributedDataParallel accepts the names, but skips tables even
        without them.

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
    """Wrap a module in DistributedDataParallel, which skips the sharded tables.

    DistributedDataParallel skips tables even without this function, but raises an error if a model
    has no other parameters; this function returns such a model unchanged.

    Args:
        module: a module with sparsekit layers anywhere in it.
        keywords: arguments of ``torch.nn.parallel.DistributedDataParallel``.

    Returns:
        The wrapped module, or module itself if there is only one rank or no dense parameter.
    """
    tables = sharded_tensors(module)
    dense = [p for name, p in module.named_parameters() if name not in tables and p.requires_grad]
    if not dense or not dist.is_initialized() or dist.get_world_size() == 1:
        return module
    wrapper = torch.nn.parallel.DistributedDataParallel
    wrapper._set_params_and_buffers_to_ignore_for_model(module, tables)
    return wrapper(module, **keywords)
