"""Looks up keys in many tables with one exchange between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._compiling import uncompiled
from .._pybind import dict_has
from ..errors import check_choice
from ..lookup import Asked, PlanCache, Route, begin, finish, look_up, refused
from ..lookup.inputs import is_keyed_jagged
from ..lookup.request import GROUP, Request, ask_bags
from ..lookup.slots import POOLINGS
from ..lookup.user_scores import beside
from ..tables.embedding_table import EmbeddingTable
from .any_names import LayersByName, name_in_state
from .features import (
    OUTPUTS,
    Feature,
    ask_each,
    ask_keyed,
    asked_of,
    check_joined,
    joined,
    keyed_tensor_class,
    settled,
    share_columns,
    whole,
)
from .layer import EmbeddingLayer


class EmbeddingGroup(torch.nn.Module):
    """Layers looked up together: one call to each op, and a few collectives, serve all of them.

    Dims, dtypes, combiners and slots may differ; process group and device must be the same.

    Inputs are a dict, for example of JaggedTensors, or one KeyedJaggedTensor with a key for each
    feature, in any order; other keys are ignored. The weights in a KeyedJaggedTensor are sample
    weights. In a single process, the tensor's values are read without copying.

    Args:
        layers: the layers by name. Names must not be empty, and the layers' own names must differ.
            Ranks perform lookups in the order of layers, or features, so the order must be the same
            on all ranks.
        features: maps each feature's name to a layer's name, or to a `Feature` with its own
            combiner and max_nnz; a feature's bags have one slot. Features with the same layer
            share its table. None means one feature per layer, with the layer's name; in a dict, its
            input has all of the layer's slots.
        output: ``"dict"``: a dict from feature names to ``[batch, dim]``, or jagged
            ``[batch, j, dim]`` if the feature does not pool (zeros for a padding key); without
            features, a dict from layer names to each layer's output. ``"concatenated"``: ``[batch,
            sum of dims]`` in feature order; all features must pool, and have the same dtype.
            ``"keyed"``: the same, as a torchrec KeyedTensor.

    Raises:
        TypeError, ValueError: a bad argument; the message names the feature and the layer.
        ImportError: output="keyed" without torchrec.

    Example:
        >>> group = EmbeddingGroup({"user": users, "item": items})
        >>> out = group({"user": user_keys, "item": item_keys})["user"]
        >>> seen = Feature("item", combiner="mean", max_nnz=50)
        >>> features = {"user": "user", "item": "item", "seen": seen}
        >>> group = EmbeddingGroup({"user": users, "item": items}, features, "concatenated")
        >>> out = group(keyed_jagged_tensor)  # [batch, 3 * dim]
    """

    # The `_tables` that `_check_slots` has last found to have one slot each. A default for all
    # groups, since groups pickled earlier do not have it.
    _single: Sequence[EmbeddingTable] | None = None

    def __init__(
        self,
        layers: Mapping[str, EmbeddingLayer],
        features: Mapping[str, str | Feature] | None = None,
        output: str = "dict",
    ) -> None:
        super().__init__()
        if not hasattr(layers, "keys"):  # a ModuleDict counts as a mapping too
            raise TypeError(
                f"EmbeddingGroup: layers must be a mapping, got {type(layers).__name__}"
            )
        if not layers:
            raise ValueError("EmbeddingGroup: layers must not be empty")
        for name, layer in layers.items():
            if not isinstance(layer, EmbeddingLayer):
                raise TypeError(
                    f"EmbeddingGroup: layers[{name!r}] must be an embedding layer of sparsekit, "
                    f"got {type(layer).__name__}"
                )
        _check_shared(GROUP, list(layers.values()))
        _check_names(layers)
        try:
            self.layers = LayersByName(layers)
        except KeyError as error:
            raise ValueError(f"{GROUP}: layers has a name that is none: {error.args[0]}") from error
        # If the caller gives no features, each layer has one default feature with the same name.
        self.has_features = features is not None
        if features is None:
            features = {name: whole(name, layer) for name, layer in layers.items()}
        self.features = settled(features, layers)
        self._asked: list[EmbeddingLayer] = []
        self._layers_asked = [name_in_state(feature.layer) for feature in self.features.values()]
        check_choice(GROUP, "output", output, OUTPUTS)
        self.output = output
        if output != "dict":
            check_joined(output, self.features, layers)
            self._check_slots(self._tables(), f"output={output!r}")
        if output == "keyed":
            keyed_tensor_class()
        reads = [not feature.insert for feature in self.features.values()]
        self._plan_cache = PlanCache(reads if any(reads) else ())
        # Inputs of the prefetched batch, and the lookup that has been started for them.
        self._begun: tuple[Any, Route] | None = None

    @uncompiled
    def forward(
        self,
        inputs: Any,
        sample_weights: Mapping[str, Any] | None = None,
        scores: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Look up the inputs of all features.

        Args:
            inputs: a dict with an input for every feature, or for every layer if the group has no
                features; or a KeyedJaggedTensor.
            sample_weights: weights of each input's keys, by name; inputs without weights may be
                left out. A KeyedJaggedTensor has its own weights.
            scores: scores of each input's keys, by name, for layers with score="given"; see
                `DistributedEmbedding.forward`. With a KeyedJaggedTensor, scores for a name belong
                to the tensor's values with that name.

        Returns:
            The form that `output` selects, by default a dict.

        Raises:
            TypeError: inputs, sample_weights or scores is not a mapping.
            ValueError: a name is missing or unknown.
            The layers raise further errors.
        """
        if self._begun is None:
            tables = self._tables()
            asked = self._ask(tables, inputs, sample_weights, scores)
            outputs = look_up(self._plan_cache, tables, asked)
        else:
            (expected, route), self._begun = self._begun, None
            error = None
            if expected is not inputs:
                error = ValueError(
                    "EmbeddingGroup: inputs is not what prefetch was called with; call the group "
                    "with that batch first"
                )
            outputs = finish(route, error)
        if self.output == "dict":
            return dict(zip(self.features, outputs, strict=True))
        values = joined(outputs)
        if self.output == "concatenated":
            return values
        dims = [table.embedding_vec_size for table in self._tables()]
        return keyed_tensor_class()(list(self.features), dims, values)

    @uncompiled
    def prefetch(
        self,
        inputs: Any,
        sample_weights: Mapping[str, Any] | None = None,
        scores: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Start sending the next batch's keys while work on the current batch continues.

        Call it before or after a batch's backward. The next call to the group must pass the same
        object as `inputs`, and needs neither sample_weights nor scores. Nothing is looked up before
        that call, so the result is the same as without prefetch.

        On CUDA, call it between a batch's lookup and its dense part if you can: sending waits for
        work already queued on the current stream, and overlaps with later work.

        Raises:
            RuntimeError: a batch has been prefetched already.
            A call to the group raises further errors.
        """
        if self._begun is not None:
            raise RuntimeError("EmbeddingGroup: prefetch was called twice; call the group between")
        tables = self._tables()
        asked = self._ask(tables, inputs, sample_weights, scores)
        self._begun = inputs, begin(self._plan_cache, tables, asked)

    def __getstate__(self) -> dict[str, Any]:
        # A prefetched batch stays with this group; a copy of the group starts without one.
        return {**self.__dict__, "_begun": None, "_asked": [], "_single": None}

    def _tables(self) -> list[EmbeddingLayer]:
        """Return each feature's layer; the list object is reused until a layer changes."""
        layers: dict[str, Any] = self.layers._modules
        if not dict_has(layers, self._layers_asked, self._asked):
            self._asked = [layers[name] for name in self._layers_asked]
        return self._asked

    def _ask(
        self,
        tables: Sequence[EmbeddingTable],
        inputs: Any,
        weights: Mapping[str, Any] | None,
        scores: Mapping[str, torch.Tensor] | None = None,
    ) -> Asked:
        """Return a request for each feature, or the error that the inputs caused."""
        join = self.output != "dict"
        try:
            if is_keyed_jagged(inputs):
                self._check_slots(tables, "a KeyedJaggedTensor")
                plan = self._plan_cache.plan_for(tables)
                keyed = ask_keyed(plan, self.features, inputs, weights, join)
                return self._with_scores(keyed, inputs, scores)
            requests = self._ask_each(inputs, {} if weights is None else weights)
            if join:
                share_columns(requests)
            return self._with_scores(requests, inputs, scores)
        except BaseException as error:
            return refused(tables, error)

    def _check_slots(self, layers: Sequence[EmbeddingTable], what: str) -> None:
        """Raise ValueError if a layer has several slots and the group has no features."""
        if self.has_features or layers is self._single:
            return
        for name, layer in zip(self.features, layers, strict=True):
            slots = getattr(layer, "slot_num", 1)
            if slots != 1:
                raise ValueError(
                    f"EmbeddingGroup: {what} needs features, since layer {name!r} has "
                    f"slot_num={slots}"
                )
        self._single = layers

    def _with_scores(
        self,
        requests: Sequence[Request],
        inputs: Mapping[str, Any],
        scores: Mapping[str, torch.Tensor] | None,
    ) -> Sequence[Request]:
        """Add each input's scores to its request, and return the requests."""
        if scores is not None:
            self._check_names("scores", scores)
            for name, request in zip(self.features, requests, strict=True):
                if name in scores:
                    beside(request, inputs[name], scores[name])
        return requests

    def _check_mapping(self, argument: str, given: Any) -> str:
        what = "features" if self.has_features else "layers"
        if not hasattr(given, "keys"):
            raise TypeError(
                f"EmbeddingGroup: {argument} must be a mapping with the names of {what}, got "
                f"{type(given).__name__}"
            )
        return what

    def _check_names(self, argument: str, given: Mapping[str, Any]) -> None:
        what = self._check_mapping(argument, given)
        if unknown := [name for name in given if name not in self.features]:
            raise ValueError(
                f"EmbeddingGroup: {argument} must be of the {what} {list(self.features)}, got "
                f"{unknown}"
            )

    def _ask_each(self, inputs: Mapping[str, Any], weights: Mapping[str, Any]) -> list[Request]:
        what = self._check_mapping("inputs", inputs)
        self._check_mapping("sample_weights", weights)
        if set(inputs) != set(self.features):
            raise ValueError(
                f"EmbeddingGroup: inputs must have the {what} {list(self.features)}, got "
                f"{list(inputs) or 'none'}"
            )
        self._check_names("sample_weights", weights)
        if self.has_features:
            return ask_each(asked_of(self.features, self._tables()), inputs, weights)
        calls = (
            (inputs[name], weights[name]) if name in weights else (inputs[name],)
            for name in self.layers
        )
        return [layer.request(*call) for layer, call in zip(self._tables(), calls, strict=True)]


@uncompiled
def group_embedding_lookup_sparse(
    params: Sequence[EmbeddingLayer],
    sp_ids: Sequence[Any],
    combiners: Sequence[str],
    sp_weights: Sequence[Any] | None = None,
) -> list[torch.Tensor]:
    """Pool bags from several tables in one exchange, like SOK's function with the same name.

    Args:
        params: embedding layers; only their tables are used.
        sp_ids: the bags for each table, in any form that `DistributedEmbedding` takes with one
            slot.
        combiners: ``"sum"``, ``"mean"``, ``"sqrtn"`` or ``"max"`` for each table.
        sp_weights: for each table, weights or None; a single None means no weights at all.

    Returns:
        The pooled vectors, ``[bags, dim]`` for each table.

    Raises:
        ValueError: sequences have different lengths, or a combiner is unknown.
            `DistributedEmbedding` raises further errors.
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
        if combiner not in POOLINGS:
            raise ValueError(
                f"{name}: combiners must be some of {list(POOLINGS)}; got {combiner!r}"
            )
    _check_shared(name, params)

    calls = zip(params, sp_ids, weights, combiners, strict=True)
    try:
        asked: Asked = [ask_bags(*call, slot_num=1) for call in calls]
    except BaseException as error:
        asked = refused(params, error)
    return [output.squeeze(1) for output in look_up(PlanCache(), params, asked)]


def _check_names(layers: Mapping[str, EmbeddingLayer]) -> None:
    """Raise ValueError if two layers share a name: equal keys would get equal initial vectors."""
    by_name: dict[str, str] = {}
    for name, layer in layers.items():
        other = by_name.setdefault(layer.name, name)
        if layers[other] is not layer:
            raise ValueError(
                f"{GROUP}: layers[{other!r}] and layers[{name!r}] are two layers with "
                f"name={layer.name!r}, and equal keys of theirs would start from equal vectors; "
                f"give each a name of its own"
            )


def _check_shared(name: str, layers: Sequence[EmbeddingLayer]) -> None:
    for layer in layers:
        if layer.process_group is not layers[0].process_group:
            raise ValueError(f"{name}: {layer.name} and {layers[0].name} have two process groups")
        if layer.weight.device != layers[0].weight.device:
            raise ValueError(
                f"{name}: {layer.name} is on {layer.weight.device}, {layers[0].name} on "
                f"{layers[0].weight.device}"
            )
