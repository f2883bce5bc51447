"""Defines features of an EmbeddingGroup, makes requests for their bags, and joins the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ..errors import check_choice
from ..lookup import LookupPlan, remember
from ..lookup.inputs import Bags, check_bags, read_bags
from ..lookup.request import (
    GROUP,
    LazyRequests,
    Request,
    change_without_waiting,
    check_key_dtype,
    leave_padding_out,
    name_of,
    on_device,
    vectors_of_bags,
    weights_need_gradient,
)
from ..lookup.slots import NO_LIMIT, POOLINGS, check_max_nnz, within
from ..lookup.without_waiting import Changes, changed
from ..tables.embedding_table import EmbeddingTable

OUTPUTS = ("dict", "concatenated", "keyed")


@dataclass(frozen=True)
class Feature:
    """Settings of a feature in an `EmbeddingGroup`.

    Args:
        layer: name of the layer in the group. Several features may name the same layer.
        combiner: ``"sum"``, ``"mean"``, ``"sqrtn"`` or ``"max"``; None for the vector of each key,
            without pooling or weights; ``"default"`` for the layer's combiner.
        max_nnz: largest number of keys in a bag; None for the layer's limit.
        truncate: whether keys beyond max_nnz are left out, as in `DistributedEmbedding`; None for
            the layer's setting. Without pooling, padding keys count too.
        insert: False for a feature that only reads the table: in training it gives no rows to new
            keys, and writes neither scores nor counts. New keys have their initial vectors and no
            gradient, unless another feature inserts them in the same call.
    """

    layer: str
    combiner: str | None = "default"
    max_nnz: int | None = None
    truncate: bool | None = None
    insert: bool = True


@dataclass(slots=True)
class BoundFeature:
    """A feature and its table, with defaults replaced by the layer's settings."""

    name: str
    table: EmbeddingTable
    feature: Feature

    @property
    def max_feature_num(self) -> int | None:
        """Limit on the number of keys in a sample; None if there is none."""
        return getattr(self.table, "max_feature_num", None)

    @property
    def is_sum(self) -> bool:
        """Return whether the multi-table ops can pool the feature's bags."""
        return self.feature.combiner not in (None, "max")

    @property
    def can_share(self) -> bool:
        """Return whether the ops can read the feature's bags in place, from a shared tensor."""
        return (
            self.is_sum
            and not self.feature.truncate
            and self.max_feature_num is None
            and self.table.padding_key is None
        )


def whole(name: str, layer: EmbeddingTable) -> str | Feature:
    """Return the default feature of a layer; a placeholder if the layer has several slots."""
    if getattr(layer, "slot_num", 1) == 1:
        return name
    return Feature(name, "sum", NO_LIMIT, truncate=False)


def settled(
    features: Mapping[str, str | Feature], layers: Mapping[str, EmbeddingTable]
) -> dict[str, Feature]:
    """Return the features with their layers' defaults filled in.

    Raises:
        TypeError, ValueError: an item is not a feature; the message names it.
    """
    if not isinstance(features, Mapping):
        raise TypeError(f"{GROUP}: features must be a mapping, got {type(features).__name__}")
    found = {name: _settled(name, feature, layers) for name, feature in features.items()}
    unasked = set(layers) - {feature.layer for feature in found.values()}
    if unasked:
        raise ValueError(f"{GROUP}: no feature asks the layer(s) {sorted(unasked)}")
    return found


def _settled(name: str, feature: str | Feature, layers: Mapping[str, EmbeddingTable]) -> Feature:
    where = f"{GROUP}: features[{name!r}]"
    if isinstance(feature, str):
        feature = Feature(feature)
    if not isinstance(feature, Feature):
        raise TypeError(
            f"{where} must be a layer's name or a Feature, got {type(feature).__name__}"
        )
    if feature.layer not in layers:
        raise ValueError(f"{where} asks the layer {feature.layer!r}; there are {list(layers)}")
    layer = layers[feature.layer]
    if not isinstance(feature.insert, bool):
        raise TypeError(f"{where}: insert must be True or False, got {feature.insert!r}")
    if not feature.insert and layer.max_keys_per_rank is not None:
        raise ValueError(
            f"{where}: insert=False cannot have max_keys_per_rank={layer.max_keys_per_rank} of "
            f"layer {feature.layer!r}, whose messages do not tell which keys are to be inserted"
        )
    check_choice(where, "combiner", feature.combiner, (*POOLINGS, None, "default"))
    if feature.combiner == "default":
        feature = replace(feature, combiner=_of_layer(where, feature.layer, layer, "combiner"))
    max_nnz = feature.max_nnz
    if max_nnz is None:
        max_nnz = _of_layer(where, feature.layer, layer, "max_nnz")
    truncate = feature.truncate
    if truncate is None:
        truncate = getattr(layer, "truncate", False)
    most = cast("int | None", check_max_nnz(where, max_nnz, truncate, 1))
    return replace(feature, max_nnz=NO_LIMIT if most is None else most, truncate=truncate)


