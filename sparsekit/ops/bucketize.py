"""Keys grouped by the rank that owns them."""

from typing import Any

import torch

from ..errors import check_int
from ._checks import KEY_DTYPES, CheckedOp, check_same_device, check_tensor

MAX_WORLD_SIZE = 2048
# Entries of a map from virtual shards to ranks.
VIRTUAL_SHARDS = 65536


class _Bucketize(CheckedOp):
    """The op, whose last tensors may be absent."""

    def check(self, *args: Any) -> None:
        """See `CheckedOp`; args are those of the op."""
        keys, _, owners, num_keys = (*args, None, None)[:4]
        super().check(keys)
        if owners is not None:
            check_tensor("bucketize", "owners", owners, (torch.int16,), 1)
            if len(owners) != VIRTUAL_SHARDS:
                raise ValueError(
                    f"bucketize: owners must have {VIRTUAL_SHARDS} elements, got {len(owners)}"
                )
        check_same_device("bucketize", keys=keys, owners=owners, num_keys=num_keys)


_checked = _Bucketize(torch.ops.sparsekit.bucketize.default, keys=(KEY_DTYPES, 1))


def bucketize(
    keys: torch.Tensor, world_size: int, owners: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys grouped by owner, each group in the order of the input.

    The owner of a key is ``owners[virtual shard]``, where the virtual shard is 16 bits of a hash of
    the key that never changes (`sparsekit.reference.virtual_shard`), or without a map the rank
    ``unsigned(key) % world_size``. A negative key counts as key + 2^64, an int32 one too.

    Args:
        keys: int64 or int32 ``[n]``, any values.
        world_size: number of ranks, 1 to 2048.
        owners: int16 ``[65536]``, a rank for each virtual shard, on the device of keys.

    Returns:
        ``by_owner`` (dtype of keys) ``[n]``: the keys of rank 0, then those of rank 1 and so on;
        ``counts`` int64 ``[world_size]``, how many each rank has; and ``permutation`` int64 ``[n]``
        with ``by_owner == keys[permutation]``.

    Raises:
        TypeError: keys is not an int64 or int32 tensor, owners is not int16, or world_size is no
            int.
        ValueError: keys or owners has a wrong shape or device, world_size is outside [1, 2048], or
            owners gives a key to something that is no rank.
    """
    world_size = check_int("bucketize", "world_size", world_size, 1, MAX_WORLD_SIZE)
    return _checked(keys, world_size, owners)


@torch.library.register_fake("sparsekit::bucketize")
def _(
    keys: torch.Tensor,
    world_size: int,
    owners: torch.Tensor | None = None,
    num_keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _checked.check(keys, world_size, owners, num_keys)
    counts = keys.new_empty([world_size], dtype=torch.int64)
    permutation = keys.new_empty(keys.shape, dtype=torch.int64)
    return keys.new_empty(keys.shape), counts, permutation
