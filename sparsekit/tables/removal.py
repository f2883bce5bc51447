"""Removes rows from a table in place: the last rows in use move to the rows that become free."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version

from ..distributed.shard_gradient import ShardGradient
from . import saved_state as saved
from .hash_table import HashTable
from .in_flight import InFlight
from .row_states import row_tensors, sparse_writes
from .weight import EmbeddingWeight, own_writes

if TYPE_CHECKING:
    from .embedding_table import EmbeddingTable

_compact = torch.ops.sparsekit.compact_rows.default
_renumber = saved.builtin_of(torch.ops.sparsekit.hash_table_renumber_)
_move = saved.builtin_of(torch.ops.sparsekit.move_rows_)


def states_of(weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Yield the name, tensor and initial value of each state with a row for every weight row."""
    for optimizer in _optimizers(weight):
        for name, tensor, initial in row_tensors(optimizer, weight):
            yield f"{type(optimizer).__name__}.{name}", tensor, initial


def _optimizers(weight: torch.Tensor) -> list[torch.optim.Optimizer]:
    return list(getattr(weight, "_optimizers", None) or ())


@torch.no_grad()
def remove_rows(table: EmbeddingTable, gone: torch.Tensor) -> torch.Tensor:
    """Remove the keys of rows, and overwrite everything that belongs to them.

    The last rows in use move to the rows that become free, with their vectors, scores and states.
    Pending backwards, and the weight's gradient if it has one, get the new row numbers. Afterwards,
    every free row is as it was before its first key.

    Args:
        table: a table with a hash table.
        gone: int64 ``[k]``, distinct rows in use, in ascending order.

    Returns:
        int32 ``[rows in use before]``, the new number of each row, or -1 for a removed row.
    """
    index = cast(HashTable, table.table)
    weight = table.weight
    index.stop_growing()
    before = len(index)
    left = before - len(gone)
    new_rows = _compact(gone, before)
    buckets, hash_seed, size = index.tensors()
    grad = weight.grad
    if grad is not None and not grad.is_sparse and not grad.is_contiguous():
        weight.grad = grad = grad.contiguous()  # `_move` needs contiguous rows
    of_rows: list[tuple[torch.Tensor, float]] = [(weight, 0.0)]
    of_rows += [(tensor, initial) for _, tensor, initial in states_of(weight)]
    of_rows += [(tensor, 0.0) for tensor in (table.scores, grad) if tensor is not None]
    dense = [(tensor.detach(), initial) for tensor, initial in of_rows if not tensor.is_sparse]
    tensors = [tensor for tensor, _ in dense]
    for tensor in tensors:
        if not tensor.is_contiguous() and len(tensor) and not tensor[0].is_contiguous():
            raise ValueError(
                f"{table.name}: its rows cannot be dropped, since an optimizer has a state "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}, whose rows are not "
                f"contiguous; make it contiguous"
            )
    initials = [element(initial, tensor.dtype) for tensor, initial in dense]
    calls: list[partial[Any]] = [
        partial(_renumber, buckets, hash_seed, new_rows),
        partial(_move, tensors, new_rows, left, initials),
    ]
    if len(dense) < len(of_rows):
        for optimizer in _optimizers(weight):
            calls += sparse_writes(optimizer, weight, new_rows)
    for lookup in in_flight(weight):
        calls += lookup.renumbering(new_rows)
    if grad is not None and grad.is_sparse:
        calls.append(partial(setattr, weight, "grad", _renumbered_gradient(grad, new_rows)))
    calls.append(partial(torch.Tensor.fill_, size, left))
    with own_writes([weight]):
        increment_version(tensors)
        # The index and everything that belongs to rows must change together, even if the program is
        # interrupted.
        saved.run_all(calls)
    return new_rows


@lru_cache(maxsize=64)
def element(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of one element on the CPU; equal arguments give the same object."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def in_flight(weight: torch.Tensor) -> Iterator[InFlight]:
    """Yield a weight's lookups whose backward may still run."""
    if isinstance(weight, EmbeddingWeight) and weight.lookups is not None:
        yield from list(weight.lookups)


def pinned_rows(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows that a sweep must not drop: a pending backward or a gradient needs them."""
    rows = [lookup.rows() for lookup in in_flight(weight) if not lookup.done]
    grad = weight.grad
    if grad is not None and grad.is_sparse:
        rows.append(grad._indices()[0])
    return rows


def _renumbered_gradient(grad: torch.Tensor, new_rows: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with new row numbers, in ascending order."""
    numbers, order = new_rows[grad._indices()[0]].to(torch.int64).sort()
    moved = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        grad.dense_dim(),
        grad.shape,
        numbers.unsqueeze(0),
        grad._values()[order],
        dtype=grad.dtype,
        layout=torch.sparse_coo,
        device=grad.device,
        is_coalesced=grad.is_coalesced(),
    )
    return ShardGradient.of(moved, grad.layer) if isinstance(grad, ShardGradient) else moved
