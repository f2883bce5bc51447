"""The route of one rank, which owns all keys: nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..request import Request
from ..shard import Found
from ..weight import deliver_gradient


@dataclass
class Local:
    """One call of several tables on one rank."""

    requests: Sequence[Request]

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """See `Route`."""
        if error is not None:
            raise error
        each = [(request, request.table.look_up(request.keys)) for request in self.requests]
        return [
            request.output(_Vectors.apply(request.table.weight, found), found.inverse)
            for request, found in each
        ]


class _Vectors(torch.autograd.Function):
    """The vectors that a table has found, which send their gradient to its weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, found: Found) -> torch.Tensor:
        ctx.weight = weight
        ctx.some_missing = found.some_missing
        ctx.save_for_backward(found.rows)
        return found.vectors

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        (grad,) = grads
        return deliver_gradient(ctx.weight, rows, grad, ctx.some_missing), None
