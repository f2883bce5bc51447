"""Many tables, one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ..ops.embedding_bag import COMBINERS
from .lookup import Route, begin, finish, look_up
from .request import Request, ask_bags
from .shard import ShardedTable


class EmbeddingGroup(torch.nn.Module):
    """Layers that look up together: the same few collectives however many they are.

    Dims, dtypes, combiners and slots may differ; process group and device are shared. On one
    process it is the layers one after another.

    Args:
        layers: name -> `DistributedEmbedding` or `All2AllDenseEmbedding`. The order is that in
            which ranks look them up, so it must be the same on all.

    Example:
        >>> group = EmbeddingGroup({"user": users, "item": items})
        >>> out = group({"user": user_keys, "item": item_keys})["user"]
    """

    def __init__(self, layers: Mapping[str, ShardedTable]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("EmbeddingGroup: layers must not be empty")
        for name, layer in layers.items():
            if not isinstance(layer, ShardedTable):
                raise TypeError(
                    f"EmbeddingGroup: layers[{name!r}] must be an embedding layer of sparsekit, "
                    f"got {type(layer).__name__}"
                )
        _check_shared("EmbeddingGroup", list(layers.values()))
        try:
            self.layers = torch.nn.ModuleDict(layers)
        except KeyError as error:
            raise ValueError(
                f"EmbeddingGroup: a name in layers cannot be that of a module: {error.args[0]}"
            ) from error
        # What prefetch has begun, and its inputs.
        self._begun: tuple[Mapping[str, Any], Route] | None = None

    def forward(
        self, inputs: Mapping[str, Any], sample_weights: Mapping[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Call every layer.

        Args:
            inputs: name -> input of that layer, for every layer.
            sample_weights: name -> weights of that layer's keys, for those that have any.

        Returns:
            name -> output of that layer.

        Raises:
            ValueError: names that are missing or unknown.
            And what the layers raise.
        """
        if self._begun is None:
            tables = self._tables()
            outputs = look_up(tables, lambda: self._requests(inputs, sample_weights or {}))
        else:
            (expected, route), self._begun = self._begun, None
            error = None
            if expected is not inputs:
                error = ValueError(
                    "EmbeddingGroup: inputs is not what prefetch was called with; call the group "
                    "with that batch first"
                )
            outputs = finish(route, error)
        return dict(zip(self.layers, outputs, strict=True))

    def prefetch(
        self, inputs: Mapping[str, Any], sample_weights: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to send the keys of the next batch while the rest of this one goes on.

        Call it after the backward of a batch, or before; the next call of the group must be with
        the very same `inputs`, and needs no sample_weights. Nothing is looked up before that call,
        so the result is that of a call without prefetch.

        Raises:
            As a call does.
            RuntimeError: a batch has been prefetched already.
        """
        if self._begun is not None:
            raise RuntimeError("EmbeddingGroup: prefetch was called twice; call the group between")
        route = begin(self._tables(), lambda: self._requests(inputs, sample_weights or {}))
        self._begun = inputs, route

    def __getstate__(self) -> dict[str, Any]:
        # A prefetched batch stays with this group; a copy of it looks up all by itself.
        return {**self.__dict__, "_begun": None}

    def _tables(self) -> list[ShardedTable]:
        return [cast(ShardedTable, layer) for layer in self.layers.values()]

    def _requests(self, inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> list[Request]:
        if set(inputs) != set(self.layers) or not set(weights) <= set(self.layers):
            raise ValueError(
                f"EmbeddingGroup: inputs must have the layers {list(self.layers)}, got "
                f"{list(inputs)}, and sample_weights some of them, got {list(weights)}"
            )
        calls = (
            (inputs[name], weights[name]) if name in weights else (inputs[name],)
            for name in self.layers
        )
        return [layer.request(*call) for layer, call in zip(self._tables(), calls, strict=True)]


def group_embedding_lookup_sparse(
    params: Sequence[ShardedTable],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    sp_weights: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    """Pool bags of several tables in one exchange; SOK's function of that name.

    Args:
        params: the tables: embedding layers, of which only the table is used.
        sp_ids: the bags of each: any form that `DistributedEmbedding` takes, with one slot.
        combiners: ``"sum"``, ``"mean"`` or ``"sqrtn"`` for each.
        sp_weights: for each table weights or None; None for no weights at all.

    Returns:
        For each table ``[bags, dim]``.

    Raises:
        ValueError: sequences of different lengths, or an unknown combiner.
        And what `DistributedEmbedding` raises.
    """
    name = "group_embedding_lookup_sparse"
    weights = [None] * len(params) if sp_weights is None else sp_weights
    lengths = [len(params), len(sp_ids), len(combiners), len(weights)]
    if len(set(lengths)) > 1 or not params:
        raise ValueError(
            f"{name}: params, sp_ids, combiners and sp_weights must have one length, at least 1; "
            f"got {lengths}"
        )
    for combiner in combiners:
        if combiner not in COMBINERS:
            raise ValueError(
                f"{name}: combiners must be some of {list(COMBINERS)}; got {combiner!r}"
            )
    _check_shared(name, params)

    def ask() -> list[Request]:
        calls = zip(params, sp_ids, weights, combiners, strict=True)
        return [ask_bags(*call, slot_num=1) for call in calls]

    return [output.squeeze(1) for output in look_up(params, ask)]


def _check_shared(name: str, layers: Sequence[ShardedTable]) -> None:
    for layer in layers:
        if layer.process_group is not layers[0].process_group:
            raise ValueError(f"{name}: {layer.name} and {layers[0].name} have two process groups")
        if layer.weight.device != layers[0].weight.device:
            raise ValueError(
                f"{name}: {layer.name} is on {layer.weight.device}, {layers[0].name} on "
                f"{layers[0].weight.device}"
            )
