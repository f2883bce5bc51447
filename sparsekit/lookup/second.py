"""Second-order gradients of lookups, for gradient penalties and MAML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Gradients = Sequence[torch.Tensor | None]


def differentiable(
    make: Callable[[Gradients], Gradients],
    again: Callable[[Gradients], Gradients],
    grads: Gradients,
) -> Gradients:
    """Return the gradients of weights in a lookup's backward, differentiable if `grads` are.

    Args:
        make: computes the gradients of weights from the gradients of outputs; a linear function.
        again: computes the gradients of the outputs' gradients from the gradients of the weights'
            gradients.
        grads: gradients of the outputs.
    """
    if not torch.is_grad_enabled():
        return make(grads)
    if any(g is not None and g.requires_grad for g in grads):
        gradients: Gradients = _Gradients.apply(make, again, *grads)
        return gradients
    with torch.no_grad():
        return make(grads)


class _Call(Protocol):
    """A call to an op that pooled vectors; `CallRecord` implements this protocol."""

    @property
    def weights(self) -> list[Any]:
        """The weights of these tables."""

    @property
    def shards_of(self) -> list[str | None]:
        """For each table: its name if it is sharded over ranks, else None."""

    def pool_again(
        self,
        vectors: Gradients,
        grads: Gradients,
        saved: Sequence[Any],
        outs: list[torch.Tensor | None],
    ) -> None:
        """Pool `vectors` instead of the weights, and add the results to `outs`."""


def pooled_again(
    calls: Sequence[_Call],
    of_gradients: Gradients,
    grads: Gradients,
    saved: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Compute the gradients of `grads` by pooling the gradients of the weights' gradients.

    Args:
        calls: the calls that pooled the outputs.
        of_gradients: gradient of each weight's gradient, for each call; sparse, dense or None.
        grads: gradients of the outputs.
        saved: tensors saved by the calls.

    Raises:
        NotImplementedError: a table is sharded.
    """
    if names := [name for call in calls for name in call.shards_of if name is not None]:
        raise NotImplementedError(
            f"{', '.join(names)}: a gradient of the table's gradient, as of a penalty on it or for "
            f"MAML, is there on one rank only, and this table is sharded over several; on those, "
            f"only gradients of a layer's output can have gradients"
        )
    each = len(saved) // len(calls)
    given = iter(of_gradients)
    outs: list[torch.Tensor | None] = [None] * len(grads)
    for k, call in enumerate(calls):
        vectors = [next(given) for _ in call.weights]
        call.pool_again(vectors, grads, saved[k * each : (k + 1) * each], outs)
    return [None if grad is None else out for grad, out in zip(grads, outs, strict=True)]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Any, again: Any, *grads: torch.Tensor | None) -> Any:
        ctx.again = again
        ctx.set_materialize_grads(False)
        return tuple(make(grads))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *of_gradients: torch.Tensor | None) -> Any:
        return None, None, *ctx.again(of_gradients)
