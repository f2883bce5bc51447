"""The parameter of an embedding layer, and how it gets its gradient."""

import weakref
from collections.abc import Callable
from typing import Any

import torch


class EmbeddingWeight(torch.nn.Parameter):
    """The parameter of an embedding layer, so that optimizers can tell it from dense ones.

    An optimizer may set two functions, which copies do without.
    """

    # Called with the weight before rows are read or written, with the rows, or None for all.
    before_read: "Callable[[EmbeddingWeight, torch.Tensor | None], None] | None" = None
    # Called in backward with the weight, rows and their gradients, in place of setting ``grad``. A
    # weak reference: an optimizer that is dropped is detached.
    update_in_backward: "weakref.WeakMethod[Callable[..., None]] | None" = None
    # Whether an optimizer has moved all rows, those without a key too.
    moved: bool = False

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        """Have the optimizer finish what it has left undone for these rows, or for all."""
        if self.before_read is not None:
            self.before_read(self, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingWeight":
        self.catch_up()
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.catch_up()
        return EmbeddingWeight, (self.data, self.requires_grad)


def update_of(weight: torch.Tensor) -> Callable[..., None] | None:
    """What updates a weight in backward, as long as its optimizer lives."""
    attached = weight.update_in_backward if isinstance(weight, EmbeddingWeight) else None
    return None if attached is None else attached()


def deliver_gradient(
    weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, some_missing: bool
) -> torch.Tensor | None:
    """The coalesced sparse gradient of these rows, which rise; None if it is used up at once.

    some_missing: whether there are rows of -1, as `Found` says.
    """
    if some_missing:
        # Sorted, so rows of unseen keys, -1, come first; they have no gradient.
        missing = int(torch.searchsorted(rows, 0))
        rows, grad = rows[missing:], grad[missing:]
    update = update_of(weight)
    if update is not None:
        update(weight, rows, grad)
        return None
    _keep_coalesced(weight)
    # Not torch.sparse_coo_tensor: under torch 2.11 it warns of checks that are off, although they
    # are turned off by its argument.
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        weight.shape,
        rows.unsqueeze(0),
        grad,
        dtype=grad.dtype,
        layout=torch.sparse_coo,
        device=grad.device,
        is_coalesced=True,
    )


def _keep_coalesced(weight: torch.Tensor) -> None:
    """Have the mark of a coalesced gradient restored when the weight has got it."""
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.is_leaf and weight.requires_grad and _mark_coalesced not in hooks.values():
        # Here and not in a layer's __init__, since a copied layer has a new weight without hooks.
        weight.register_post_accumulate_grad_hook(_mark_coalesced)


def _mark_coalesced(weight: torch.Tensor) -> None:
    """Restore the coalesced flag, which autograd drops when it takes a gradient over uncopied."""
    grad = weight.grad
    if grad is not None and grad.is_sparse and not grad.is_coalesced():
        rows = grad._indices()[0]
        if bool((rows[1:] > rows[:-1]).all()):
            grad._coalesced_(True)
        else:
            weight.grad = grad.coalesce()
