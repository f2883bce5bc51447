"""The route on a single rank, which owns all keys: nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .fallback import redirected
from .plan import LookupPlan
from .record import LookupRecord
from .request import Request
from .second import differentiable
from .table_ops import run
from .unpooled import as_vectors


@dataclass
class Local:
    """One lookup in several tables on a single rank."""

    plan: LookupPlan
    requests: Sequence[Request]

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """Finish the lookup; see `Route`."""
        if error is not None:
            raise error
        requests = redirected(self.plan, None, self.requests) if self.plan.redirects else None
        asked, finished = as_vectors(requests or self.requests)
        pooled, record, found = run(self.plan, asked)
        outputs: Sequence[torch.Tensor] = pooled
        if torch.is_grad_enabled():
            weights = record.autograd_inputs
            if any(weight.requires_grad for weight in weights):
                outputs = _Outputs.apply(record, found, pooled, *weights)
        return finished(outputs)


class _Outputs(torch.autograd.Function):
    """Autograd function for a call's outputs; backward sends gradients to the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        record: LookupRecord,
        found: list[torch.Tensor | None],
        outputs: list[torch.Tensor],
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.record = record
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*found)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        record: LookupRecord = ctx.record
        found = ctx.saved_tensors
        return (
            None,
            None,
            None,
            *differentiable(
                lambda grads: record.gradients(grads, found),
                lambda of_gradients: record.pooled_again(of_gradients, grads, found),
                grads,
            ),
        )
