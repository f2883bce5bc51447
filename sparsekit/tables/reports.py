"""Reports of lookups on a device, which the host reads later, without waiting.

An op that inserts keys on a device writes a report: the rows in use in each table before and after
it, and the errors that kernels have found since the last report. An op that only finds keys reports
only errors. The host starts a copy of the report, and reads it in a later lookup. Until then it
knows only an upper bound on the rows in use: the last known number plus the number of keys looked
up since then. A lookup waits for its own report only if its keys might not fit, and for the oldest
report if too many have not arrived yet.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from .. import _pybind
from .._load import device_library
from .._pybind import RowBound, RowBounds
from .._reports import Reports, devices_in_use, reports_of
from ..errors import TableFullError
from .hash_table import HashTable

# Number of words per table in a report: rows in use before the lookup, new keys that did not fit
# (negative for a damaged table), rows in use after the lookup.
_STATUS_WORDS = 3


class Inserting(NamedTuple):
    """Facts about a table that inserts keys, without a reference that keeps the table alive."""

    number: int  # index of the table in its lookup
    bound: RowBound
    name: str
    rank: int
    capacity: int

    @classmethod
    def of(cls, number: int, table: HashTable) -> Inserting:
        """Return the facts about a table."""
        return cls(number, table.row_bound, table.name, table.rank, table.capacity)


def bounds_of(inserting: Sequence[Inserting]) -> RowBounds:
    """Return the upper bounds on the number of rows in use in these tables."""
    return RowBounds(
        [table.bound for table in inserting],
        [table.capacity for table in inserting],
        [table.number for table in inserting],
    )


class _Captured(threading.local):
    """The reports of lookups that this thread captures; see `captured_reports`."""

    reports: list[Report] | None = None


_captured = _Captured()


@contextmanager
def captured_reports() -> Iterator[list[Report]]:
    """Collect the reports of the lookups that a graph captures in the body.

    Each replay must then send what `Report.replayed` returns. Lookups that are captured without
    this context have no reports, and their tables' bounds are unknown from then on.
    """
    reports = _captured.reports = []
    try:
        yield reports
    finally:
        _captured.reports = None


class Report:
    """The report of one lookup: written by the op, sent to the host, and read later.

    Args:
        device: device of the tables.
        names: names of the tables.
        inserting: the tables among them that insert keys.
        sizes: the tensor `size` of each table in `inserting`.
        entries: for each table, an upper bound on the number of keys that are looked up.
        bounds: result of `bounds_of` for the tables in `inserting`.

    Attributes:
        words: the op's argument ``report``: the error words, then the words of each table.
            None in a graph without `captured_reports`.
    """

    def __init__(
        self,
        device: torch.device,
        names: Sequence[str],
        inserting: Sequence[Inserting] = (),
        sizes: Sequence[torch.Tensor] = (),
        entries: Sequence[int] = (),
        bounds: RowBounds | None = None,
    ) -> None:
        words = device_library().sparsekit_num_errors() + _STATUS_WORDS * len(entries)
        self.words: torch.Tensor | None = torch.empty(words, dtype=torch.int64, device=device)
        self._names = names
        self._inserting = inserting
        self._bounds = bounds_of(inserting) if bounds is None else bounds
        self._sizes, self._entries = list(sizes), list(entries)
        self._in_graph = is_capturing(device)
        if not self._in_graph:
            self._count()
        elif _captured.reports is not None:
            _captured.reports.append(self)
        else:
            self.words = None  # errors stay on the device, since no replay sends a report
            for table in inserting:  # replays will insert keys without counting them
                table.bound.lose()

    def _count(self) -> None:
        """Count the keys that are about to be looked up."""
        self._counted = self._bounds.add(self._sizes, self._entries)
        self._fits = self._bounds.fit()

    def asked(self) -> Iterator[tuple[RowBound, int]]:
        """Yield each inserting table's bound, and the largest possible number of new keys in it."""
        for table in self._inserting:
            yield table.bound, self._entries[table.number]

    def replayed(self) -> Report:
        """Return a new report for the next replay, which will write to this report's `words`."""
        replay = copy.copy(self)
        replay._in_graph = False
        replay._count()
        return replay

    def send(self, reports: Reports, waits: bool = True) -> None:
        """Start copying this report to the host.

        Args:
            reports: the queue of the device's reports.
            waits: whether to wait for the copy if it is not certain that the keys fit.

        Raises:
            IndexError, ValueError, TableFullError: an error from this lookup or an earlier one.
        """
        if self._in_graph or self.words is None:
            return  # a replay would repeat the copy
        reports.send(self.words, self.read)
        if waits and not self._fits:
            reports.drain()

    def read(self, words: torch.Tensor) -> None:
        """Read the number of rows in use, and raise the error in the report, if any."""
        num_errors = device_library().sparsekit_num_errors()
        status = words[num_errors:]
        refusing = self._bounds.learn(status.numpy(), self._counted)
        error: Exception | None = None
        for table in self._inserting if refusing else ():
            before, refused, _ = status.view(-1, _STATUS_WORDS)[table.number].tolist()
            if refused < 0:
                error = ValueError(
                    f"{table.name}: the table is damaged: its size is {before} of "
                    f"{table.capacity}, and no slot was free for the new keys"
                )
            elif refused > 0 and error is None:
                error = TableFullError(table.name, table.rank, before, table.capacity, refused)
        found = device_library().sparsekit_reported_error(ctypes.c_void_p(words.data_ptr()))
        beside = None
        if found is not None:
            more = f" and {len(self._names) - 3} more" if len(self._names) > 3 else ""
            beside = IndexError(f"{', '.join(self._names[:3])}{more}: {found.decode()}")
        if error is not None:
            raise error from beside
        if beside is not None:
            raise beside


