"""The parameter of an embedding layer."""

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
