"""Lets backward update the tables of embedding layers."""

import weakref

import torch

from ..tables.embedding_table import EmbeddingTable
from ..tables.weight import EmbeddingWeight, update_of
from .row_optimizer import RowOptimizer


class FusedHandle:
    """Handle returned by `fuse_in_backward`; ``remove()`` detaches the optimizer."""

    def __init__(self, weights: list[EmbeddingWeight]) -> None:
        self._weights = weights

    def remove(self) -> None:
        """Let backward write gradients to ``weight.grad`` again."""
        for weight in self._weights:
            weight.update_in_backward = None


def fuse_in_backward(optimizer: RowOptimizer, module: torch.nn.Module) -> FusedHandle:
    """Let backward update the tables of embedding layers, without writing ``weight.grad``.

    This saves the gradient's memory and a pass over it. On CUDA the host does not wait for the
    device. The weights are bitwise the same as after a normal step if

    - every backward is followed by ``optimizer.step()``, which then has nothing to do for these
      layers but still ends the step, and
    - each backward covers a single lookup in each layer, and the layer's weight is used for nothing
      else.

    Otherwise an error is raised. Anything that needs the gradients between backward and step also
    raises an error: gradient accumulation, `clip_grad_norm_`, `clip_grad_value_`,
    `check_finite_gradients`, and torch's GradScaler (at its first step). Learning rates are read
    during backward. Deleting the optimizer detaches it. Copies of the layer or of the optimizer are
    not attached.

    Args:
        optimizer: one of `sparsekit.optim`, with the layers' weights among its parameters.
        module: an embedding layer, a group or a model; layers whose weight is not a parameter of
            the optimizer are left unchanged.

    Returns:
        A handle whose ``remove()`` detaches the optimizer.

    Raises:
        TypeError: optimizer is not one of `sparsekit.optim`.
        ValueError: no layer's weight is a parameter of the optimizer, or a layer is attached
            already.
    """
    if not isinstance(optimizer, RowOptimizer):
        raise TypeError(
            f"fuse_in_backward: optimizer must be one of sparsekit.optim, got "
            f"{type(optimizer).__name__}"
        )
    own = {p for group in optimizer.param_groups for p in group["params"]}
    layers = [m for m in module.modules() if isinstance(m, EmbeddingTable) and m.weight in own]
    if not layers:
        raise ValueError(
            f"fuse_in_backward: no embedding layer in {type(module).__name__} has a weight among "
            f"the optimizer's parameters"
        )
    for layer in layers:
        if update_of(layer.weight) is not None:
            raise ValueError(f"fuse_in_backward: {layer.name} has been attached to an optimizer")
    # All layers share one callback, so that a group can tell that one optimizer updates all its
    # tables.
    attached = optimizer._attached = optimizer._attached or weakref.WeakMethod(
        optimizer.update_in_backward
    )
    for layer in layers:
        optimizer._layers[layer.weight] = layer.name
        layer.weight.update_in_backward = attached
    return FusedHandle([layer.weight for layer in layers])
