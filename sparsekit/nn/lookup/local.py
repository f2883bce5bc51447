"""The route of one rank, which owns all keys: nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..request import Request
from .grouped import Grouped
from .pooled_here import as_vectors
from .second import differentiable
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
        asked, finished = as_vectors(self.requests)
        grouped = Grouped(self.tables)
        outputs: Sequence[torch.Tensor] = grouped.look_up(asked)
        if torch.is_grad_enabled():
            takers = grouped.takers()
            if any(weight.requires_grad for weight in takers):
                outputs = _Outputs.apply(grouped, outputs, *takers)
        return finished(outputs)


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
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grouped: Grouped = ctx.grouped
        saved = ctx.saved_tensors
        return (
            None,
            None,
            *differentiable(
                lambda grads: grouped.gradients(grads, saved),
                lambda of_gradients: grouped.pooled_again(of_gradients, grads, saved),
                grads,
            ),
        )
