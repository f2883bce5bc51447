"""Distinct keys in order of first occurrence."""

import torch

from ._checks import KEY_DTYPES, CheckedOp, check_same_device

_checked = CheckedOp(torch.ops.sparsekit.unique.default, keys=(KEY_DTYPES, 1))


def unique(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct keys in order of first occurrence.

    Unlike ``torch.unique`` it does not sort: the order is that of the input, on every device.

    Args:
        keys: int64 or int32 ``[n]``, any values.

    Returns:
        ``unique`` (dtype of keys) ``[u]``, ``inverse`` int64 ``[n]`` with
        ``unique[inverse] == keys``, and ``counts`` int64 ``[u]``.

    Raises:
        TypeError: keys is not an int64 or int32 tensor.
        ValueError: keys is not 1-D.
    """
    return _checked(keys)


@torch.library.register_fake("sparsekit::unique")
def _(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _checked.check(keys)
    num_unique = torch.library.get_ctx().new_dynamic_size()
    inverse = keys.new_empty(keys.shape, dtype=torch.int64)
    counts = keys.new_empty([num_unique], dtype=torch.int64)
    return keys.new_empty([num_unique]), inverse, counts


@torch.library.register_fake("sparsekit::unique_padded")
def _(
    keys: torch.Tensor, num_keys: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_same_device("unique_padded", keys=keys, num_keys=num_keys)
    inverse, counts = (keys.new_empty(keys.shape, dtype=torch.int64) for _ in range(2))
    return torch.empty_like(keys), inverse, counts, keys.new_empty([1], dtype=torch.int64)
