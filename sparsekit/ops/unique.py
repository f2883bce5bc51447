"""Finds the distinct keys, in order of first occurrence."""

import torch

from ._checks import KEY_DTYPES
from ._op import Of, Op

_KEYS = {"keys": Of(KEY_DTYPES, 1)}
_unique = Op("unique", _KEYS)
_unique_padded = Op("unique_padded", _KEYS)


def unique(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the distinct keys in order of first occurrence.

    Unlike ``torch.unique`` it does not sort: keys stay in input order, on every device.

    Args:
        keys: int64 or int32 ``[n]``, any values.

    Returns:
        ``unique`` (dtype of keys) ``[u]``, ``inverse`` int64 ``[n]`` with
        ``unique[inverse] == keys``, and ``counts`` int64 ``[u]``.

    Raises:
        TypeError: keys is not an int64 or int32 tensor.
        ValueError: keys is not 1-D.
    """
    return _unique(keys)


@_unique.fake
def _(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_unique = torch.library.get_ctx().new_dynamic_size()
    inverse = keys.new_empty(keys.shape, dtype=torch.int64)
    counts = keys.new_empty([num_unique], dtype=torch.int64)
    return keys.new_empty([num_unique]), inverse, counts


@_unique_padded.fake
def _(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse, counts = (keys.new_empty(keys.shape, dtype=torch.int64) for _ in range(2))
    return torch.empty_like(keys), inverse, counts, keys.new_empty([1], dtype=torch.int64)
