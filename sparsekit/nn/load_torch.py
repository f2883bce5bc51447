"""Loads a state saved with torch's embedding layers into a model with sparsekit's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .. import ops
from ..lookup.access import assign_own
from ..ops._checks import FLOATING
from ..tables.embedding_table import EmbeddingTable
from ..tables.weight import EmbeddingWeight
from .dropin_embedding import Embedding

_WHERE = "load_torch_state_dict"


def load_torch_state_dict(
    model: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
) -> Any:
    """Load, in one call, a state saved before `replace_embeddings` changed the model.

    If the state has only ``<layer>.weight`` ``[n, dim]`` for one of sparsekit's layers, ids 0..n-1
    get its vectors, and the layer's earlier keys are dropped. ``model.load_state_dict`` loads
    everything else. Everything is checked before anything is changed. With several ranks, call this
    function on all of them, with the same state; each rank keeps the rows that it owns.

    Args:
        model: model with sparsekit's layers instead of torch's, under the same names.
        state_dict: state of the model with torch's layers.
        strict: whether the state must have exactly the names that the model expects.

    Returns:
        As ``load_state_dict``: ``missing_keys`` and ``unexpected_keys``.

    Raises:
        TypeError: a layer's weight in the state is not a floating-point tensor.
        ValueError: a weight's dim is not the layer's, it has more rows than the table, or its
            vector at padding_idx is not zeros; or names differ, or another tensor has a different
            shape. The message names the tensor.
    """
    layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, EmbeddingTable)
    }
    weights: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        if f"{prefix}weight" in state_dict and f"{prefix}seed" not in state_dict:
            where = f"{_WHERE}: {name}" if name else _WHERE
            weights[f"{prefix}weight"] = _checked(where, layer, state_dict[f"{prefix}weight"])
    rest = {name: value for name, value in state_dict.items() if name not in weights}
    own = model.state_dict()  # this first applies missed optimizer steps
    given = tuple(name.removesuffix("weight") for name in weights)
    missing = [n for n in own if n not in state_dict and not (given and n.startswith(given))]
    unexpected = [name for name in rest if name not in own]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{_WHERE}: the state lacks {', '.join(missing[:5]) or 'nothing'}, and has besides "
            f"{', '.join(unexpected[:5]) or 'nothing'}; pass strict=False to load what both have"
        )
    for name, value in rest.items():
        shape = getattr(value, "shape", None)
        is_dense = name in own and not any(name.startswith(f"{each}.") for each in layers)
        if is_dense and shape != own[name].shape:
            raise ValueError(
                f"{_WHERE}: {name} has shape {list(own[name].shape)}, and in the state "
                f"{list(shape) if shape is not None else type(value).__name__}"
            )
    found = model.load_state_dict(rest, strict=False)
    for name, weight in weights.items():
        _load(layers[name.removesuffix("weight").removesuffix(".")], weight)
    return type(found)(missing, unexpected)


def _checked(where: str, layer: EmbeddingTable, weight: Any) -> torch.Tensor:
    layer.refuse_meta()
    if not isinstance(weight, torch.Tensor) or weight.dtype not in FLOATING:
        what = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise TypeError(f"{where}: weight must be a floating-point tensor, got {what}")
    dim, rooms = layer.embedding_vec_size, layer.capacity * layer.world_size
    if weight.dim() != 2 or weight.shape[1] != dim:
        raise ValueError(
            f"{where}: weight in the state has shape {list(weight.shape)}, and the layer "
            f"takes [n, {dim}]"
        )
    owners = None if layer.owners is None else layer.owners.to(weight.device)
    counts = ops.bucketize(_ids(weight, weight.device), layer.world_size, owners)[1]
    if len(weight) > rooms or int(counts.max()) > layer.capacity:
        raise ValueError(
            f"{where}: weight in the state has {len(weight)} rows, and there is room for "
            f"{layer.capacity} on each of {layer.world_size} rank(s); make the layer with more, "
            f"such as extra_rows of replace_embeddings"
        )
    padding = layer.padding_key
    inside = padding is not None and 0 <= padding < len(weight)
    if isinstance(layer, Embedding) and inside and bool(weight[padding].any()):
        raise ValueError(
            f"{where}: the vector at padding_idx={padding} in the state is not zeros, "
            f"which a padding's is in sparsekit; zero it in the state first"
        )
    return weight.detach()


def _ids(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.arange(len(weight), device=device)


@torch.no_grad()
def _load(layer: EmbeddingTable, weight: torch.Tensor) -> None:
    if isinstance(layer.weight, EmbeddingWeight):
        layer.weight.moved = False
    device = layer.weight.device
    ids = _ids(weight, device).to(layer.key_dtype)
    with layer.rows_changing():
        if layer.table is not None:
            layer.table.clear_()
        else:
            layer.initializer.fill_(
                layer.weight, layer.rank, layer.world_size, seed=int(layer.seed)
            )
        assign_own(layer, ids, weight.to(device))
