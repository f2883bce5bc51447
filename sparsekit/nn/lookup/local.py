"""The route of one rank, which owns all keys: nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..request import Request, SharedBags, one_by_one
from .grouped import Grouped
from .tables import Tables


@dataclass
class Local:
    """One call of several tables on one rank."""

    tables: Tables
    requests: Sequence[Request]

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """See `Route`."""
        if error is not None:
            raise error
        asked = self.requests
        if _weights_need_gradient(asked):
            asked = [_vectors_of(r) if r.weights_need_gradient else r for r in asked]
        grouped = Grouped(self.tables)
        outputs: Sequence[torch.Tensor] = grouped.look_up(asked)
        if torch.is_grad_enabled():
            takers = grouped.takers()
            if any(weight.requires_grad for weight in takers):
                outputs = _Outputs.apply(grouped, outputs, *takers)
        if asked is self.requests:
            return list(outputs)
        return [
            output if request is vectors else _weighted(request, output)
            for request, vectors, output in zip(self.requests, asked, outputs, strict=True)
        ]


def _weights_need_gradient(requests: Sequence[Request]) -> bool:
    if not torch.is_grad_enabled():
        return False
    all_bags = [requests.bags] if type(requests) is SharedBags else [r.bags for r in requests]
    return any(bags.weights is not None and bags.weights.requires_grad for bags in all_bags)


class _Outputs(torch.autograd.Function):
    """The outputs of a call, which send their gradients to the weights."""

    @staticmethod
    def forward(
        ctx: Any, grouped: Grouped, outputs: list[torch.Tensor], *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.grouped = grouped
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*grouped.saved())
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.grouped.gradients(grads, ctx.saved_tensors)


def _vectors_of(request: Request) -> Request:
    """The same keys without pooling, for sample weights that need a gradient."""
    request.check()
    return one_by_one(request.table, request.keys)


def _weighted(request: Request, vectors: torch.Tensor) -> torch.Tensor:
    return request.output(vectors, torch.arange(len(vectors), device=vectors.device))
