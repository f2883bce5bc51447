"""The parameter of an embedding layer, and how it gets its gradient."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from ..distributed.shard_gradient import ShardGradient
from .hash_table import HashTable
from .row_states import follow_keys

# Rows that are looked at after a write, of each kind.
SEEN_ROWS = 64


class EmbeddingWeight(torch.nn.Parameter):
    """The parameter of an embedding layer, so that optimizers can tell it from dense ones.

    An optimizer may set two functions, which copies do without, as without most else.
    """

    # Called with the weight before rows are read or written, with the rows, or None for all.
    before_read: "Callable[[EmbeddingWeight, torch.Tensor | None], None] | None" = None
    # Called in backward in place of setting ``grad``: `RowOptimizer.update_in_backward`. A weak
    # reference: an optimizer that is dropped is detached.
    update_in_backward: "weakref.WeakMethod[Callable[..., None]] | None" = None
    # Whether an optimizer has moved all rows, those without a key too.
    moved: bool = False
    # The version after the last write that was looked at, or that is the library's own; see
    # `written`. None while such a write is under way, or after an interrupted one.
    noted_version: int | None = None
    # The hash table whose rows these are, as long as it lives; see `belongs_to`.
    _table: "weakref.ref[HashTable] | None" = None
    # Those that may have states of these rows, as long as they live; see `is_stepped_by`.
    _optimizers: "weakref.WeakSet[torch.optim.Optimizer] | None" = None
    # Address and number of the rows of the coalesced gradient that is on its way to ``grad``.
    _on_its_way: "tuple[int, int] | None" = None
    # The layer's name, if other ranks have other rows of it.
    _shard_of: str | None = None

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        """Have the optimizer finish what it has left undone for these rows, or for all."""
        if self.before_read is not None:
            self.before_read(self, rows)

    def belongs_to(self, table: HashTable) -> None:
        """Note whose rows these are."""
        self._table = weakref.ref(table)
        if self.noted_version is None:
            self._note_rows()

    def _note_rows(self) -> None:
        """Take rows as they are, those without a key too, which may have been moved and saved."""
        self.note_version()
        table = None if self._table is None else self._table()
        if table is not None and not self.is_meta and (keys := len(table)):
            self.moved |= free_rows_hold(self, keys)

    def note_version(self) -> None:
        """Have looked at all that was written so far."""
        self.noted_version = -1 if self.is_inference() else self._version

    def written(self) -> bool:
        """Compare torch's count of writes with the one noted; others have written if they differ.

        Writes to ``weight.data`` are not counted, nor is one under inference mode to a weight made
        there.
        """
        if self.noted_version is None:
            self.note_version()
        return not self.is_inference() and self._version != self.noted_version

    def begin_writing(self) -> None:
        """Have what is written from here to `end_writing` be no one else's; see `own_writes`."""
        if not self.written():
            self.noted_version = None

    def end_writing(self) -> None:
        """See `begin_writing`."""
        if self.noted_version is None:
            self.note_version()

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Have this optimizer's states follow the keys from now on."""
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet()
        self._optimizers.add(optimizer)

    def keys(self) -> torch.Tensor | None:
        """The key of each row in use, int64; None without a hash table."""
        table = None if self._table is None else self._table()
        return None if table is None else table.keys()

    def note_keys(self) -> None:
        """Write into states of optimizers which keys they are of, as these are about to change."""
        self.catch_up()  # what is due belongs to the keys that go
        self.noted_version = None  # as does what was written
        keys: torch.Tensor | None = None
        for optimizer in list(self._optimizers or ()):
            state = optimizer.state.get(self)
            if state and "keys" not in state:
                if keys is None:
                    try:
                        keys = self.keys()
                    except ValueError:  # after to_empty there is anything in a table
                        keys = torch.empty(0, dtype=torch.int64, device=self.device)
                state["keys"] = keys

    def follow_keys(self) -> None:
        """Have states of optimizers be those of the keys that rows have now."""
        self._note_rows()
        for optimizer in list(self._optimizers or ()):
            if "keys" in optimizer.state.get(self, ()):
                self.settle(optimizer)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """The same of one optimizer."""
        if (keys := self.keys()) is not None:
            follow_keys(optimizer, self, keys)

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingWeight":
        self.catch_up()
        copied: EmbeddingWeight = super().__deepcopy__(memo)
        copied.moved = self.moved
        if self.written():
            copied.noted_version = -1  # so has the copy been
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.catch_up()
        return EmbeddingWeight, (self.data, self.requires_grad)


