"""Memory of outputs and of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .tables import Alike

_new_out = torch.ops.sparsekit.group_embedding_bag_out.default

# From this size on the CPU's memory is worth keeping; see csrc/torch_ops/large_memory.h.
_LARGE_BYTES = 2 << 20


def new_outs(
    tables: Alike, shapes: Sequence[tuple[int, ...]], width: int | None, like: torch.Tensor
) -> list[torch.Tensor]:
    """Outputs of requests of these shapes, or the one of which they have columns."""
    if width is not None:
        return [_output(like, shapes[0][0], width)]
    each = zip(shapes, tables.places, strict=True)
    return [_output(like, *shape, tables.dims[t]) for shape, t in each]


def filled(
    grads: Sequence[torch.Tensor | None],
    tables: Alike,
    dims: Sequence[int],
    features: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of requests, with zeros for those that there are not."""
    given = [grad for grad in grads if grad is not None]
    if len(given) == len(grads):
        return given
    bags = features.new_zeros(len(grads))
    bags.index_add_(0, features[:, 6], features[:, 3])
    each = zip(grads, bags.tolist(), tables.places, strict=True)
    return [given[0].new_zeros(n * dims[t]) if g is None else g for g, n, t in each]


def _output(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory for an output, with any content.

    On the CPU it is that of an earlier output if it is large: new memory can take longer to come
    than to be filled.
    """
    num_elements = math.prod(shape)
    if num_elements * like.element_size() < _LARGE_BYTES:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return _new_out(like.detach(), num_elements).view(shape)
