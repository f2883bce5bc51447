"""Scores of rows: how a full table decides which keys it drops first.

A score is an int64 word per row, written by the lookups in training that touch the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..errors import check_int
from .init_function import function_name

# Words other than LRU's have a number in their upper half and the clock of the last touch in their
# lower half.
_LOW = 0xFFFFFFFF
# Largest score that a user may give.
MOST_SCORE = _LOW


@dataclass(frozen=True)
class LRU:
    """Least recently used: the score of a key is the clock of its last lookup in training."""

    # Selects how `group_touch_` writes words, and how `lowest_rows` compares them.
    kind: ClassVar[int] = 1
    compared_as: ClassVar[int] = 1
    name: ClassVar[str] = "lru"
    halve_every: ClassVar[int] = 0
    # Largest clock that a word can hold.
    most_clock: ClassVar[int] = 2**63 - 1

    def order(self, words: torch.Tensor, now: int) -> torch.Tensor:
        """Return numbers >= 0, int64 ``[n]``; the row with the smallest one is dropped first."""
        return words

    @staticmethod
    def touched(words: torch.Tensor) -> torch.Tensor:
        """Return the clock of each row's last lookup in training, int64 ``[n]``."""
        return words

    def words_of(self, counts: torch.Tensor, then: torch.Tensor | int) -> torch.Tensor:
        """Return words for keys that occurred `counts` times, most recently at clock `then`."""
        return torch.zeros_like(counts) + then


class _Dated:
    """Words with a number in their upper half and the clock of the last touch in the lower."""

    compared_as: ClassVar[int] = 2
    most_clock: ClassVar[int] = _LOW

    @staticmethod
    def touched(words: torch.Tensor) -> torch.Tensor:
        """Return the clock of each row's last lookup in training, int64 ``[n]``."""
        return words & _LOW

    def words_of(self, counts: torch.Tensor, then: torch.Tensor | int) -> torch.Tensor:
        """Return words for keys that occurred `counts` times, most recently at clock `then`."""
        return counts.clamp(max=_LOW) << 32 | then


@dataclass(frozen=True)
class LFU(_Dated):
    """Least frequently used: the score of a key is how many times it has occurred in training.

    All positions in a batch count, including repeats. Counts age: they are halved every
    `halve_every` units of the clock, since otherwise keys that were popular once would stay
    forever, and no new key could displace them. Counts saturate at 2^32 - 1.

    Args:
        halve_every: counts are halved after this many units of the clock; 0 for never.

    Raises:
        TypeError, ValueError: halve_every is not an int in [0, 2^32).
    """

    halve_every: int = 1000
    kind: ClassVar[int] = 2
    name: ClassVar[str] = "lfu"

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


@dataclass(frozen=True)
class UserScore(_Dated):
    """User-defined: the score of a key is the one given to it in its last lookup in training.

    Attributes:
        function: returns the scores of keys; None if calls pass scores along with keys.
    """

    function: Callable[[torch.Tensor], torch.Tensor] | None
    # `group_touch_` writes the clock, then `user_scores` writes the score.
    kind: ClassVar[int] = LRU.kind
    name: ClassVar[str] = "user"
    halve_every: ClassVar[int] = 0

    def __repr__(self) -> str:
        return f"UserScore({self.called})"

    @property
    def called(self) -> str:
        """The name of the function, or "given" if scores are passed along with keys."""
        return "given" if self.function is None else function_name(self.function)

    def order(self, words: torch.Tensor, now: int) -> torch.Tensor:
        """Return numbers >= 0, int64 ``[n]``; the row with the smallest one is dropped first."""
        return (words >> 32) & _LOW


Score = LRU | LFU | UserScore
# Kinds of scores by their names in checkpoints.
KINDS: dict[str, type[Score]] = {one.name: one for one in (LRU, LFU, UserScore)}


def score_of(name: str, score: object) -> Score:
    """Return the score that an option selects. Error messages begin with `name`.

    Raises:
        ValueError: the option is neither a score, nor the name of one, nor a function.
    """
    if isinstance(score, (LRU, LFU, UserScore)):
        return score
    if callable(score) and not isinstance(score, type):
        return UserScore(score)
    known: dict[object, Score] = {"lru": LRU(), "lfu": LFU(), "given": UserScore(None)}
    if not isinstance(score, str) or score not in known:
        raise ValueError(
            f"{name}: score must be 'lru', 'lfu', 'given', sparsekit.LRU(), "
            f"sparsekit.LFU(...) or a function of keys, got {score!r}"
        )
    return known[score]
