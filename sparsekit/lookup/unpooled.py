"""Pools vectors that come one by one, which the ops on many tables do not.

They are jagged, or pooled by ops that autograd knows: maxima, and weights that need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from ..ops.embedding_bag import COMBINERS
from ..ops.embedding_bag import _pool as _embedding_bag
from .request import LazyRequests, Request, one_by_one


def as_vectors(
    requests: Sequence[Request],
) -> tuple[Sequence[Request], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Requests of which such ones ask for vectors, and what makes the outputs from theirs."""
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
    if type(requests) is LazyRequests:  # all of them sums
        all_bags = [requests.bags]
    else:
        # A combiner or several: "max" is part of no other.
        if any("max" in r.combiner or r.jagged is not None for r in requests):
            return True
        all_bags = [request.bags for request in requests]
    if not torch.is_grad_enabled():
        return False
    return any(bags.weights is not None and bags.weights.requires_grad for bags in all_bags)


def _vectors_of(request: Request) -> Request:
    request.check()
    return one_by_one(request.table, request.keys)


def _pooled(request: Request, vectors: torch.Tensor) -> torch.Tensor:
    """``[bags, dim]``, of a checked request, from the vector of each of its keys."""
    combiner = request.combiner
    if isinstance(combiner, tuple):
        slots = request.of_slots()
        parts = vectors.split([len(slot.keys) for slot in slots])
        return torch.cat([_pooled(*each) for each in zip(slots, parts, strict=True)])
    if combiner == "max":
        return _largest(vectors, request.offsets)
    places = torch.arange(len(vectors), device=vectors.device)
    # Past the checks of the public form: bags and weights have been checked.
    pooled = _embedding_bag(vectors, places, request.offsets, COMBINERS[combiner], request.weights)
    return cast(torch.Tensor, pooled)


def _largest(vectors: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The largest of each element of each bag's vectors; zeros of an empty bag.

    Args:
        vectors: ``[n, dim]``; a NaN is larger than all else.
        offsets: int64 ``[bags + 1]``, rising from 0 to n.

    Returns:
        ``[bags, dim]``. The first of equal elements gets the gradient, as torch has it.
    """
    n, dim = vectors.shape
    bags = len(offsets) - 1
    with torch.no_grad():
        bag = torch.arange(bags, device=offsets.device).repeat_interleave(offsets.diff())
        bag = bag.unsqueeze(1).expand(n, dim)
        largest = vectors.new_full((bags, dim), -torch.inf)
        largest.scatter_reduce_(0, bag, vectors, "amax")
        won = (vectors == largest.gather(0, bag)) | vectors.isnan()
        places = torch.arange(n, device=bag.device).unsqueeze(1).where(won, n)
        first = bag.new_full((bags, dim), n).scatter_reduce_(0, bag, places, "amin")
    # Where nothing has won, since the bag is empty, place n is asked for.
    return torch.cat([vectors, vectors.new_zeros(1, dim)]).gather(0, first)
