"""Finishes requests that the multi-table ops cannot pool.

For these requests, the ops look up single vectors. The vectors become a jagged output, or are
pooled by differentiable ops: maxima, and sums whose weights need a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch

from ..ops.embedding_bag import COMBINERS
from ..ops.embedding_bag import _pool as _embedding_bag
from .inputs import Bags
from .request import LazyRequests, Request, change_without_waiting, one_by_one
from .without_waiting import bag_of, key_by_key


def as_vectors(
    requests: Sequence[Request],
) -> tuple[Sequence[Request], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Replace requests that the ops cannot pool with requests for single vectors.

    Returns:
        All requests to look up, and a function that turns their outputs into the outputs of
        `requests`.
    """
    if not _any_such(requests):
        return requests, list
    asked = [_vectors_of(r) if r.pooled_here else r for r in requests]

    def finished(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [_finished(*each) for each in zip(requests, asked, outputs, strict=True)]

    return asked, finished


def _finished(request: Request, asked: Request, output: torch.Tensor) -> torch.Tensor:
    if request.jagged is not None:
        return torch.nested.nested_tensor_from_jagged(output, request.jagged)
    return output if asked is request else request.shaped(_pooled(request, output))


def _any_such(requests: Sequence[Request]) -> bool:
    differentiates = torch.is_grad_enabled()
    if type(requests) is LazyRequests:  # all lazy requests are sums
        weights = requests.bags.weights
        return differentiates and weights is not None and weights.requires_grad
    # Loop here: a small lookup would take measurably longer with any() and a generator.
    for request in requests:
        # `in` works for a name and for a tuple of names, since no other name contains "max".
        if "max" in request.combiner or request.jagged is not None:
            return True
        weights = request.bags.weights
        if differentiates and weights is not None and weights.requires_grad:
            return True
    return False


def _vectors_of(request: Request) -> Request:
    slots = request.shape[1] if len(request.shape) > 1 else 1
    if request.checked or not change_without_waiting(request, slots):
        request.check()
    asked = one_by_one(request.table, request.keys)
    asked.scores = request.scores
    if request.bags.count > math.prod(request.shape):  # keys left out are in an extra bag
        asked.bags = Bags(request.keys, key_by_key(len(request.keys), request.offsets), None)
    return asked


def _pooled(request: Request, vectors: torch.Tensor) -> torch.Tensor:
    """Pool the vectors of a checked request's keys to ``[bags, dim]``."""
    combiner, offsets = request.combiner, request.offsets
    if not isinstance(combiner, tuple):
        return _pooled_as(combiner, vectors, offsets, request.weights)[: math.prod(request.shape)]
    samples, slots = request.shape
    if request.bags.count == samples * slots:
        of_slots = request.of_slots()
        parts = vectors.split([len(slot.keys) for slot in of_slots])
        return torch.cat([_pooled(*each) for each in zip(of_slots, parts, strict=True)])
    # The host does not know where a slot's keys begin, so pool all keys, with those before and
    # after the slot in two extra bags.
    pooled = []
    for slot, name in enumerate(combiner):
        own = offsets[slot * samples : (slot + 1) * samples + 1]
        bags = torch.cat([offsets[:1], own, offsets[-1:]])
        pooled.append(_pooled_as(name, vectors, bags, request.weights)[1 : samples + 1])
    return torch.cat(pooled)


def _pooled_as(
    combiner: str, vectors: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    if combiner == "max":
        return _largest(vectors, offsets)
    places = torch.arange(len(vectors), device=vectors.device)
    # Call the op without `embedding_bag`'s checks, since bags and weights have been checked.
    pooled = _embedding_bag(vectors, places, offsets, COMBINERS[combiner], weights)
    return cast(torch.Tensor, pooled)


def _largest(vectors: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the elementwise maximum of each bag's vectors; zeros for an empty bag.

    Args:
        vectors: ``[n, dim]``; a NaN is larger than anything else.
        offsets: int64 ``[bags + 1]``, rising from 0 to n. On a device, invalid offsets give an
            arbitrary output.

    Returns:
        ``[bags, dim]``. On ties, the first element gets the gradient, as in torch.
    """
    n, dim = vectors.shape
    bags = len(offsets) - 1
    with torch.no_grad():
        bag = bag_of(offsets, torch.arange(n, device=offsets.device)).unsqueeze(1).expand(n, dim)
        largest = vectors.new_full((bags, dim), -torch.inf)
        largest.scatter_reduce_(0, bag, vectors, "amax")
        won = (vectors == largest.gather(0, bag)) | vectors.isnan()
        places = torch.arange(n, device=bag.device).unsqueeze(1).where(won, n)
        first = bag.new_full((bags, dim), n).scatter_reduce_(0, bag, places, "amin")
    # An empty bag has no maximum; let it read row n, which is zero.
    return torch.cat([vectors, vectors.new_zeros(1, dim)]).gather(0, first)