def free_rows_hold(weight: torch.Tensor, keys: int) -> bool:
    """Look for values in a sample of the rows without a key, which are zeros until written to.

    These are the ones that come next and some of the others: whoever writes row by row does so
    often, and must not wait for all of them each time.
    """
    free = weight.detach()[keys:]
    step = max(1, len(free) // SEEN_ROWS)
    return bool(free[:SEEN_ROWS].any()) or bool(free[::step].any())


@contextmanager
def own_writes(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Around the library's own writes to weights of layers among these."""
    each = list(weights)
    for weight in each:
        if isinstance(weight, EmbeddingWeight):
            weight.begin_writing()
    yield
    for weight in each:
        if isinstance(weight, EmbeddingWeight):  # torch may have swapped it for another kind
            weight.end_writing()


def count_own_writes(weights: Iterable[torch.Tensor]) -> None:
    """Note one of the library's own to each of these weights, each counted once by torch."""
    for weight in weights:
        if isinstance(weight, EmbeddingWeight) and weight.noted_version is not None:
            weight.noted_version += 1


def update_of(weight: torch.Tensor) -> Callable[..., None] | None:
    """The function that updates a weight in backward, while its optimizer lives."""
    attached = weight.update_in_backward if isinstance(weight, EmbeddingWeight) else None
    return None if attached is None else attached()


def update_of_all(weights: Sequence[torch.Tensor]) -> Callable[..., None] | None:
    """The function that updates all of these weights in backward, if they share an optimizer."""
    attached = getattr(weights[0], "update_in_backward", None)
    if attached is None:
        return None
    if any(getattr(weight, "update_in_backward", None) is not attached for weight in weights):
        return None
    return cast(Callable[..., None] | None, attached())


# A weight, rows, and their gradients.
Update = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def deliver_gradients(
    updates: Sequence[Update], shards_of: Sequence[str | None]
) -> list[torch.Tensor | None]:
    """The coalesced sparse gradient of each weight, whose rows rise; None if it is used up here.

    Args:
        updates: one for each weight.
        shards_of: for each the layer's name if other ranks have other rows of it, or None.
    """
    gradients: list[torch.Tensor | None] = []
    used_up: dict[Callable[..., None], list[Update]] = {}
    for update, shard_of in zip(updates, shards_of, strict=True):
        in_backward = update_of(update[0])
        if in_backward is None:
            gradients.append(_sparse(*update, shard_of))
        else:
            gradients.append(None)
            used_up.setdefault(in_backward, []).append(update)
    for in_backward, own in used_up.items():
        in_backward([update[0] for update in own], partial(list, own), None)
    return gradients


def _sparse(
    weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, shard_of: str | None
) -> torch.Tensor:
    _watch_gradient(weight)
    if isinstance(weight, EmbeddingWeight):
        weight._on_its_way = rows.data_ptr(), rows.shape[0]
        weight._shard_of = shard_of
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


def _watch_gradient(weight: torch.Tensor) -> None:
    """Have the weight's gradient marked for what it is when the weight has got it."""
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.is_leaf and weight.requires_grad and _mark not in hooks.values():
        # Here and not in a layer's __init__, since a copied layer has a new weight without hooks.
        weight.register_post_accumulate_grad_hook(_mark)


def _mark(weight: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # of a gradient that has been marked before
        _mark_coalesced(weight)
    shard_of = getattr(weight, "_shard_of", None)
    grad = weight.grad
    if shard_of is None or grad is None or type(grad) is not torch.Tensor or grad.requires_grad:
        return
    weight.grad = ShardGradient.of(grad, shard_of)


def _mark_coalesced(weight: torch.Tensor) -> None:
    """Restore the coalesced flag, which autograd drops when it takes a gradient over uncopied."""
    grad = weight.grad
    on_its_way = getattr(weight, "_on_its_way", None)
    if on_its_way is not None:
        weight._on_its_way = None  # type: ignore[attr-defined]
    if grad is not None and grad.is_sparse and not grad.is_coalesced():
        indices = grad._indices()
        # What is added to is longer, or else nothing was there.
        taken_over = on_its_way == (indices.data_ptr(), indices.shape[1])
        if taken_over or bool((indices[0, 1:] > indices[0, :-1]).all()):
            grad._coalesced_(True)
        else:
            weight.grad = grad.coalesce()
