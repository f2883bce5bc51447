"""Names the policies whose hit rates are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import check_choice, check_int
from ..tables.admission import MinCount
from ..tables.scores import LFU, LRU


@dataclass(frozen=True)
class Policy:
    """Table options that decide which keys have rows.

    Args:
        score: ``"lru"`` or ``"lfu"``, for a table with ``on_full="evict"``; None for a table whose
            rows are dropped only by ``ttl``.
        admission: number of occurrences that a key needs to get a row, as with ``MinCount``.
        ttl: a row expires after this many lookups without its key; None for never.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range, ttl is given with a
            score or an admission, or neither ttl nor score is given.
    """

    score: str | None = "lru"
    admission: int = 1
    ttl: int | None = None

    def __post_init__(self) -> None:
        check_int("Policy", "admission", self.admission, 1, 2**31 - 1)
        if self.ttl is None:
            check_choice("Policy", "score", self.score, ("lru", "lfu"))
        elif self.score is not None or self.admission != 1:
            raise ValueError(f"Policy: ttl={self.ttl} is predicted without score and admission")
        else:
            check_int("Policy", "ttl", self.ttl, 1, 2**62)

    def __str__(self) -> str:
        if self.score is None:
            return "ttl"
        return self.score + (f", admission {self.admission}" if self.admission > 1 else "")

    @property
    def halve_every(self) -> int:
        """Number of lookups between halvings of counts; 0 for never."""
        return (LFU() if self.score == "lfu" else LRU()).halve_every

    def options(self) -> dict[str, Any]:
        """Return the options for a table with this policy, except its number of rows."""
        if self.score is None:
            return {"ttl": self.ttl}
        admission = {"admission": MinCount(self.admission)} if self.admission > 1 else {}
        return {"on_full": "evict", "score": self.score, **admission}
