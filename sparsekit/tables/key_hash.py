"""Hashes keys with tensor operations, on any device."""

import torch


def mixed(keys: torch.Tensor) -> torch.Tensor:
    """Return a hash of each int64 key: the finaliser of splitmix64, a bijection."""
    keys = (keys ^ _shifted(keys, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    keys = (keys ^ _shifted(keys, 27)) * (0x94D049BB133111EB - 2**64)
    return keys ^ _shifted(keys, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift words right as unsigned numbers."""
    return (words >> by) & ((1 << (64 - by)) - 1)
