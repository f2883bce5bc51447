"""Swaps the embedding layers of an existing model for their drop-ins."""

from __future__ import annotations

import fnmatch
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..errors import check_int
from ..ops._checks import ROW_DTYPES
from ..tables.initializers import Normal
from .dropin import DropIn
from .dropin_embedding import Embedding
from .dropin_embedding_bag import EmbeddingBag
from .references import Reference, readers, references

_OF_TORCH = torch.nn.Embedding, torch.nn.EmbeddingBag
_OF_EACH = "device", "dtype", "name", "num_embeddings", "padding_idx", "padding_key", "seed"


@dataclass(frozen=True)
class Replacement:
    """Report from `replace_embeddings` on one layer.

    Attributes:
        names: the layer's names in the model; a shared layer has several.
        old: torch's layer.
        new: the layer that replaced it; None if torch's layer was kept.
        reason: why torch's layer was kept; empty if it was replaced.
        rebound: other references to the old layer or its weight that were changed to the new one,
            for example in a list of weights to regularise.
    """

    names: tuple[str, ...]
    old: torch.nn.Embedding | torch.nn.EmbeddingBag
    new: DropIn | None = None
    reason: str = ""
    rebound: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.old.num_embeddings}, {self.old.embedding_dim}"
        what = f"{' = '.join(self.names)}: {type(self.old).__name__}({size})"
        if self.new is None:
            return f"{what} left: {self.reason}"
        also = f", also in {' and '.join(self.rebound)}" if self.rebound else ""
        return f"{what} -> sparsekit.{type(self.new).__name__}, {self.new.capacity} rows{also}"


def replace_embeddings(
    model: torch.nn.Module,
    names: str | Sequence[str] = "*",
    *,
    min_rows: int = 0,
    extra_rows: int = 0,
    verbose: bool = True,
    **options: Any,
) -> list[Replacement]:
    """Swap ``nn.Embedding`` and ``nn.EmbeddingBag`` anywhere in a model for their drop-ins.

    A new layer has copies of the vectors for ids 0..n-1; in a single process, they are in rows
    0..n-1. A layer that the model uses in several places stays one layer. A new layer is named
    after its place in the model. Weights are new parameters, so make optimizers and wrap the model
    afterwards. With several ranks, call this function on all of them, with the same weights.

    A layer is kept, with a reason, if a drop-in would behave differently: if it has
    scale_grad_by_freq, hooks, a class or forward of its own, a weight that another module shares,
    or a vector at padding_idx that is not zeros; or if its weight is not finite, or not of dtype
    float32, float64 or bfloat16.

    References to the old layer or its weight in the model's attributes, lists, dicts, tuples and
    closures are changed to the new one, so that a regulariser keeps working. A layer is kept if
    this is impossible, for example if an optimizer holds the reference. If the rows of the
    new weight are not exactly the old ids, a warning lists methods that read the layer's
    ``.weight`` by name, for example for a softmax over all items.

    Args:
        model: changed in place; if an error is raised, no layer is changed.
        names: one or more patterns for layer names in `model.named_modules()`; ``*`` matches
            anything, as in fnmatch.
        min_rows: layers with fewer rows are left unchanged.
        extra_rows: number of rows beyond n in each new table, for additional ids (any int64). Their
            vectors start from a normal distribution with the weight's mean and standard
            deviation.
        verbose: whether to print what was done.
        options: keywords for all new layers, such as placement, or the embedding_initializer for
            extra ids.

    Returns:
        One report for each layer whose name matches `names`.

    Raises:
        TypeError: the model itself is a torch embedding layer, or options has a keyword whose value
            cannot be the same for all layers.
        ValueError: no layer's name matches a pattern, or the model is wrapped in
            DistributedDataParallel.
        The layers raise further errors.
    """
    where = "replace_embeddings"
    patterns = [names] if isinstance(names, str) else list(names)
    extra_rows = check_int(where, "extra_rows", extra_rows, 0, 2**31 - 1)
    if own := [word for word in _OF_EACH if word in options]:
        raise TypeError(f"{where}: {own[0]} is not the same of all layers")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(f"{where}: call it before DistributedDataParallel wraps the model")
    found = _names_of_layers(model)
    for pattern in patterns:
        if pattern != "*" and not any(fnmatch.filter(places, pattern) for places in found.values()):
            there = sorted(name for places in found.values() for name in places)
            raise ValueError(f"{where}: no layer fits {pattern!r}; there are {there}")
    parameters = _names_of_parameters(model)
    held = references(model, found)
    done = []
    for layer, places in found.items():
        if layer.num_embeddings < min_rows:
            continue
        if not any(fnmatch.filter(places, pattern) for pattern in patterns):
            continue
        if reason := _why_not(layer, parameters) or _why_not_rebound(held[layer]):
            done.append(Replacement(tuple(places), layer, reason=reason))
        else:
            new = _drop_in(layer, places[0], extra_rows, options)
            rebound = tuple(place.name for place in held[layer])
            done.append(Replacement(tuple(places), layer, new, rebound=rebound))
    swapped = {one.old: one.new for one in done if one.new is not None}
    reading = readers(model, swapped)
    _swap(model, swapped, held)
    if verbose:
        count = sum(one.new is not None for one in done)
        print(f"{where}: {count} of {len(done)} layers swapped", *done, sep="\n  ")
    for layer, own in reading.items():
        _warn_of_readers(layer, swapped.get(layer), own)
    return done