def _of_layer(where: str, name: str, layer: EmbeddingTable, setting: str) -> Any:
    """Return a setting of the layer; None if the layer lacks it."""
    value = getattr(layer, setting, None)
    if isinstance(value, tuple):
        raise ValueError(
            f"{where} needs a {setting}, since layer {name!r} has one for each of its slots, "
            f"{list(value)}"
        )
    return value


def check_joined(
    output: str, features: Mapping[str, Feature], layers: Mapping[str, EmbeddingTable]
) -> None:
    """Raise ValueError unless the vectors of all features can be columns of one output."""
    dtype = None
    for name, feature in features.items():
        layer = layers[feature.layer]
        what = f"{GROUP}: output={output!r} needs"
        if feature.combiner is None:
            raise ValueError(
                f"{what} a combiner, but feature {name!r} of layer {feature.layer!r} has none"
            )
        dtype = dtype or layer.weight.dtype
        if layer.weight.dtype != dtype:
            raise ValueError(
                f"{what} one dtype, but feature {name!r} of layer {feature.layer!r} has "
                f"{layer.weight.dtype} and those before it {dtype}"
            )


def ask_each(
    asked: Sequence[BoundFeature], inputs: Mapping[str, Any], weights: Mapping[str, Any]
) -> list[Request]:
    """Return a request for each feature, given bags by name; do not change any table."""
    requests = []
    for one in asked:
        name = name_of(one.table, one.name)
        bags = read_bags(inputs[one.name], weights.get(one.name), name, one.table.weight.device)
        if bags.slots not in (None, 1):
            raise ValueError(f"{name}: inputs has {bags.slots} slots, but a feature has one")
        requests.append(_request(one, replace(bags, slot_major=False)))
    return requests


def asked_of(
    features: Mapping[str, Feature], tables: Sequence[EmbeddingTable]
) -> list[BoundFeature]:
    """Return the features, each bound to its table."""
    each = zip(features.items(), tables, strict=True)
    return [BoundFeature(name, table, feature) for (name, feature), table in each]


def ask_keyed(
    plan: LookupPlan, features: Mapping[str, Feature], inputs: Any, sample_weights: Any, join: bool
) -> Sequence[Request]:
    """Return a request for each feature of a KeyedJaggedTensor; its other keys are ignored.

    On a single rank, requests share the tensor's bags, so that nothing is copied.

    Args:
        plan: plan of the features' tables, in the same order.
        features: features by name.
        inputs: the tensor.
        sample_weights: see `read_bags`.
        join: whether outputs become columns of one tensor.
    """
    bags = read_bags(inputs, sample_weights, GROUP, plan.first.weight.device)
    names = tuple(inputs.keys())
    bags = replace(bags, slot_major=False, slots=None)
    # Cache key: everything about the input that the checks below use. The ops check the rest.
    form = names, bags.count, bags.values.dtype
    if (read := plan.derived.get(form)) is not None:
        made = cast(LazyRequests, read(bags))
        made.plan = plan  # `read` must not hold the plan: they would keep each other alive
        return made
    places = {key: i for i, key in enumerate(names)}
    asked = asked_of(features, plan.tables)
    _check_names(names, asked)
    batch, rest = divmod(bags.count, len(names))
    if batch < 0 or rest != 0:
        raise ValueError(
            f"{GROUP}: inputs must have as many bags for each of its {len(names)} features, got "
            f"{max(bags.count, 0)} bags"
        )
    # Share bags only if there is a single batch of tables: with several, every op call would check
    # the bags of all batches.
    share = len(plan.batches) == 1

    # On a device all bags are changed together, so that the host need not know where a feature's
    # bags begin.
    sums = all(one.is_sum for one in asked)

    def requests(bags: Bags) -> list[Request]:
        if sums and all(map(on_device, plan.tables)) and not weights_need_gradient(bags):
            bags = _changed(asked, places, bags)
            made = [_of_changed(one, bags, batch, places[one.name] * batch) for one in asked]
        else:
            made = made_apart(bags)
        if join:
            share_columns(made)
        return made

    def made_apart(bags: Bags) -> list[Request]:
        cut: list[Bags] = []
        made = []
        for one in asked:
            place = places[one.name]
            if share and one.can_share:
                made.append(_request(one, bags, batch, place * batch))
                continue
            cut = cut or _cut(bags, len(names), batch)
            made.append(_request(one, cut[place]))
        return made

    if not (share and all(one.can_share for one in asked)):
        return requests(bags)
    shapes = [(batch,)] * len(asked)
    width = sum(one.table.embedding_vec_size for one in asked) if join else None

    def shared(bags: Bags) -> LazyRequests:
        return LazyRequests(bags, shapes, width, lambda: requests(bags), form)

    remember(plan.derived, form, shared)
    return shared(bags)


