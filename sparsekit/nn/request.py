"""What one call asks of a table: which keys, and what becomes of their vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..ops._checks import KEY_DTYPES, ROW_DTYPES, accumulate_dtype
from ..ops.embedding_bag import COMBINERS
from ..ops.embedding_bag import _checked as _embedding_bag
from .inputs import check_device, checked_bags, is_padding, without_padding

if TYPE_CHECKING:
    from .shard import ShardedTable


@dataclass
class Request:
    """A checked call of one table."""

    table: ShardedTable
    keys: torch.Tensor  # [n] int64 or int32, without padding; repeats allowed

    def output(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The layer's output.

        Args:
            vectors: ``[u, dim]``.
            positions: int64 ``[n]``, which of them each key has.
        """
        raise NotImplementedError


@dataclass
class BagRequest(Request):
    """Bags of keys, whose vectors are pooled to ``[batch, slot_num, dim]``."""

    offsets: torch.Tensor  # int64 [bags + 1]
    weights: torch.Tensor | None  # [n]
    combiner: str
    slot_num: int
    slot_major: bool  # bags lie slot by slot, not sample by sample

    def output(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Request`."""
        weights = self.weights
        if weights is not None:
            weights = weights.to(accumulate_dtype(vectors.dtype))
        # Past the checks of the public form: bags and weights have been checked.
        pooled = _embedding_bag(vectors, positions, self.offsets, COMBINERS[self.combiner], weights)
        return self.shaped(pooled)

    def shaped(self, pooled: torch.Tensor) -> torch.Tensor:
        """The layer's output, from the bags' vectors ``[bags, dim]``."""
        dim = pooled.shape[1]
        if self.slot_major:
            return pooled.view(self.slot_num, -1, dim).transpose(0, 1).contiguous()
        return pooled.view(-1, self.slot_num, dim)


@dataclass
class VectorRequest(Request):
    """One vector for each key of the input, and zeros for padding."""

    shape: torch.Size  # of the input
    kept: torch.Tensor | None  # bool, which entries of the input are keys; None: all

    def output(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Request`."""
        if self.kept is not None:
            # A negative position reads zeros and sends no gradient.
            of_keys = positions
            positions = torch.full_like(self.kept, -1, dtype=torch.int64)
            positions[self.kept] = of_keys
        return ops.gather_rows(vectors, positions).view(*self.shape, vectors.shape[1])


def ask_bags(
    table: ShardedTable,
    inputs: Any,
    sample_weights: Any,
    combiner: str,
    slot_num: int,
    max_nnz: int = 2**63 - 1,
    max_feature_num: int | None = None,
) -> BagRequest:
    """Check bags for a table. Changes nothing; neither do the checks of keys below."""
    _refuse_trace(table)
    device = table.weight.device
    bags = checked_bags(
        inputs, sample_weights, table.name, device, slot_num, max_nnz, max_feature_num
    )
    check_keys(table, bags.values, bags.order)
    if table.padding_key is not None:
        bags = without_padding(bags, table.padding_key)
    return BagRequest(
        table, bags.values, bags.offsets, bags.weights, combiner, slot_num, bags.slot_major
    )


def ask_vectors(
    table: ShardedTable, keys: torch.Tensor, slots: tuple[int, int] | None
) -> VectorRequest:
    """Check keys for a table: ``[batch, slot_num, nnz_per_slot]``, or 1-D where slots is None."""
    _refuse_trace(table)
    name = table.name
    if not isinstance(keys, torch.Tensor):
        raise TypeError(f"{name}: keys must be a tensor, got {type(keys).__name__}")
    if keys.dtype not in KEY_DTYPES:
        raise TypeError(f"{name}: keys must be int64 or int32, got {keys.dtype}")
    if slots is None:
        if keys.dim() != 1:
            raise ValueError(f"{name}: keys must be 1-D, got shape {tuple(keys.shape)}")
    elif keys.dim() != 3 or keys.shape[1:] != slots:
        raise ValueError(
            f"{name}: keys must have shape [batch, slot_num={slots[0]}, nnz_per_slot={slots[1]}], "
            f"got {tuple(keys.shape)}"
        )
    check_device(name, "keys", keys, table.weight.device)
    flat = keys.reshape(-1)
    check_keys(table, flat)
    if table.padding_key is None:
        return VectorRequest(table, flat, keys.shape, None)
    kept = ~is_padding(flat, table.padding_key)
    return VectorRequest(table, flat[kept], keys.shape, kept)


def check_keys(table: ShardedTable, keys: torch.Tensor, order: torch.Tensor | None = None) -> None:
    """Check that a table can take keys, padding included; order has their places in the input."""
    if keys.dtype != table.key_dtype and table.key_dtype == torch.int32:
        raise TypeError(f"{table.name}: keys must be {table.key_dtype}, got {keys.dtype}")
    _check_weight(table)
    if table.table is not None or keys.numel() == 0:
        return
    low, high = keys.aminmax()
    end = table.capacity * table.world_size
    if low >= 0 and high < end:
        return
    outside = (keys < 0) | (keys >= end)
    if table.padding_key is not None:
        outside &= ~is_padding(keys, table.padding_key)
    if outside.any():
        first = int(outside.nonzero()[0])
        position = first if order is None else int(order[first])
        raise IndexError(
            f"{table.name}: key {int(keys[first])} at position {position} is outside "
            f"[0, {end}), the range of keys without the hash table"
        )


def _check_weight(table: ShardedTable) -> None:
    """Later a lookup would fail with the keys already inserted."""
    weight = table.weight
    if weight.dtype not in ROW_DTYPES:  # after half(), for instance
        raise TypeError(
            f"{table.name}: weight must be float32, float64 or bfloat16, got {weight.dtype}"
        )
    shape = (table.capacity, table.embedding_vec_size)
    if weight.shape != shape or not weight.is_contiguous():
        raise ValueError(
            f"{table.name}: weight must be contiguous and of shape {shape}, got shape "
            f"{tuple(weight.shape)} and strides {weight.stride()}"
        )


def _refuse_trace(table: ShardedTable) -> None:
    """Raise under torch.jit.trace, which would keep today's branches (was the table full)."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise NotImplementedError(f"{table.name}: torch.jit.trace cannot record a table lookup")
