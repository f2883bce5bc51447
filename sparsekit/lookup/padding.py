"""Finds padding keys, and removes them from bags."""

from __future__ import annotations

import torch

from .inputs import Bags, offsets_of


def is_padding(keys: torch.Tensor, padding_key: int) -> torch.Tensor:
    """Return a mask of keys equal to padding_key, compared as int64 to avoid truncation."""
    return keys.to(torch.int64) == padding_key


def without_padding(bags: Bags, padding_key: int) -> Bags:
    """Return checked bags without the keys that are equal to padding_key."""
    keep = ~is_padding(bags.values, padding_key)
    # Number of keys kept before each position. Indexed by the old offsets, these numbers are the
    # new offsets.
    kept_before = offsets_of(keep.to(torch.int64))
    kept = keep.nonzero().view(-1)  # computed only once, since this waits for the device
    return Bags(
        bags.values[kept],
        kept_before if bags.offsets is None else kept_before[bags.offsets],
        None if bags.weights is None else bags.weights[kept],
        bags.slot_major,
    )
