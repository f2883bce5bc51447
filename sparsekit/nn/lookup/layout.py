"""Where the rows of tables lie in what ranks send to each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...distributed.exchange import HEAD_BYTES

# Vectors begin at multiples of this many bytes, or their tables' pieces do.
ALIGNMENT = 16


class Layout:
    """The parts for all ranks, or from them: of each, a head and then the rows table by table.

    Args:
        counts: int64 ``[world_size, tables]``, rows.
        row_bytes: of each table.
        alignment: bytes of which the piece of each table has a multiple.
        head_bytes: in front of the pieces of a part.

    Attributes:
        counts: those.
        sizes: bytes of each part.
    """

    def __init__(
        self,
        counts: np.ndarray,
        row_bytes: Sequence[int],
        alignment: int = 1,
        head_bytes: int = HEAD_BYTES,
    ) -> None:
        self.counts = counts
        sizes = counts * np.array(row_bytes, dtype=np.int64)
        if alignment > 1:
            sizes += -sizes % alignment
        # int64 [world_size, 1 + tables], where pieces begin and end.
        self._bounds = np.empty((len(counts), 1 + len(row_bytes)), dtype=np.int64)
        self._bounds[:, 0] = head_bytes
        np.cumsum(sizes, axis=1, out=self._bounds[:, 1:])
        self._bounds[:, 1:] += head_bytes
        self.sizes: list[int] = self._bounds[:, -1].tolist()

    def begins(self, of_parts: Sequence[int]) -> np.ndarray:
        """int64 ``[world_size, tables]``, the byte at which each piece begins.

        Args:
            of_parts: the byte at which each part begins.
        """
        return self._bounds[:, :-1] + np.array(of_parts, dtype=np.int64)[:, None]

    def range_of(self, rank: int, columns: slice) -> tuple[int, int]:
        """First byte of the pieces of these tables, within the part, and the end of the last."""
        return int(self._bounds[rank, columns.start]), int(self._bounds[rank, columns.stop])
