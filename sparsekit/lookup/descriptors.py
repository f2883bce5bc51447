"""Describes requests for the multi-table ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch

from ..ops._checks import accumulate_dtype
from ..ops._group import GROUP_COMBINERS, FeatureColumn
from .plan import TableBatch
from .request import LazyRequests, Request
from .slots import NO_LIMIT

# Maximum number of input forms to cache; the batch size is part of a form.
_MOST_FORMS = 64


@dataclass(slots=True)
class Descriptors:
    """Requests, converted to arguments of the multi-table ops; see `sparsekit/ops/_group.py`."""

    keys: list[torch.Tensor]
    offsets: list[torch.Tensor]
    sample_weights: list[torch.Tensor]  # empty without sample weights
    features: torch.Tensor
    # For each row of `features`: its table, its source, and the maximum total number of keys in its
    # bags.
    limits: Sequence[tuple[int, int, int]]
    shapes: Sequence[tuple[int, ...]]  # shapes of the outputs without the last dimension
    width: int | None  # number of columns of the shared output; None if each request has its own
    # How often each entry's key occurred, int64, if ranks send each distinct key only once.
    occurrences: torch.Tensor | None = None


def describe(requests: Sequence[Request], batch: TableBatch, weight: torch.Tensor) -> Descriptors:
    """Convert requests to arguments of the ops; requests with the same bags share a source.

    Args:
        requests: one for each of `TableBatch.positions`.
        batch: the tables.
        weight: the weight of any one of these tables.
    """
    shapes: Sequence[tuple[int, ...]]
    if type(requests) is LazyRequests:
        of_requests, shapes, width = [requests.bags], requests.shapes, requests.width
        numbers, form = [0] * len(shapes), requests.form
    else:
        of_requests = [request.bags for request in requests]
        numbers = list(range(len(of_requests)))
        if len(requests) > 1:
            sources = {id(bags): bags for bags in of_requests}
            number = {bags: s for s, bags in enumerate(sources)}
            numbers = [number[id(bags)] for bags in of_requests]
            of_requests = list(sources.values())
        shapes = [request.shape for request in requests]
        columns = [request.columns for request in requests]
        width = None if None in columns else cast(Any, columns[0])[1]
        # Cache key: everything that ``features`` depends on.
        form = tuple(
            [
                (r.shape, r.combiner, r.max_nnz, r.first_bag, r.columns, r.bags.slot_major, s)
                for r, s in zip(requests, numbers, strict=True)
            ]
        )
    described = batch.features.get(form)
    if described is None:
        described = _features(requests, batch.table_of_request, numbers, width is not None)
        remember(batch.features, form, described)
    features, limits = described
    sample_weights: list[torch.Tensor] = []
    if any(bags.weights is not None for bags in of_requests):
        dtype = accumulate_dtype(weight.dtype)
        none = weight.detach().new_empty(0, dtype=dtype)
        given = (bags.weights for bags in of_requests)
        sample_weights = [none if w is None else w.detach().to(dtype) for w in given]
    none = no_offsets(of_requests[0].values.device)
    return Descriptors(
        [bags.values for bags in of_requests],
        [none if bags.offsets is None else bags.offsets for bags in of_requests],
        sample_weights,
        features,
        limits,
        shapes,
        width,
    )


def remember(values: dict[Any, Any], form: Any, value: Any) -> None:
    """Cache a value that depends only on the form of the input."""
    if len(values) >= _MOST_FORMS:
        values.clear()
    values[form] = value


@lru_cache(maxsize=64)
def no_offsets(device: torch.device) -> torch.Tensor:
    """Return empty offsets, which mean that each bag has one key."""
    return torch.empty(0, dtype=torch.int64, device=device)


def _features(
    requests: Sequence[Request], places: Sequence[int], sources: Sequence[int], join: bool
) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Return ``features``, with its rows sorted by table, and `Descriptors.limits`."""
    of_requests = [
        _rows(request, table, source, None if join else i)
        for i, (request, table, source) in enumerate(zip(requests, places, sources, strict=True))
    ]
    order = sorted(range(len(of_requests)), key=places.__getitem__)
    rows = [row for i in order for row in of_requests[i]]
    at = FeatureColumn
    limits = [
        (row[at.table], row[at.source], min(row[at.bags] * row[at.max_nnz], NO_LIMIT))
        for row in rows
    ]
    return torch.tensor(rows, device="cpu"), limits


def _rows(request: Request, table: int, source: int, out: int | None) -> list[tuple[int, ...]]:
    """Return a request's rows of ``features``; `out` is None if all requests share one output."""
    dim = request.table.embedding_vec_size
    combiners = [GROUP_COMBINERS[combiner] for combiner in request.combiners]
    how = request.max_nnz, out or 0
    columns = request.columns if out is None else None
    if not request.bags.slot_major:
        first = request.first_bag or 0
        bags = math.prod(request.shape)
        return [(table, source, first, bags, combiners[0], *how, *(columns or (0, dim)))]
    batch, slots = request.shape
    begin, stride = columns or (0, slots * dim)
    return [
        (table, source, slot * batch, batch, combiner, *how, begin + slot * dim, stride)
        for slot, combiner in enumerate(combiners * (slots // len(combiners)))
    ]
