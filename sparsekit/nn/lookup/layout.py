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
        counts: ``[world_size][tables]``, rows.
        row_bytes: of each table.
        alignment: bytes of which the piece of each table has a multiple.

    Attributes:
        counts: int64 ``[world_size, tables]``.
        sizes: bytes of each part.
    """

    def __init__(
        self, counts: Sequence[Sequence[int]], row_bytes: Sequence[int], alignment: int = 1
    ) -> None:
        self.counts = np.array(counts, dtype=np.int64).reshape(len(counts), len(row_bytes))
        sizes = self.counts * np.array(row_bytes, dtype=np.int64)
        sizes += -sizes % alignment
        ends = HEAD_BYTES + np.cumsum(sizes, axis=1)
        self._begins = ends - sizes
        self.sizes: list[int] = ends[:, -1].tolist()

    def begins(self, of_parts: Sequence[int] | None = None) -> np.ndarray:
        """int64 ``[world_size, tables]``, the byte at which each piece begins.

        Args:
            of_parts: the byte at which each part begins, one behind the other by default.
        """
        if of_parts is None:
            of_parts = [sum(self.sizes[:rank]) for rank in range(len(self.sizes))]
        return self._begins + np.array(of_parts, dtype=np.int64)[:, None]