def _names_of_layers(model: torch.nn.Module) -> dict[Any, list[str]]:
    """Return all layers of torch's embedding classes or subclasses, each with all of its names."""
    found: dict[Any, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _OF_TORCH):
            if module is model:
                raise TypeError(
                    f"replace_embeddings: the model is itself an {type(module).__name__}, and it "
                    f"takes something around it to put another in its place; make a "
                    f"sparsekit.{type(module).__name__}.from_pretrained(model.weight, freeze=False)"
                )
            found.setdefault(module, []).append(name)
    return found


def _names_of_parameters(model: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return all parameters, each with all of its names in the model."""
    found: dict[torch.Tensor, list[str]] = {}
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append(f"{name}.{own}")
    return found


def _why_not(layer: Any, parameters: dict[torch.Tensor, list[str]]) -> str:
    """Return the reason why a layer cannot be swapped, or an empty string if it can."""
    if type(layer) not in _OF_TORCH or "forward" in vars(layer):
        return "its class, or its forward, is its own"
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(layer, hooks):
            return "it has hooks"
    if layer.scale_grad_by_freq:
        return f"sparsekit has no scale_grad_by_freq={layer.scale_grad_by_freq!r}"
    weight = layer.weight
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return "its weight has hooks"
    if len(parameters.get(weight, [])) != 1:
        return f"its weight is that of several modules: {' = '.join(parameters.get(weight, []))}"
    if weight.dtype not in ROW_DTYPES:
        return f"its weight is {weight.dtype}, and rows are float32, float64 or bfloat16"
    if weight.device.type not in ("cpu", "cuda"):
        return f"its weight is on {weight.device}"
    if weight.numel() == 0:
        return "its weight has no elements"
    if not weight.isfinite().all():
        return "its weight is not finite"
    padding = layer.padding_idx
    if isinstance(layer, torch.nn.Embedding) and padding is not None and weight[padding].any():
        return (
            f"its vector at padding_idx={padding} is not zeros, which a padding's is in sparsekit: "
            f"to have it replaced, zero that vector first (weight.data[{padding}] = 0)"
        )
    return ""


def _why_not_rebound(held: Sequence[Reference]) -> str:
    """Return the reason why other references to a layer cannot be changed, or an empty string."""
    for place in held:
        if place.set is None:
            return f"{place.name} has it, its weight or a view of that, and cannot be given another"
    return ""


def _drop_in(layer: Any, name: str, extra_rows: int, options: dict[str, Any]) -> DropIn:
    weight = layer.weight.detach()
    # Round, since ranks may sum in different orders but must get the same numbers.
    std, mean = (float(f"{x:.3g}") for x in torch.std_mean(weight.double(), correction=0))
    keywords = {
        "freeze": not layer.weight.requires_grad,
        "padding_idx": layer.padding_idx,
        "max_norm": layer.max_norm,
        "norm_type": layer.norm_type,
        "num_embeddings": len(weight) + extra_rows,
        "embedding_initializer": Normal(mean, std),
        "name": name,
        **options,
    }
    if isinstance(layer, torch.nn.Embedding):
        new: DropIn = Embedding.from_pretrained(weight, **keywords)
    else:
        bags = {"mode": layer.mode, "include_last_offset": layer.include_last_offset}
        new = EmbeddingBag.from_pretrained(weight, **bags, **keywords)
    return new.train(layer.training)


def _swap(model: torch.nn.Module, new: dict[Any, DropIn], held: dict[Any, list[Reference]]) -> None:
    undo: list[Callable[[], None]] = []
    try:
        for layer, drop_in in new.items():
            for place in held[layer]:
                if place.set is not None:  # always true: otherwise the layer would have been kept
                    old = place.get()
                    undo.append(functools.partial(place.set, old))
                    place.set(drop_in if old is layer else drop_in.weight)
        for parent in list(model.modules()):
            for attribute, module in list(parent._modules.items()):
                if module in new:
                    undo.append(functools.partial(parent._modules.__setitem__, attribute, module))
                    setattr(parent, attribute, new[module])
    except BaseException:  # raised, for example, by a module's __setattr__
        for step in undo:
            step()
        raise


def _warn_of_readers(old: Any, new: Any, where: Sequence[str]) -> None:
    """Warn about code that reads a weight whose rows are no longer exactly the ids 0..n-1."""
    if not where or (new.capacity == old.num_embeddings and new.world_size == 1):
        return
    rows = f"{new.capacity} rows for {old.num_embeddings} ids"
    if new.world_size > 1:
        rows = f"the rows of rank {new.rank} of {new.world_size} only"
    warnings.warn(
        f"replace_embeddings: {' and '.join(where)}, which now has {rows}, so a softmax or a "
        f"product over all of it is another one; read layer.vectors(ids) there, or on one rank "
        f"swap this layer by name without extra_rows",
        stacklevel=3,
    )
