"""The life of a table's rows: their scores, the table's clock, its budget, and dropped rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from ..errors import check_int
from . import saved_state as saved
from .admission import ExactCounts, MinCount, Probability, Sketch, counts_of
from .fallback import Fallback
from .options import TableOptions
from .scores import LFU, Score

# Default for max_rows, as a fraction of the ranks' total capacity. The remainder is headroom: keys
# are assigned to ranks by hash, so some ranks get more rows than others.
DEFAULT_BUDGET = 0.9

# Number of sweeps for expired rows while the clock advances by ttl.
SWEEPS_PER_TTL = 16


class Evicted(NamedTuple):
    """Keys that have been dropped from a table, with everything that belonged to them.

    Attributes:
        keys: int64 ``[n]``.
        vectors: ``[n, dim]`` in the dtype of the weight.
        states: optimizer states, by the optimizer's class and the state's name, such as
            ``"LazyAdam.exp_avg"``; each ``[n, ...]``.
        scores: int64 ``[n]``, in the units of the table's score: the clock for LRU, aged counts for
            LFU, or the user's scores.
        expired: whether the rows were older than ttl; otherwise the table was over its budget.
    """

    keys: torch.Tensor
    vectors: torch.Tensor
    states: dict[str, torch.Tensor]
    scores: torch.Tensor
    expired: bool


class RowCounts(NamedTuple):
    """Counts of a rank's rows since the layer was made; see `EmbeddingLayer.row_counts`.

    Attributes:
        rows: rows in use now.
        inserted: keys that have been given a row by a lookup, `assign` or a load: rows in use plus
            all dropped rows.
        admitted: the keys in `inserted` that were given their row by `admission`.
        refused: keys looked up during training that were given no row, each counted once per
            lookup.
        evicted: rows dropped for lack of room, or by `evict`.
        expired: rows dropped because they were older than ttl.
        erased: rows dropped by `erase` or `clear`.
        asked: keys looked up during training, each counted once per lookup of the table, even if
            several ranks ask for it. 0 on CUDA, where the host does not know the number.
        found: the keys in `asked` that had a row before their lookup, so found / asked is the hit
            rate.
    """

    rows: int
    inserted: int
    admitted: int
    refused: int
    evicted: int
    expired: int
    erased: int
    asked: int
    found: int


class RowLife:
    """Settings and counts for the life of a table's rows.

    Attributes:
        score: how rows are scored.
        max_rows: budget of rows over all ranks; None if a full table is an error.
        low_watermark: fraction of the budget that a sweep leaves in use. The next sweep runs when
            the difference has been used up, so the cost of a sweep, which reads all scores, is
            spread over many new keys.
        admission: decides which new keys get a row; None for all.
        before_admission: vector of a key before its admission: "initial", "zero", or fallback rows.
        counts: how often each key that is not yet admitted has occurred; None if admission needs no
            counts.
        ttl: a row expires after this many units of the clock without a lookup; None for never.
        set_by_user: whether the clock is set by `sparsekit.set_clock`, so that lookups do not
            advance it.
        evicted, expired: number of this rank's rows that sweeps have dropped.
        erased: number of this rank's rows that the user has dropped.
        admitted, refused: number of this rank's keys that admission has given a row, and number of
            times that it has refused a key in a batch.
        looked_up: number of this rank's keys that had a row after a lookup during training, each
            counted once per lookup, on the CPU only.
        new: number of these keys that the lookup itself gave a row, without `admission`.
        on_evict: called with the rows that a sweep drops.
        makes_room_first: whether lookups make room before they insert keys; set once a lookup has
            had more new keys than there were free rows.
        keys_finished: total number of distinct keys that all ranks requested in finished lookups.
    """

    def __init__(
        self,
        score: Score,
        max_rows: int | None,
        low_watermark: float,
        ttl: int | None,
        admission: MinCount | Probability | None,
        before_admission: str | Fallback,
        counts: ExactCounts | Sketch | None,
    ) -> None:
        self.score = score
        self.max_rows = max_rows
        self.low_watermark = low_watermark
        self.ttl = ttl
        self.admission = admission
        self.before_admission = before_admission
        self.counts = counts
        self.set_by_user = False
        self.evicted = self.expired = self.erased = self.admitted = self.refused = 0
        self.looked_up = self.new = 0
        self.on_evict: Callable[[Evicted], Any] | None = None
        self.makes_room_first = False
        self.keys_finished = 0
        # The clock's value when last read or written, its tensor, and the tensor's version at the
        # time.
        self._now = 0
        self._known: tuple[torch.Tensor | None, int | None] = None, None
        # Period of the clock during which the last sweep for expired rows ran.
        self._expired_in: int | None = None

    def __str__(self) -> str:
        return (
            f"max_rows {self.max_rows}, low_watermark {self.low_watermark}, {self.score}, "
            f"ttl {self.ttl}, {self.admission} ({self.before_admission} before), "
        )

    @property
    def sweeps(self) -> bool:
        """Return whether lookups may drop rows on their own, or refuse keys."""
        return self.max_rows is not None or self.sweeps_always

    @property
    def sweeps_always(self) -> bool:
        """Return whether each lookup may drop rows, or refuse keys, even within the budget."""
        return self.ttl is not None or self.admission is not None

    @property
    def counts_touches(self) -> bool:
        """Return whether it matters how many times a key occurs."""
        return self.score.kind == LFU.kind or self.counts is not None

    def rows_to_drop(self, in_use: int, new: int) -> int:
        """Return how many rows a table must drop to make room for new keys; 0 if they fit.

        Args:
            in_use: number of rows in use over all ranks, without those of the new keys.
            new: number of new keys over all ranks.
        """
        budget = cast(int, self.max_rows)
        if in_use + new <= budget:
            return 0
        return in_use - max(0, min(round(self.low_watermark * budget), budget - new))

    def row_counts(self, rows: int, on_cpu: bool) -> RowCounts:
        """Return the counts for a rank with this number of rows in use."""
        return RowCounts(
            rows=rows,
            inserted=rows + self.evicted + self.expired + self.erased,
            admitted=self.admitted,
            refused=self.refused,
            evicted=self.evicted,
            expired=self.expired,
            erased=self.erased,
            asked=self.looked_up + self.refused if on_cpu else 0,
            found=self.looked_up - self.new - self.admitted if on_cpu else 0,
        )

    def now(self, clock: torch.Tensor) -> int:
        """Return the clock's value; wait for the device only if other code has changed it."""
        known = clock, _version(clock)
        if self._known[0] is not clock or known[1] is None or self._known[1] != known[1]:
            self._now, self._known = int(clock), known
        return self._now

    def wrote(self, clock: torch.Tensor, now: int) -> None:
        """Record that the library has set a table's clock."""
        self._now, self._known = now, (clock, _version(clock))

    def lose_clock(self) -> None:
        """Forget the known value of the table's clock."""
        self._known = None, None

    def restore(self, clock: torch.Tensor, now: int, set_by_user: bool) -> None:
        """Restore the saved value of a table's clock, and whether the user sets it."""
        clock.fill_(now)
        self.wrote(clock, now)
        self.set_by_user = set_by_user
        self.forget_expiry()

    def forget_expiry(self) -> None:
        """Make the next lookup sweep for expired rows, since the rows have been replaced."""
        self._expired_in = None

    def expiry_is_due(self, now: int) -> bool:
        """Return whether it is time to sweep for expired rows; see `have_expired`."""
        return self.ttl is not None and self._expired_in != now // self._every

    def have_expired(self, now: int) -> None:
        """Record that a sweep for expired rows has run."""
        self._expired_in = now // self._every

    def admit(
        self, keys: torch.Tensor, counts: torch.Tensor, now: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys to be given a row, and how often each was counted before this batch.

        Args:
            keys: int64 ``[n]``, distinct keys without a row.
            counts: int64 ``[n]``, how often each occurs in this batch on all ranks.
            now: the table's clock.
        """
        if isinstance(self.admission, Probability):
            before, admitted = torch.zeros_like(counts), self.admission.admits(keys, now)
        else:
            sums = cast(ExactCounts, self.counts).add(keys, counts, now)
            before, admitted = sums - counts, sums >= cast(MinCount, self.admission).count
        return keys[admitted], before[admitted]

    def removal_of_counts(self, keys: torch.Tensor) -> list[partial[Any]]:
        """Return the calls, for `run_all`, that remove the counts of keys being given rows."""
        return [] if self.counts is None else self.counts.removal(keys)

    def erase_counts(self, keys: torch.Tensor) -> None:
        """Remove keys waiting for admission and overwrite their counts, if counts are exact."""
        if self.counts is not None:
            saved.run_all(self.counts.erasure(keys))

    def oldest(self, now: int) -> int:
        """Return the clock value such that rows last looked up before it expire.

        The result depends only on the clock's period, so a program that resumes within a period,
        and sweeps again, drops nothing that the original program would have kept.
        """
        return now - now % self._every - cast(int, self.ttl)

    @property
    def _every(self) -> int:
        return max(1, cast(int, self.ttl) // SWEEPS_PER_TTL)

    def move_to(self, device: torch.device) -> None:
        """Move the counts of keys that have not been admitted to another device."""
        if self.counts is None or device.type == "meta":
            return
        state = self.counts.state().to(device)
        self.forget_counts(device)
        self.counts.load(state)

    def forget_counts(self, device: torch.device) -> None:
        """Drop the counts of keys that have not been admitted; keep future counts on `device`."""
        self.counts = counts_of(self.admission, device)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the table has a clock of its own, and no on_evict function.
        return {**self.__dict__, "_known": (None, None), "on_evict": None}


def new_life(name: str, options: TableOptions, most_rows: int) -> RowLife | None:
    """Return a `RowLife` for a table's rows; None if they have no scores.

    Args:
        name: name of the table.
        options: checked options.
        most_rows: number of rows over all ranks.

    Raises:
        ValueError: max_rows exceeds most_rows, or fallback rows leave no room.
    """
    if options.score is None:
        return None
    max_rows = None
    if options.on_full == "evict":
        max_rows = options.max_rows or max(1, int(DEFAULT_BUDGET * most_rows))
        check_int(name, "max_rows", max_rows, 1, most_rows)
    if isinstance(options.before_admission, Fallback):
        most = (most_rows if max_rows is None else max_rows) - 1
        check_int(name, "before_admission.rows", options.before_admission.rows, 1, most)
    counts = counts_of(options.admission, cast(torch.device, options.device))
    return RowLife(
        cast(Score, options.score),
        *(max_rows, options.low_watermark, options.ttl),
        *(options.admission, options.before_admission, counts),
    )


def begin_ticks(lives: Sequence[tuple[RowLife, torch.Tensor]]) -> list[int]:
    """Return the values of tables' clocks before an op advances them.

    Until `end_ticks`, the host does not rely on known values, in case the op is interrupted.
    """
    before = [life.now(clock) for life, clock in lives]
    for life, _ in lives:
        life.lose_clock()
    return before


def end_ticks(lives: Sequence[tuple[RowLife, torch.Tensor]], now: Sequence[int]) -> None:
    """Record the values of tables' clocks after an op has advanced them."""
    for (life, clock), shown in zip(lives, now, strict=True):
        life.wrote(clock, shown)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
