"""Finds a table's rows with the lowest scores over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ..tables.key_hash import mixed

# Size in bits of a round's digit, small enough that a round's counts fit in a handshake.
_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS

# A function that takes 256 numbers on each rank, and sums them elementwise over all ranks.
Sum = Callable[..., Sequence[int]]


def lowest(
    order: torch.Tensor, keys: torch.Tensor, count: int, bits: int, sum_up: Sum
) -> torch.Tensor:
    """Return this rank's rows among the `count` lowest on all ranks; key hashes break ties.

    This is a radix selection: each round counts candidates by one digit, adds up all ranks' counts,
    and keeps only the candidates with the digit at which the running sum reaches `count`. The
    result does not depend on how keys are spread over ranks, since no two keys have the same hash.

    Args:
        order: int64 ``[n]`` in [0, 2^bits): for each row on this rank that may be taken, a number
            that orders rows by score.
        keys: int64 ``[n]``, the key of each of these rows.
        count: number of rows to take from all ranks together, at least 1; if there are fewer, all
            are taken.
        bits: number of bits in ``order``, the same on all ranks.
        sum_up: sums numbers elementwise over all ranks.

    Returns:
        Indices into `order`, int64 ``[k]``, in ascending order.
    """
    taken: list[torch.Tensor] = []
    left = torch.arange(len(order), device=order.device)
    values = order
    for stage_bits in (bits, 64):
        for end in range(stage_bits, 0, -_DIGIT_BITS):
            shift = max(0, end - _DIGIT_BITS)
            digits = (values >> shift) & ((1 << (end - shift)) - 1)
            counts = sum_up(*torch.bincount(digits, minlength=_DIGITS).tolist())
            ends = list(accumulate(counts))
            at = next((digit for digit, sum_ in enumerate(ends) if sum_ >= count), _DIGITS)
            taken.append(left[digits < at])
            here = digits == at
            left, values = left[here], values[here]
            if at == _DIGITS or ends[at] == count:
                return torch.cat([*taken, left]).sort().values
            count -= ends[at - 1] if at else 0
        values = mixed(keys[left])
    raise RuntimeError("two rows have the same key")
