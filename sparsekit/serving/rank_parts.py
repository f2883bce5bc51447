"""Writes one rank's rows, for bases that several ranks write together, and for deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from . import encoding
from .delta_file import Section, header_of, write_delta
from .export import Exported, Pieces, floats


def encoded(
    folder: Path, name: str, keys: np.ndarray, vectors: torch.Tensor, word: str
) -> np.ndarray:
    """Encode vectors as rows, uint8 ``[n, row_bytes]``.

    Args:
        folder: folder of the log.
        name: name of the table.
        keys: keys of the vectors, int64 ``[n]``.
        vectors: ``[n, dim]`` on the CPU.
        word: format of rows.

    Raises:
        ValueError: the format cannot hold a vector; the message names its key.
    """
    try:
        return encoding.encode_rows(floats(vectors), word)
    except encoding.RowError as error:
        key = keys[error.row]
        raise ValueError(f"{folder}: table {name}: key {key} {error.reason}") from None


def write_part(path: Path, found: Sequence[Exported]) -> None:
    """Write this rank's rows of tables, in float32, as a delta.

    Raises:
        ValueError: a vector cannot be stored; the message names its key.
        OSError: the disk is full, for example; the error names the file.
    """
    sections = []
    for number, table in enumerate(found):
        for keys, vectors in table.pieces():
            rows = encoded(path.parent, table.name, keys.numpy(), vectors, "float32")
            sections.append(Section(number, 0, rows.shape[1], keys.numpy(), rows))
    write_delta(path, header_of(num_ranks=1), sections)


def joined(table: Exported, number: int, parts: Sequence[Sequence[Section]]) -> Exported:
    """Return a table with the rows of all ranks.

    Args:
        table: the table.
        number: the table's number in the parts.
        parts: for each rank, the sections that it wrote with `write_part`.
    """

    def pieces() -> Pieces:
        for sections in parts:
            for section in sections:
                if section.table == number and section.rows is not None:
                    vectors = section.rows.copy().view("<f4")
                    yield torch.from_numpy(section.keys.copy()), torch.from_numpy(vectors)

    return replace(table, pieces=pieces)
