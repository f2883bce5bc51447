"""Sample weights that need a gradient: vectors come one by one, for ops that autograd knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..request import Request, SharedBags, one_by_one


def without_weights(
    requests: Sequence[Request],
) -> tuple[Sequence[Request], Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Requests without such weights, and what makes the outputs asked for from theirs."""
    if not _weights_need_gradient(requests):
        return requests, list
    asked = [_vectors_of(r) if r.weights_need_gradient else r for r in requests]

    def finished(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            output if request is vectors else _weighted(request, output)
            for request, vectors, output in zip(requests, asked, outputs, strict=True)
        ]

    return asked, finished


def _weights_need_gradient(requests: Sequence[Request]) -> bool:
    if not torch.is_grad_enabled():
        return False
    all_bags = [requests.bags] if type(requests) is SharedBags else [r.bags for r in requests]
    return any(bags.weights is not None and bags.weights.requires_grad for bags in all_bags)


def _vectors_of(request: Request) -> Request:
    """The same keys without pooling, for sample weights that need a gradient."""
    request.check()
    return one_by_one(request.table, request.keys)


def _weighted(request: Request, vectors: torch.Tensor) -> torch.Tensor:
    return request.output(vectors, torch.arange(len(vectors), device=vectors.device))
