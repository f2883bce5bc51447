"""Clips sparse and dense gradients, by their total norm over all ranks or elementwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from .._compiling import uncompiled
from ..distributed.dtensor import groups_of, local
from ..distributed.world import group_of
from ..tables.weight import EmbeddingWeight, update_of


@uncompiled
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most max_norm.

    Unlike in torch.nn.utils.clip_grad_norm_, gradients may be sparse, and weights of embedding
    layers count as shards: the norm is over the rows of all ranks. Other parameters are assumed
    equal on all ranks, as under DistributedDataParallel. A DTensor, as created by ``fully_shard``,
    contributes the norm of the whole tensor. With several ranks this is a collective: all ranks
    must call it, with or without gradients.

    Gradients are changed in place; a sparse gradient with repeated rows is replaced by its
    coalesced form.

    Args:
        parameters: one parameter or several, such as a module's ``parameters()``.
        max_norm: the largest norm to allow, >= 0.
        norm_type: the p of the p-norm, > 0; ``inf`` is the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or NaN; this check waits for the device.
            Otherwise, such a norm makes all gradients zero or NaN.
        process_group: the group over which tables are sharded; None means the group of
            `sparsekit.init`, or torch.distributed's default group.

    Returns:
        The norm before clipping, the same on all ranks: a 0-dim tensor, float32, or float64 if a
        parameter is float64.

    Raises:
        TypeError: max_norm or norm_type is not a number, or parameters has items that are not
            tensors.
        ValueError: max_norm is negative or NaN, norm_type is not positive, or there is a weight
            that `fuse_in_backward` has updated already.
        RuntimeError: the norm is not finite, with error_if_nonfinite; gradients are not scaled.
    """
    op = "clip_grad_norm_"
    max_norm = _number(op, "max_norm", max_norm)
    if not max_norm >= 0:
        raise ValueError(f"{op}: max_norm must be >= 0, got {max_norm}")
    norm_type = _number(op, "norm_type", norm_type)
    if not norm_type > 0:
        raise ValueError(f"{op}: norm_type must be > 0, got {norm_type}")
    parameters = _tensors(op, parameters)

    # Keep norms on the device of the parameters, since a rank may lack gradients, and in float64,
    # so that all ranks send the same dtype.
    device = parameters[0].device if parameters else torch.get_default_device()
    none = torch.zeros((), dtype=torch.float64, device=device)
    sharded, dense, gradients = [none], [none], []
    of_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        values = _values(parameter)
        norms = sharded if isinstance(parameter, EmbeddingWeight) else dense
        groups = groups_of(parameter)
        if groups:
            # Add an entry even without a gradient, so that all ranks run the same collectives.
            norms = of_groups.setdefault(groups, [none])
        if values is None or values.numel() == 0:  # the inf-norm of an empty tensor is an error
            continue
        accumulate = torch.promote_types(values.dtype, torch.float32)
        norm = torch.linalg.vector_norm(values, norm_type, dtype=accumulate).to(none)
        norms.append(norm)
        gradients.append(values)
    # Compute norms of norms, since a sum of p-th powers may overflow even if the norm does not.
    shard = torch.linalg.vector_norm(torch.stack(sharded), norm_type)
    for groups, norms in of_groups.items():
        part = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        for group in groups:
            of_ranks = torch.stack(_of_all_ranks(part, group))
            part = torch.linalg.vector_norm(of_ranks, norm_type)
        dense.append(part)
    parts = torch.stack([*_of_all_ranks(shard, process_group), *dense])
    total = torch.linalg.vector_norm(parts, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"{op}: the norm of order {norm_type} is {total.item()}, so gradients cannot be "
            f"clipped; error_if_nonfinite=False scales them all the same"
        )
    # Clamp the scale instead of comparing it, since a comparison would wait for the device.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for values in gradients:
        values.mul_(scale.to(values.device))
    double = any(parameter.dtype == torch.float64 for parameter in parameters)
    return total if double else total.float()


@uncompiled
@torch.no_grad()
def clip_grad_value_(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp each element of the gradients to [-clip_value, clip_value].

    Unlike in torch.nn.utils.clip_grad_value_, gradients may be sparse. The gradient of a row is
    summed over all its lookups before it is clamped, so every rank clamps its own rows without
    communication. Gradients are changed in place; a sparse gradient with repeated rows is replaced
    by its coalesced form.

    Args:
        parameters: one parameter or several, such as a module's ``parameters()``.
        clip_value: the largest absolute value to allow, >= 0.

    Raises:
        TypeError: clip_value is not a number, or parameters has items that are not tensors.
        ValueError: clip_value is negative or NaN, or there is a weight that `fuse_in_backward` has
            updated already.
    """
    op = "clip_grad_value_"
    clip_value = _number(op, "clip_value", clip_value)
    if not clip_value >= 0:
        raise ValueError(f"{op}: clip_value must be >= 0, got {clip_value}")
    for parameter in _tensors(op, parameters):
        values = _values(parameter)
        if values is not None:
            values.clamp_(-clip_value, clip_value)


def _number(op: str, argument: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {argument} must be a number, got {value!r}") from None


def _tensors(op: str, parameters: Any) -> list[torch.Tensor]:
    """Check all parameters, before any gradient is changed, and return them as a list."""
    if isinstance(parameters, torch.nn.Module):
        raise TypeError(f"{op}: parameters must not be a module; pass its parameters()")
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    for position, item in enumerate(tensors):
        if not isinstance(item, torch.Tensor):
            raise TypeError(
                f"{op}: parameters must be tensors, but item {position} is a {type(item).__name__}"
            )
        if update_of(item) is not None:
            raise ValueError(
                f"{op}: a weight of shape {tuple(item.shape)} is updated in backward, which leaves "
                f"no gradient to clip"
            )
    return tensors


def _values(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a parameter's gradient, after summing repeated rows."""
    if parameter.grad is None:
        return None
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
        return parameter.grad._values()
    return local(parameter.grad)


def _of_all_ranks(norm: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    group = group_of(group)
    if group is None:
        return [norm]
    # Gather the norms instead of reducing them, since gloo's maximum ignores NaNs.
    gathered = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, norm, group=group)
    return gathered