def entries_by_table(
    limits: Sequence[tuple[int, int, int]], keys: Sequence[torch.Tensor], num_tables: int
) -> list[int]:
    """Return an upper bound on the number of keys that a call looks up in each table.

    Args:
        limits: for each feature, its table, its source, and the maximum number of its keys.
        keys: keys of each source.
        num_tables: number of tables.
    """
    return _pybind.entries_by_table(list(limits), [len(one) for one in keys], num_tables)


def raise_errors(device: torch.device | str | None = None) -> None:
    """Wait for a device, and raise the error found by an earlier call on it, if any.

    With `sparsekit.checked` off, a CUDA op does not wait for its kernels, so an invalid key or
    offset raises an error up to 8 lookups later. Saving a checkpoint calls this function, and so
    does `Trainer.fit` after the evaluation of each epoch. In your own training loop, call it before
    you use the results. On the CPU, ops raise their errors themselves, and this function does
    nothing.

    It waits for the current stream of each device. If several calls have failed, it raises the
    oldest error; call this again for the next one.

    Args:
        device: the device, or a device type such as ``"cuda"``; None for all devices in use.

    Raises:
        IndexError, ValueError, TableFullError: the error; it is raised once.

    Example:
        >>> sparsekit.raise_errors()
    """
    devices = devices_in_use()
    if device is not None:
        wanted = torch.device(device)
        of_type = [used for used in devices if used.type == wanted.type]
        devices = of_type if wanted.index is None else [wanted]
    for used in devices:
        reports = reports_of(used)
        if reports is None:
            continue
        reports.drain()
        # Make a report with an empty lookup, since errors after the last report are still on the
        # device.
        report = Report(used, ["sparsekit"])
        nothing, features = (torch.empty(0, n, dtype=torch.int64, device="cpu") for n in (3, 9))
        torch.ops.sparsekit.group_find([], [], nothing, [], [], features, report.words)
        report.send(reports)
        reports.drain()


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured on the current stream of a device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