def _check_names(names: Sequence[str], asked: Sequence[BoundFeature]) -> None:
    """Raise ValueError unless each feature's name appears exactly once among the input's keys."""
    if missing := [one for one in asked if one.name not in names]:
        others = [name for name in names if name not in {one.name for one in asked}]
        listed = " and ".join(f"{one.name!r}, which asks {one.table.name}" for one in missing)
        raise ValueError(
            f"{GROUP}: inputs must have the feature {listed}; it has {list(names) or 'none'}"
            + (f", of which no feature asks for {others}" if others else "")
        )
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(
            f"{GROUP}: inputs must not have a feature twice, got {twice} again in {list(names)}"
        )


def _changed(asked: Sequence[BoundFeature], places: Mapping[str, int], bags: Bags) -> Bags:
    """Drop padding and excess keys from a KeyedJaggedTensor's bags, without waiting."""
    padding: list[int | None] = [None] * len(places)
    most, limits = [NO_LIMIT] * len(places), [NO_LIMIT] * len(places)
    for one in asked:
        place, own = places[one.name], cast(int, one.feature.max_nnz)
        padding[place] = one.table.padding_key
        if one.feature.truncate:
            limits[place], own = own, NO_LIMIT
        most[place] = min(own, NO_LIMIT if one.max_feature_num is None else one.max_feature_num)
    changes = Changes(
        len(places),
        [] if set(padding) == {None} else padding,
        [] if set(most) == {NO_LIMIT} else most,
        limits=[] if set(limits) == {NO_LIMIT} else limits,
        truncate=True,
    )
    return replace(changed(replace(bags, slot_major=True), changes), slot_major=False)


def _cut(bags: Bags, features: int, batch: int) -> list[Bags]:
    """Split bags by feature; each feature has one bag per sample."""
    bags = check_bags(bags, GROUP, 1, NO_LIMIT, None)
    firsts = torch.arange(features + 1, device=bags.values.device) * batch
    ends = cast(torch.Tensor, bags.offsets)[firsts].tolist()
    return [bags.part(f * batch, batch, ends[f], ends[f + 1]) for f in range(features)]


def _request(
    one: BoundFeature, bags: Bags, count: int | None = None, first_bag: int | None = None
) -> Request:
    """Return a feature's request, for all of `bags` or a run of them."""
    most, truncate = cast(int, one.feature.max_nnz), bool(one.feature.truncate)
    request = Request(
        one.table,
        bags,
        one.feature.combiner or "sum",
        NO_LIMIT if truncate else most,
        (bags.count if count is None else count,),
        one.max_feature_num,
        feature=one.name,
        first_bag=first_bag,
    )
    check_key_dtype(one.table, bags.values)
    if bags.count >= 0 and one.can_share:
        return request
    pools_own = bags.count >= 0 and first_bag is None and one.feature.combiner is not None
    if pools_own and change_without_waiting(request, 1, [most] if truncate else (), truncate):
        return request
    if one.feature.combiner is None and not truncate and bags.count >= 0 and first_bag is None:
        return vectors_of_bags(request)
    request.check()
    if one.feature.combiner is not None:
        leave_padding_out(request)
    if truncate:
        request.bags = within(request.bags, request.name, [most], truncate)
    if one.feature.combiner is None:
        return vectors_of_bags(request)
    return request


def _of_changed(one: BoundFeature, bags: Bags, count: int, first_bag: int) -> Request:
    """Return a feature's request for a run of bags made by `_changed`."""
    check_key_dtype(one.table, bags.values)
    most = NO_LIMIT if one.feature.truncate else cast(int, one.feature.max_nnz)
    combiner, shape = cast(str, one.feature.combiner), (count,)
    return Request(
        one.table, bags, combiner, most, shape, checked=True, feature=one.name, first_bag=first_bag
    )


def share_columns(requests: Sequence[Request]) -> None:
    """Let requests write to columns of one shared output, if the ops can do that directly.

    Raises:
        ValueError: features have different numbers of samples.
    """
    batch = requests[0].shape[0]
    for request in requests:
        if request.shape[0] != batch:
            raise ValueError(
                f"{request.name}: inputs has {request.shape[0]} samples, but {requests[0].name} "
                f"has {batch}, and one output is for both"
            )
    width = sum(request.table.embedding_vec_size for request in requests)
    begin = 0
    for request in requests:
        request.columns = begin, width
        begin += request.table.embedding_vec_size


def joined(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``[batch, sum of dims]``: the shared output, or the outputs concatenated."""
    if len(outputs) == 1:
        return outputs[0].flatten(1)
    return torch.cat([output.flatten(1) for output in outputs], 1)


def keyed_tensor_class() -> Any:
    """Return torchrec's KeyedTensor class.

    Raises:
        ImportError: torchrec cannot be imported.
    """
    try:
        from torchrec.sparse.jagged_tensor import KeyedTensor
    except ImportError as error:
        raise ImportError(
            f"{GROUP}: output='keyed' makes a KeyedTensor of torchrec, which cannot be imported "
            f"({error}); output='concatenated' is the same as a plain tensor"
        ) from error
    return KeyedTensor
