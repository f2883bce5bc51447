"""A tensor type for gradients of one rank's rows in a table; it refuses to compute a norm."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._overrides import without_overrides

_NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.linalg.matrix_norm,
    torch.norm,
    torch.Tensor.norm,
    torch._foreach_norm,
}


class ShardGradient(torch.Tensor):
    """A gradient, sparse or dense, of a weight that is sharded over ranks.

    Clipping by the norm of one rank's rows would scale dense parameters' gradients by a different
    factor on each rank. The dense parameters, which must be equal on all ranks, would then drift
    apart without an error. torch.nn.utils clips dense gradients by such a norm, and since torch
    2.14 sparse gradients too. Computing a norm is therefore refused. Everything else works as for
    any tensor, and a result of the same shape and layout is a `ShardGradient` too.

    Attributes:
        layer: the name of the layer whose weight has the gradient.
    """

    layer: str

    @staticmethod
    def of(gradient: torch.Tensor, layer: str) -> ShardGradient:
        """Return a gradient as a `ShardGradient`, in the same memory."""
        made = torch.Tensor._make_subclass(ShardGradient, gradient)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        own = next(_among(args), None)
        if function in _NORMS:
            raise RuntimeError(
                f"{'a table' if own is None else own.layer}: this gradient has the rows of one "
                f"rank only, and clipping by their norm would let ranks drift apart; clip with "
                f"sparsekit.optim.clip_grad_norm_, which takes the norm over all ranks "
                f"(docs/trainers.md says how under each trainer)"
            )
        result = without_overrides(function, *args, **(kwargs or {}))
        if type(result) is not torch.Tensor or own is None or result.requires_grad:
            return result
        alike = result.shape == own.shape and result.layout == own.layout
        return ShardGradient.of(result, own.layer) if alike else result

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGradient:
        return ShardGradient.of(copy.deepcopy(plain(self), memo), self.layer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """View a `ShardGradient` as a plain tensor; return other tensors unchanged."""
    if isinstance(tensor, ShardGradient):
        return torch.Tensor._make_subclass(torch.Tensor, tensor)
    return tensor


def _among(args: Sequence[Any]) -> Iterator[ShardGradient]:
    for each in args:
        if isinstance(each, ShardGradient):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _among(each)
