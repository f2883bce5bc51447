"""Writes training records to a file of JSON lines or to TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from .._extras import needed
from .._replacing import replacing
from ..distributed.exchange import Exchange, attempt
from .progress import Progress

# Name of the file that `JsonLines` writes in the folder of a run.
METRICS = "metrics.jsonl"
# A record contains "kind" ("step" or "epoch"), "step" (the number of updates so far) and values.
Record = Mapping[str, Any]


class Log(Protocol):
    """A destination for training records; only rank 0 writes to it."""

    def write(self, record: Record) -> None:
        """Write a record."""


def write_record(logs: Sequence[Log], record: Record, exchange: Exchange | None) -> None:
    """Write a record on rank 0; if that fails, raise an error on all ranks."""

    def write() -> None:
        for log in logs:
            log.write(record)

    _on_first(exchange, write)


def go_on(
    logs: Sequence[Log], step: int, stream: TextIO | None, exchange: Exchange | None = None
) -> None:
    """Remove all records after this step from the logs; if that fails, raise on all ranks.

    Rank 0 does the work. If it finds lines that are not records, it reports them on ``stream``.
    """

    def forget() -> None:
        for log in logs:
            damaged = log.forget_after(step) if isinstance(log, JsonLines | TensorBoard) else None
            if damaged:
                listed = ", ".join(map(str, damaged[:5])) + ", ..." * (len(damaged) > 5)
                text = f"line {listed} was no record of training and is gone"
                if len(damaged) > 1:
                    text = f"lines {listed} were no records of training and are gone"
                Progress(f"{log}:", 0, stream).finish(text)

    _on_first(exchange, forget)


def _on_first(exchange: Exchange | None, act: Callable[[], None]) -> None:
    if exchange is None:
        act()
    else:
        exchange.agree("write records of training", attempt(act) if exchange.rank == 0 else None)


class JsonLines:
    """Writes each record to a file immediately, as a line of JSON.

    The first record overwrites the file of an older run, unless the trainer resumes that run and
    has called `forget_after`. Ranks that do not write records do not touch the file.

    Args:
        path: path of the file; its folder is created if it is missing.

    Raises:
        OSError: (when a record is written) the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._mode = "w"

    def __str__(self) -> str:
        return os.fspath(self._path)

    def write(self, record: Record) -> None:
        """Append a record as a line. Infinities and NaN, which JSON lacks, become null."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, self._mode, encoding="utf-8") as file:
            self._mode = "a"
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def forget_after(self, step: int) -> list[int]:
        """Remove the records of later steps, so that a run continues after this step.

        Returns:
            The numbers, counted from 1, of lines that are not records; they are removed, too. The
            last line is not reported, since a killed process may have left it incomplete.
        """
        self._mode = "a"
        if not self._path.exists():
            return []
        kept, damaged = [], []
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                continue
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, TypeError, KeyError):
                damaged.append(number)
        with replacing(self._path) as part:
            part.write_bytes(b"".join(kept))
        return damaged


class TensorBoard:
    """Writes the numbers of each record as scalars, such as ``epoch/metrics/test AUC``.

    Records of an older run in the same folder are hidden, whereas `JsonLines` removes them.

    Args:
        folder: folder for TensorBoard's files.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        needed("tensorboard", "TensorBoard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = None
        self._step = -1  # last step of an older run to show; TensorBoard hides later events
        self._make = lambda: SummaryWriter(os.fspath(folder), purge_step=self._step + 1)

    def forget_after(self, step: int) -> None:
        """Hide the records of later steps, so that a run continues after this step."""
        self._step = step

    def write(self, record: Record) -> None:
        """Write the record's numbers as scalars at its step."""
        if self._writer is None:
            self._writer = self._make()
        values = {key: value for key, value in record.items() if key not in ("kind", "step")}
        for name, value in _numbers(values, str(record["kind"])):
            self._writer.add_scalar(name, value, record["step"])
        self._writer.flush()


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{name}")
        elif isinstance(value, int | float):
            yield f"{prefix}/{name}", value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
