"""Requests as the ops on many tables take them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from ...ops._checks import accumulate_dtype
from ...ops._group import GROUP_COMBINERS
from ..request import Request, SharedBags


@dataclass(slots=True)
class Sources:
    """See `sparsekit/ops/_group.py`."""

    keys: list[torch.Tensor]
    offsets: list[torch.Tensor]
    sample_weights: list[torch.Tensor]  # empty if there are none
    features: torch.Tensor
    shapes: Sequence[tuple[int, ...]]  # of the outputs, but for dim
    width: int | None  # all columns, if all have columns of one output


def sources_of(requests: Sequence[Request], places: Sequence[int], weight: torch.Tensor) -> Sources:
    """Describe requests. Those of the same bags share a source.

    Args:
        requests: for tables with weights of one dtype and device.
        places: which table each asks.
        weight: any of the weights.
    """
    shapes: Sequence[tuple[int, ...]]
    if isinstance(requests, SharedBags):
        of_requests, shapes, width = [requests.bags], requests.shapes, requests.width
        features = requests.kept.get("features")
        if features is None:
            features = _matrix(_rows(requests, places, [0] * len(places), width is not None))
            requests.kept["features"] = features
    else:
        sources = {id(request.bags): request.bags for request in requests}
        of_requests = list(sources.values())
        shapes = [request.shape for request in requests]
        columns = [request.columns for request in requests]
        width = None if None in columns else cast(Any, columns[0])[1]
        number = {bags: s for s, bags in enumerate(sources)}
        numbers = [number[id(request.bags)] for request in requests]
        features = _matrix(_rows(requests, places, numbers, width is not None))
    sample_weights: list[torch.Tensor] = []
    if any(bags.weights is not None for bags in of_requests):
        dtype = accumulate_dtype(weight.dtype)
        none = weight.detach().new_empty(0, dtype=dtype)
        given = (bags.weights for bags in of_requests)
        sample_weights = [none if w is None else w.detach().to(dtype) for w in given]
    none = _no_offsets(of_requests[0].values.device)
    return Sources(
        [bags.values for bags in of_requests],
        [none if bags.offsets is None else bags.offsets for bags in of_requests],
        sample_weights,
        features,
        shapes,
        width,
    )


@lru_cache(maxsize=256)
def _matrix(rows: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """A descriptor. Those of a call are mostly those of the call before."""
    return torch.tensor(rows)


@lru_cache(maxsize=64)
def _no_offsets(device: torch.device) -> torch.Tensor:
    """What stands for bags of one key each."""
    return torch.empty(0, dtype=torch.int64, device=device)


def _rows(
    requests: Sequence[Request], places: Sequence[int], sources: Sequence[int], join: bool
) -> tuple[tuple[int, ...], ...]:
    """The rows of ``features``, in order of their tables."""
    rows = [
        _features(request, table, source, None if join else i)
        for i, (request, table, source) in enumerate(zip(requests, places, sources, strict=True))
    ]
    order = sorted(range(len(rows)), key=places.__getitem__)
    return tuple(row for i in order for row in rows[i])


def _features(request: Request, table: int, source: int, out: int | None) -> list[tuple[int, ...]]:
    """The rows for a request: its vectors are tensor `out`, or columns of all."""
    dim = request.table.embedding_vec_size
    how = GROUP_COMBINERS[request.combiner], request.max_nnz, out or 0
    columns = request.columns if out is None else None
    if not request.bags.slot_major:
        first = request.first_bag or 0
        return [(table, source, first, math.prod(request.shape), *how, *(columns or (0, dim)))]
    batch, slots = request.shape
    begin, stride = columns or (0, slots * dim)
    return [
        (table, source, slot * batch, batch, *how, begin + slot * dim, stride)
        for slot in range(slots)
    ]
