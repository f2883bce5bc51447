"""Scores of rows: how a full table decides which keys it drops first.

A score is an int64 word per row, written by the lookups in training that touch the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import check_int

# An LFU word has the count in its upper half and the clock of the last touch in its lower half.
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class LRU:
    """Least recently used: the score of a key is the clock of its last lookup in training."""

    kind: ClassVar[int] = 1
    name: ClassVar[str] = "lru"
    halve_every: ClassVar[int] = 0
    # Largest clock that a word can hold.
    most_clock: ClassVar[int] = 2**63 - 1

    def order(self, words: torch.Tensor, now: int) -> torch.Tensor:
        """Return numbers >= 0, int64 ``[n]``; the row with the smallest one is dropped first."""
        return words

    def touched(self, words: torch.Tensor) -> torch.Tensor:
        """Return the clock of each row's last lookup in training, int64 ``[n]``."""
        return words

    def words_of(self, counts: torch.Tensor, then: torch.Tensor | int) -> torch.Tensor:
        """Return the words of rows that have come `counts` times, the last time at clock `then`."""
        return torch.zeros_like(counts) + then


@dataclass(frozen=True)
class LFU:
    """Least frequently used: the score of a key is the number of times that it came in training.

    All positions of a batch count, repeats included. Counts age: they are halved every
    `halve_every` units of the clock, since otherwise keys that were popular once would stay for
    ever, and no new key could win against them. Counts stop at 2^32 - 1.

    Args:
        halve_every: units of the clock after which counts are halved; 0 for never.

    Raises:
        TypeError, ValueError: halve_every is not an int in [0, 2^32).
    """

    halve_every: int = 1000
    kind: ClassVar[int] = 2
    name: ClassVar[str] = "lfu"
    most_clock: ClassVar[int] = _LOW

    def __post_init__(self) -> None:
        check_int("LFU", "halve_every", self.halve_every, 0, _LOW)

    def order(self, words: torch.Tensor, now: int) -> torch.Tensor:
        """Return numbers >= 0, int64 ``[n]``; the row with the smallest one is dropped first."""
        counts = (words >> 32) & _LOW
        if self.halve_every == 0:
            return counts
        then = self.touched(words)
        halvings = now // self.halve_every - then // self.halve_every
        return counts >> halvings.clamp_(0, 32)

    def touched(self, words: torch.Tensor) -> torch.Tensor:
        """Return the clock of each row's last lookup in training, int64 ``[n]``."""
        return words & _LOW

    def words_of(self, counts: torch.Tensor, then: torch.Tensor | int) -> torch.Tensor:
        """Return the words of rows that have come `counts` times, the last time at clock `then`."""
        return counts.clamp(max=_LOW) << 32 | then


Score = LRU | LFU


def score_of(name: str, score: object) -> Score:
    """Return the score that an option means. Error messages begin with `name`.

    Raises:
        ValueError: the option is neither a score nor the name of one.
    """
    if isinstance(score, (LRU, LFU)):
        return score
    known: dict[object, Score] = {"lru": LRU(), "lfu": LFU()}
    if not isinstance(score, str) or score not in known:
        raise ValueError(
            f"{name}: score must be 'lru', 'lfu', sparsekit.LRU() or sparsekit.LFU(...), got "
            f"{score!r}"
        )
    return known[score]
