"""Keys grouped by the rank that owns them."""

import torch

from ..errors import check_int
from ._checks import KEY_DTYPES, CheckedOp, check_same_device

MAX_WORLD_SIZE = 2048

_checked = CheckedOp(torch.ops.sparsekit.bucketize.default, keys=(KEY_DTYPES, 1))


def bucketize(
    keys: torch.Tensor, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys grouped by owner, the rank ``unsigned(key) % world_size``.

    A negative key counts as key + 2^64, an int32 one too. Within a group the order is that of the
    input.

    Args:
        keys: int64 or int32 ``[n]``, any values.
        world_size: number of ranks, 1 to 2048.

    Returns:
        ``by_owner`` (dtype of keys) ``[n]``: the keys of rank 0, then those of rank 1 and so on;
        ``counts`` int64 ``[world_size]``, how many each rank has; and ``permutation`` int64 ``[n]``
        with ``by_owner == keys[permutation]``.

    Raises:
        TypeError: keys is not an int64 or int32 tensor, or world_size is no int.
        ValueError: keys is not 1-D, or world_size is outside [1, 2048].
    """
    return _checked(keys, check_int("bucketize", "world_size", world_size, 1, MAX_WORLD_SIZE))


@torch.library.register_fake("sparsekit::bucketize")
def _(
    keys: torch.Tensor, world_size: int, num_keys: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _checked.check(keys)
    check_same_device("bucketize", keys=keys, num_keys=num_keys)
    counts = keys.new_empty([world_size], dtype=torch.int64)
    permutation = keys.new_empty(keys.shape, dtype=torch.int64)
    return keys.new_empty(keys.shape), counts, permutation
