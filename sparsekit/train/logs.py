"""Where records of training go: a file of JSON lines, TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

# A record is a dict with "kind": "step" or "epoch", and "step": updates made so far.
Record = Mapping[str, Any]


class Log(Protocol):
    """What takes records. Rank 0 writes them."""

    def write(self, record: Record) -> None:
        """Keep a record."""


class JsonLines:
    """Appends each record to a file as a line of JSON, at once.

    The first record opens the file, so that ranks that write none do not touch it.

    Args:
        path: of the file; its folder is made if it is missing.

    Raises:
        OSError: when writing: the file cannot be opened or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def write(self, record: Record) -> None:
        """Append a line. Numbers that are not finite become null, which JSON has no word for."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Remove what a run has written beyond a step, to which it goes back."""
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        # The last line of a killed process may be half a line.
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, self._path)


class TensorBoard:
    """Writes the numbers of each record as scalars, such as ``epoch/metrics/test AUC``.

    Args:
        folder: for TensorBoard's files.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs the package tensorboard: pip install 'sparsekit-torch[train]'"
            ) from error
        self._writer: Any = None
        self._make = lambda: SummaryWriter(os.fspath(folder))

    def write(self, record: Record) -> None:
        """Write the record's numbers at its step."""
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
