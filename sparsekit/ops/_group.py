"""Arguments and checks that the ops on many tables share.

**Sources** are two lists of the same length: ``keys``, int64 or int32 ``[n]`` each, and
``offsets``, int64 or int32 ``[bags + 1]`` each, rising from 0 to n. Offsets without elements make
each key a bag of its own.

**features**, int64 ``[F, 9]``, says which table each bag asks. A row is a run of bags of one
source; its columns are those of `FeatureColumn`:

- ``table``: rows come in order of their tables.
- ``source``, ``first_bag``, ``bags``: bags first_bag to first_bag + bags - 1 of that source. A bag
  belongs to one feature at most: if two tables ask the same keys, pass the source twice.
- ``combiner``: a number of `GROUP_COMBINERS`. With ``"none"`` a bag has at most one key, whose
  vector is copied, whatever its weight.
- ``max_nnz``: most keys in a bag.
- ``tensor``, ``begin``, ``stride``: bag b of the feature is
  ``tensors[tensor].view(-1)[begin + b * stride:][:dim]``, in outputs and in their gradients.

**tables**, int64 ``[T, 3]``; its columns are:

- ``hash_table``: index in the lists of hash tables, or -1 if keys are row numbers.
- ``capacity``: most rows.
- ``world_size``: without a hash table, keys are in [0, capacity * world_size) and the row of a key
  is key // world_size.

**initializers**, float64 ``[T, 3]``: a number of `DISTRIBUTIONS`, a and b, as in `init_rows_`.

These three live on the CPU, whatever the device of the tables. Make them once and keep them.

An **entry** is a key of a feature's bag. Entries are counted feature by feature, so the entries of
a table are contiguous. A tensor with one element per entry is as long as all keys together; its
elements beyond the last entry are undefined.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch

from ._checks import KEY_DTYPES, check_tensor, explain
from .embedding_bag import COMBINERS


class FeatureColumn(IntEnum):
    """Columns of ``features``."""

    table = 0
    source = 1
    first_bag = 2
    bags = 3
    combiner = 4
    max_nnz = 5
    tensor = 6
    begin = 7
    stride = 8


GROUP_COMBINERS = {**COMBINERS, "none": 3}
SAMPLE_WEIGHT_DTYPES = (torch.float32, torch.float64)

Tensors = Sequence[torch.Tensor]


class GroupOp:
    """An op on many tables, which comes before the checks that say more; see `CheckedOp`."""

    def __init__(self, op: Callable[..., Any], check: Callable[..., None]) -> None:
        self._op = op
        # The op itself, without the way through Python.
        self._builtin = getattr(op, "op", op)
        self._check = check

    def __call__(self, *args: Any) -> Any:
        """Call the op, past autograd: none of them is differentiable."""
        if torch.compiler.is_compiling():
            self._check(*args)
            return self._op(*args)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return self._builtin(*args)
        except Exception as refusal:
            explain(refusal, self._check, *args)


def check_lists(
    op: str, lists: Mapping[str, tuple[Tensors, Sequence[torch.dtype], int | None]]
) -> None:
    """Raise TypeError or ValueError for a tensor with a wrong dtype or number of dimensions."""
    for name, (tensors, dtypes, dim) in lists.items():
        for i, tensor in enumerate(tensors):
            any_dim = tensor.dim() if isinstance(tensor, torch.Tensor) else 0
            check_tensor(op, f"{name}[{i}]", tensor, dtypes, any_dim if dim is None else dim)


def check_devices(op: str, tensors: Sequence[torch.Tensor | None]) -> None:
    """Raise ValueError when the tensors are not all on one device."""
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"{op}: all tensors must be on one device, got {sorted(devices)}")


def check_descriptor(
    op: str, name: str, matrix: torch.Tensor, dtype: torch.dtype, dim: int = 2
) -> None:
    """Raise unless the matrix is of that dtype, and on the CPU, where all descriptors lie."""
    check_tensor(op, name, matrix, (dtype,), dim)
    if matrix.device.type != "cpu":
        raise ValueError(
            f"{op}: all tensors must be on one device but {name}, which must be on the CPU; it is "
            f"on {matrix.device}"
        )


def check_numbers(
    op: str,
    index: torch.Tensor,
    rows: torch.Tensor | None,
    counts: torch.Tensor | None,
    bags: torch.Tensor,
    features: torch.Tensor,
    key_starts: torch.Tensor | None,
) -> None:
    """Raise TypeError or ValueError for what is not as an op that finds rows has returned it."""
    check_tensor(op, "index", index, (torch.int32,), 1)
    if rows is not None:
        check_tensor(op, "rows", rows, (torch.int32,), 1)
    if counts is not None:
        check_tensor(op, "counts", counts, (torch.int64,), 1)
    check_tensor(op, "bags", bags, (torch.int32,), 1)
    if key_starts is not None:
        check_tensor(op, "key_starts", key_starts, (torch.int64,), 1)
    check_descriptor(op, "features", features, torch.int64)


def sources(keys: Tensors, offsets: Tensors) -> dict[str, tuple[Tensors, Any, int]]:
    """Lists of sources, for `check_lists`."""
    return {"keys": (keys, KEY_DTYPES, 1), "offsets": (offsets, KEY_DTYPES, 1)}


def split_by_table(
    dims: Sequence[int], counts: Sequence[int], rows: torch.Tensor, sums: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """Rows of each table and their gradients ``[n, dim]``, from `group_embedding_bag_backward`.

    Args:
        dims: length of a row of each table.
        counts: number of rows of each table.
        rows: all rows.
        sums: all gradients, those of each table from a multiple of 16 elements on.
    """
    if len(dims) == 1:
        return [rows], [sums.view(counts[0], dims[0])]
    sizes = [count * dim for count, dim in zip(counts, dims, strict=True)]
    gaps = [-size % 16 for size in sizes[:-1]]
    parts = sums.split([size for pair in zip(sizes, [*gaps, 0], strict=True) for size in pair])
    shaped = zip(parts[::2], counts, dims, strict=True)
    return rows.split(list(counts)), [part.view(count, dim) for part, count, dim in shaped]


def bags_like(
    like: torch.Tensor, keys: Tensors, offsets: Tensors, features: torch.Tensor
) -> Tensors:
    """Bags and key_starts, as a fake returns them."""
    each = zip(keys, offsets, strict=True)
    count = sum(o.shape[0] - 1 if o.shape[0] else k.shape[0] for k, o in each)
    key_starts = like.new_empty([features.shape[0]], dtype=torch.int64)
    return like.new_empty([count + 1], dtype=torch.int32), key_starts


def length_of(keys: Tensors) -> Any:
    """How many entries there may be, as a fake needs it."""
    return sum(k.shape[0] for k in keys)
