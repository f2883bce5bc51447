"""Makes torch's tools work with tables, which otherwise look like replicated parameters.

Some tools have a convention for marking parameters to skip; others have none. torch calls the
hooks at the end of this file before each step of an optimizer, and whenever a module becomes part
of another one, for example when a model is wrapped. The hooks therefore work even if code outside
this library wraps the model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.optim.swa_utils import AveragedModel

from ..device_rooms import is_in_room
from ..distributed.sharded import sharded_tensors
from ..tables.saved_state import copy_all
from ..tables.weight import EmbeddingWeight, own_writes
from .layer import EmbeddingLayer


def tables_of(module: torch.nn.Module) -> dict[str, EmbeddingLayer]:
    """Return the tables in a module, by name."""
    return {n: layer for n, layer in module.named_modules() if isinstance(layer, EmbeddingLayer)}


def _spare_tables(ddp: DistributedDataParallel, model: torch.nn.Module) -> None:
    """Make DistributedDataParallel skip tables; call this before it sends anything."""
    names = sharded_tensors(model) - ddp.parameters_to_ignore
    if not names or ddp.process_group.size() == 1:
        return
    ddp.parameters_to_ignore |= names
    ddp._set_params_and_buffers_to_ignore_for_model(model, ddp.parameters_to_ignore)
    dense = [p for name, p in model.named_parameters() if name not in ddp.parameters_to_ignore]
    if not any(parameter.requires_grad for parameter in dense):
        first = next(iter(tables_of(model).values()))
        raise RuntimeError(
            f"{first.name}: DistributedDataParallel has nothing to do for a model that is "
            f"nothing but tables, which exchange gradients by themselves; use it unwrapped"
        )
    ddp._module_parameters = dense


def _average_tables(averaged: AveragedModel) -> None:
    """Make torch's SWA and EMA work with tables that grow."""
    update = functools.partial(_update_average, averaged)
    averaged.update_parameters = update  # type: ignore[method-assign]


def _update_average(averaged: AveragedModel, model: torch.nn.Module) -> None:
    """Run `AveragedModel.update_parameters` after writing new keys' initial vectors to the average.

    Until a key has a row, its vector is the initial vector, so its average must start there too.
    """
    of_average = list(tables_of(averaged.module).values())
    if averaged.use_buffers:
        raise ValueError(
            f"{of_average[0].name}: AveragedModel(use_buffers=True) would average keys; leave it "
            f"out, and average other buffers by torch.optim.swa_utils.update_bn"
        )
    with _begin_averages(averaged.module, model):
        type(averaged).update_parameters(averaged, model)


def _begin_averages(
    averaged: torch.nn.Module, model: torch.nn.Module
) -> AbstractContextManager[None]:
    """Write initial vectors to the averaged model for keys that are new in the model.

    Returns:
        A context for computing the average.

    Raises:
        NotImplementedError: a table grows on a device.
    """
    tables = list(zip(tables_of(averaged).values(), tables_of(model).values(), strict=True))
    for mine, theirs in tables:
        if is_in_room(mine.weight.detach()):
            raise NotImplementedError(
                f"{mine.name}: an average would go through all rows that the table may grow to, "
                f"which have no memory on {mine.weight.device}; give the table a number of rows"
            )
        theirs.catch_up()
        if theirs.owners is not None and mine.owners is not None:
            owners = theirs.owners.to(mine.weight.device)
            if not torch.equal(owners, mine.owners):
                # Assign a copy of the map: torch later copies buffers in place, and other layers
                # may share the old map.
                mine.owners = owners.clone()
        if mine.table is None or theirs.table is None:
            continue
        keys, known = theirs.table.keys(), mine.table.keys()
        new = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        new[: len(known)] = keys[: len(known)] != known[: len(keys)].to(keys.device)
        rows = new.nonzero().squeeze(1)
        rows, keys = (tensor.to(mine.weight.device) for tensor in (rows, keys[rows]))
        mine.initializer.write_(mine.weight.data, keys, rows, seed=int(mine.seed))
        mine.weight.moved |= theirs.weight.moved
    return own_writes([mine.weight for mine, _ in tables])


