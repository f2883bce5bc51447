"""Hashes integers on their device."""

import torch

from ..errors import check_int
from ._checks import check_tensor
from ._op import Of, Op

_hash = Op("hash_integers", {"values": Of((torch.int64,), 1)})
INTEGER_DTYPES = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def hash_integers(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return XXH64 of the decimal text of integers, as `sparsekit.hashing.xxh64` computes it.

    Args:
        values: any integer dtype, ``[n]``.
        seed: selects one of 2**64 hash functions, in ``[0, 2**64)``.

    Returns:
        int64 ``[n]`` on the device of values: the 64 bits read as a signed number.

    Raises:
        TypeError: a wrong dtype.
        ValueError: values is not 1-D, or seed is out of range.
    """
    check_tensor("hash_integers", "values", values, INTEGER_DTYPES, 1)
    seed = check_int("hash_integers", "seed", seed, 0, 2**64 - 1)
    is_unsigned = values.dtype == torch.uint64
    # View uint64 as another dtype with the same bits, since torch cannot convert it on all devices.
    wide = values.view(torch.int64) if is_unsigned else values.to(torch.int64)
    return _hash(wide, is_unsigned, seed - 2**64 if seed >= 2**63 else seed)


@_hash.fake
def _(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(values.shape)
