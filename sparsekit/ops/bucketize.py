"""Groups keys by the rank that owns them."""

from typing import Any

import torch

from ..errors import check_int
from ._checks import KEY_DTYPES
from ._op import Of, Op

MAX_WORLD_SIZE = 2048
# Length of a map from virtual shards to their ranks.
VIRTUAL_SHARDS = 65536


class _Bucketize(Op):
    def check(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Check the arguments as `Op` does, and the length of owners."""
        named = super().check(*args, **named)
        owners = named["owners"]
        if owners is not None and len(owners) != VIRTUAL_SHARDS:
            raise ValueError(
                f"bucketize: owners must have {VIRTUAL_SHARDS} elements, got {len(owners)}"
            )
        return named


_bucketize = _Bucketize(
    "bucketize",
    {
        "keys": Of(KEY_DTYPES, 1),
        "owners": Of((torch.int16,), 1),
        "num_keys": Of((torch.int64,), None),
    },
)


def bucketize(
    keys: torch.Tensor, world_size: int, owners: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group keys by owner, each group in input order.

    The owner of a key is ``owners[virtual shard]``. The virtual shard is 16 bits of a hash of the
    key; the hash function never changes (csrc/core/include/sparsekit/owner.h). Without a map, the
    owner is rank ``unsigned(key) % world_size``. A negative key counts as key + 2^64, even if keys
    are int32.

    Args:
        keys: int64 or int32 ``[n]``, any values.
        world_size: number of ranks, 1 to 2048.
        owners: int16 ``[65536]``, a rank for each virtual shard, on the device of keys.

    Returns:
        ``by_owner`` (dtype of keys) ``[n]``: the keys that rank 0 owns, then rank 1's, and so on;
        ``counts`` int64 ``[world_size]``, how many keys each rank owns; and ``permutation``
        int64 ``[n]`` with ``by_owner == keys[permutation]``.

    Raises:
        TypeError: keys is not an int64 or int32 tensor, owners is not int16, or world_size is not
            an int.
        ValueError: keys or owners has a wrong shape or device, world_size is outside [1, 2048], or
            owners gives a key to a rank that does not exist.
    """
    world_size = check_int("bucketize", "world_size", world_size, 1, MAX_WORLD_SIZE)
    return _bucketize(keys, world_size, owners)


@_bucketize.fake
def _(keys: torch.Tensor, world_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = keys.new_empty([world_size], dtype=torch.int64)
    permutation = keys.new_empty(keys.shape, dtype=torch.int64)
    return keys.new_empty(keys.shape), counts, permutation