def _average_tables_of_lightning() -> None:
    """Make Lightning's StochasticWeightAveraging, if imported, work with tables that grow."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = sys.modules.get(f"{package}.callbacks.stochastic_weight_avg")
        callback = getattr(module, "StochasticWeightAveraging", None)
        if callback is not None and not hasattr(callback.update_parameters, "__wrapped__"):
            for name in ("transfer_weights", "update_parameters"):
                setattr(callback, name, staticmethod(_knowing_keys(getattr(callback, name))))


def _knowing_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an averaging function so that it first copies the model's keys to the average."""

    @functools.wraps(function)
    def called(average: torch.nn.Module, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _begin_averages(average, model):
            tables = tables_of(average).values(), tables_of(model).values()
            for mine, theirs in zip(*tables, strict=True):
                if mine.table is not None and theirs.table is not None:
                    copy_all(zip(mine.table.buffers(), theirs.table.buffers(), strict=True))
            return function(average, model, *args, **kwargs)

    return called


def _refuse_fsdp(fsdp: Any, model: torch.nn.Module) -> None:
    for layer in tables_of(model).values():
        if layer not in fsdp._ignored_modules and layer.weight not in fsdp._ignored_params:
            raise RuntimeError(
                f"{layer.name}: FullyShardedDataParallel would take the tables apart, which are "
                f"sharded already; make the model again and wrap it with ignored_states=[the "
                f"embedding layers]"
            )


def _on_registration(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if module is None:
        return
    if isinstance(module, EmbeddingLayer):
        _average_tables_of_lightning()
    if name == "module":
        if isinstance(parent, DistributedDataParallel):
            _spare_tables(parent, module)
        elif isinstance(parent, AveragedModel) and tables_of(module):
            _average_tables(parent)
    elif name == "_fsdp_wrapped_module":
        _refuse_fsdp(parent, module)


# torch optimizers that refuse sparse gradients, and the optimizer to use instead of each. torch's
# own errors recommend other optimizers from this list. SGD refuses sparse gradients only with
# weight_decay.
_REFUSING = {
    getattr(torch.optim, name): instead
    for name, instead in {
        "Adam": "Adam, which takes the same steps, or LazyAdam, which moves touched rows only",
        "AdamW": "LazyAdam, which has weight_decay",
        "RMSprop": "RMSProp",
        "SGD": "SGD, which has weight_decay",
        **dict.fromkeys(["Adadelta", "Adafactor", "Adamax", "ASGD", "Muon"], "LazyAdam"),
        **dict.fromkeys(["NAdam", "RAdam", "Rprop"], "LazyAdam"),
    }.items()
    if hasattr(torch.optim, name)
}
_KINDS = tuple(_REFUSING)


def _refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if a table has a sparse gradient that the optimizer does not support."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["weight_decay"]:
            continue
        for weight in group["params"]:
            if isinstance(weight, EmbeddingWeight) and getattr(weight.grad, "is_sparse", False):
                kind = next(kind for kind in type(optimizer).__mro__ if kind in _REFUSING)
                raise TypeError(
                    f"torch.optim.{kind.__name__} does not take the sparse gradient of an "
                    f"embedding layer's weight, of shape {tuple(weight.shape)}; use "
                    f"sparsekit.optim.{_REFUSING[kind]}. It takes the dense parameters as well: "
                    f"see docs/optimizers.md, and sparsekit.split_embedding_variable_from_others "
                    f"to keep torch's optimizer for those"
                )


def _refuse_dense(optimizer: torch.optim.SparseAdam) -> None:
    """Raise TypeError for a dense gradient in SparseAdam, whose own error would suggest Adam."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    tables = any(isinstance(weight, EmbeddingWeight) for weight in weights)
    dense = [w for w in weights if w.grad is not None and not w.grad.is_sparse]
    if tables and dense:
        raise TypeError(
            f"torch.optim.SparseAdam does not take dense gradients, as of a parameter of shape "
            f"{tuple(dense[0].shape)}; use sparsekit.optim.LazyAdam, which takes the same steps "
            f"for embedding layers and dense parameters as well"
        )


def _follow_keys(optimizer: torch.optim.Optimizer) -> None:
    """Make a torch optimizer's states move along with the keys of the tables that it updates."""
    weights = _tables_under(optimizer)
    if weights and _loaded not in optimizer._optimizer_load_state_dict_post_hooks.values():
        optimizer.register_load_state_dict_post_hook(_loaded)
    for weight in weights:
        weight.is_stepped_by(optimizer)
        if "keys" in optimizer.state.get(weight, ()):
            weight.settle(optimizer)


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    """Record that the keys of loaded states are unknown."""
    for weight in _tables_under(optimizer):
        if weight in optimizer.state:
            optimizer.state[weight]["keys"] = None


def _tables_under(optimizer: torch.optim.Optimizer) -> list[EmbeddingWeight]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in parameters if isinstance(p, EmbeddingWeight)]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    if hasattr(optimizer, "initial_values"):
        return None  # sparsekit's own optimizers do all of this by themselves
    by_name = "closure" in kwargs
    closure = kwargs["closure"] if by_name else args[1] if len(args) > 1 else None
    if not callable(closure):
        _look_at(optimizer)
        return None

    def looked_at() -> Any:
        # Run the checks after the closure, which produces this step's keys and gradients.
        loss = closure()
        _look_at(optimizer)
        return loss

    if by_name:
        return args, {**kwargs, "closure": looked_at}
    return (args[0], looked_at, *args[2:]), kwargs


def _look_at(optimizer: torch.optim.Optimizer) -> None:
    """Move states to the rows of their keys, and raise TypeError for unsupported gradients."""
    _follow_keys(optimizer)
    for weight in _tables_under(optimizer):
        weight.begin_writing()
        weight.moved |= weight.grad is not None and not weight.grad.is_sparse
    if isinstance(optimizer, _KINDS):
        _refuse_sparse(optimizer)
        return
    if isinstance(optimizer, torch.optim.SparseAdam):
        _refuse_dense(optimizer)
        return
    # Do not import the optimizer here: the import is slow, and few programs use the optimizer.
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.world_size > 1 and any(isinstance(p, EmbeddingWeight) for p in weights):
        raise RuntimeError(
            "sparsekit: ZeroRedundancyOptimizer would copy one rank's part of a table over all "
            "others; give it the dense parameters only, and the tables an optimizer of their own: "
            "see sparsekit.split_embedding_variable_from_others"
        )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    if not hasattr(optimizer, "initial_values"):
        for weight in _tables_under(optimizer):
            weight.end_writing()


register_module_module_registration_hook(_on_registration)
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
