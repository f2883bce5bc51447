"""Defines the layout of messages between ranks.

A message has a part for each rank. A part begins with a head: the hash of the plan, then 1 if there
is an error, else 0. The head is followed by arrays of rows, or by a piece for each table, as
`Layout` describes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

_HEAD_BYTES = 16

# Alignment in bytes of each table's vectors in a part.
ALIGNMENT = 16


class Parts(NamedTuple):
    """Parts to send to all ranks, or received from them, as byte ranges in one buffer."""

    data: torch.Tensor  # uint8, the buffer that contains all parts
    begins: list[int]  # byte offset of each rank's part, including its head
    words: np.ndarray = np.empty((0, 0), np.int64)  # shape [world_size - 1, n]; see `Exchange.send`

    def payload(self, rank: int, size: int) -> torch.Tensor:
        """Return the first `size` bytes after the head of a rank's part."""
        begin = self.begins[rank] + _HEAD_BYTES
        return self.data[begin : begin + size]


def padded(size: int) -> int:
    """Round up to a multiple of 16 bytes, so that the next array can be viewed as any dtype."""
    return (size + 15) // 16 * 16


def part_bytes(payload: int) -> int:
    """Return the size in bytes of a part, given the size of its payload."""
    return _HEAD_BYTES + padded(payload)


def write_heads(data: torch.Tensor, begins: Sequence[int], head: Sequence[int]) -> None:
    """Write the same head to the parts at these byte offsets."""
    words, firsts = data.view(torch.int64), [begin // 8 for begin in begins]
    if data.is_cpu:
        of_host = words.numpy()  # ten times as fast as torch
        for first in firsts:
            of_host[first : first + len(head)] = head
        return
    # Each kernel fills one word of the head, in all parts if they are evenly spaced, otherwise in a
    # single part. Assigning a list would copy from the host, and wait.
    steps = {second - first for first, second in itertools.pairwise(firsts)}
    if len(steps) == 1:
        words = words[firsts[0] :].as_strided((len(firsts), len(head)), (steps.pop(), 1))
        places = [(words[:, i], value) for i, value in enumerate(head)]
    else:
        places = [(words[first + i], value) for first in firsts for i, value in enumerate(head)]
    for place, value in places:
        place.fill_(value)


def heads_of(data: torch.Tensor, begins: Sequence[int], words: int = 0) -> torch.Tensor:
    """Return each part's head and the words after it, as int64 ``[parts, 2 + words]``."""
    size = _HEAD_BYTES // 8 + words
    # Copy everything in one go, since each read from a device waits for the device.
    heads = [data.view(torch.int64)[begin // 8 : begin // 8 + size] for begin in begins]
    return torch.stack(heads) if heads else data.new_empty(0, size, dtype=torch.int64)


class Layout:
    """Positions of rows in the parts of a message: a part has a head, then a piece for each table.

    Args:
        counts: int64 ``[world_size, tables]``, number of rows in each piece.
        row_bytes: for each table, size of a row in bytes.
        alignment: the size of each piece is rounded up to a multiple of this number of bytes.
        words: number of int64 words between the head and the pieces.

    Attributes:
        counts: as given.
        sizes: size of each part in bytes.
    """

    def __init__(
        self, counts: np.ndarray, row_bytes: Sequence[int], alignment: int = 1, words: int = 0
    ) -> None:
        self.counts = counts
        sizes = counts * np.array(row_bytes, dtype=np.int64)
        if alignment > 1:
            sizes += -sizes % alignment
        # int64 [world_size, 1 + tables], byte offsets of the pieces' bounds within a part.
        self._bounds = np.empty((len(counts), 1 + len(row_bytes)), dtype=np.int64)
        self._bounds[:, 0] = 0
        np.cumsum(sizes, axis=1, out=self._bounds[:, 1:])
        self._bounds += part_bytes(8 * words)
        self.sizes: list[int] = self._bounds[:, -1].tolist()

    def payloads(self, parts: Parts) -> tuple[list[torch.Tensor], np.ndarray]:
        """Return the payload of each part, and each piece's offset within its payload.

        Returns:
            uint8 tensors, one for each rank, and offsets, int64 ``[world_size, tables]``.
        """
        of_ranks = [
            parts.data[begin + _HEAD_BYTES : begin + size]
            for begin, size in zip(parts.begins, self.sizes, strict=True)
        ]
        return of_ranks, self._bounds[:, :-1] - _HEAD_BYTES

    def begins(self, of_parts: Sequence[int]) -> np.ndarray:
        """Return the byte offset of each piece, int64 ``[world_size, tables]``.

        Args:
            of_parts: the byte offset of each part.
        """
        return self._bounds[:, :-1] + np.array(of_parts, dtype=np.int64)[:, None]

    def ranges(self, of_parts: Sequence[int], columns: slice) -> list[tuple[int, int]]:
        """Return, for each part, the byte range of the pieces for these tables.

        Args:
            of_parts: the byte offset of each part.
            columns: the tables, which are consecutive.
        """
        firsts, ends = (self._bounds[:, edge].tolist() for edge in (columns.start, columns.stop))
        each = zip(of_parts, firsts, ends, strict=True)
        return [(begin + first, begin + end) for begin, first, end in each]


def pack(to: Parts, arrays: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> None:
    """Write several arrays of rows to the parts for all ranks, array by array after the heads.

    Args:
        to: the parts to write to.
        arrays: ``[n_t, dim_t]`` or ``[n_t]`` of any dtypes; the rows for rank 0 first.
        counts: for each array, the number of rows for each rank.
    """
    rest = [array.contiguous().view(-1).view(torch.uint8) for array in arrays]
    for pieces in _pieces(to, arrays, counts):
        for t, piece in enumerate(pieces):
            piece.copy_(rest[t][: len(piece)])
            rest[t] = rest[t][len(piece) :]


def packed_sizes(like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> list[int]:
    """Return the size in bytes of each part that `pack` writes; arguments are as for `unpack`."""
    sizes = [_array_bytes(array, count) for array, count in zip(like, counts, strict=True)]
    return [part_bytes(sum(map(padded, of_rank))) for of_rank in zip(*sizes, strict=True)]


def unpack(
    come: Parts, like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Undo `pack` on the receiving rank: return the arrays, with rows from rank 0 first.

    Args:
        come: the parts received from all ranks.
        like: for each array, a tensor with its dtype and row shape.
        counts: for each array, the number of rows from each rank.
    """
    of_arrays = zip(*_pieces(come, like, counts), strict=True)
    return [
        torch.cat(pieces).view(array.dtype).view(sum(count), *array.shape[1:])
        for pieces, array, count in zip(of_arrays, like, counts, strict=True)
    ]


def _pieces(
    parts: Parts, like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> Iterator[list[torch.Tensor]]:
    """Yield, for each rank, a list with the bytes of each array."""
    sizes = [_array_bytes(array, count) for array, count in zip(like, counts, strict=True)]
    for begin, of_rank in zip(parts.begins, zip(*sizes, strict=True), strict=True):
        at, pieces = begin + _HEAD_BYTES, []
        for size in of_rank:
            pieces.append(parts.data[at : at + size])
            at += padded(size)
        yield pieces


def _array_bytes(array: torch.Tensor, counts: Sequence[int]) -> list[int]:
    row = array.element_size() * math.prod(array.shape[1:])
    return [count * row for count in counts]


class RaggedBags(NamedTuple):
    """Bags for one table, as the by-bag route sends them."""

    counts: torch.Tensor  # int64 [bags], number of keys in each bag
    keys: torch.Tensor  # keys of all bags, int64 [n]
    weights: torch.Tensor | None  # sample weights, shape [n]


def bags_bytes(bags: Sequence[tuple[int, int, int]]) -> int:
    """Return a part's size in bytes, given each table's numbers of (bags, keys, weight bytes)."""
    arrays = [24 * len(bags)]
    for count, keys, weights in bags:
        arrays += [8 * count, 8 * keys, weights]
    return part_bytes(sum(map(padded, arrays)))


def write_bags(to: Parts, bags: Sequence[RaggedBags]) -> None:
    """Write each table's bags to the parts for all ranks; every rank gets the same bags."""
    heads = [[len(one.counts), len(one.keys), int(one.weights is not None)] for one in bags]
    arrays = [torch.tensor(heads, device="cpu").to(bags[0].keys.device)]
    for one in bags:
        arrays += [array for array in one if array is not None]
    write_to_all(to, arrays)


def write_to_all(to: Parts, arrays: Sequence[torch.Tensor]) -> None:
    """Write the same arrays to the parts for all ranks."""
    for begin in to.begins:
        pack(Parts(to.data, [begin]), arrays, [[len(array)] for array in arrays])


def read_bags_of(come: Parts, rank: int, weight_dtypes: Sequence[torch.dtype]) -> list[RaggedBags]:
    """Return each table's bags from a rank that wrote them with `write_bags`.

    Args:
        come: the parts received from all ranks.
        rank: the rank that sent the bags.
        weight_dtypes: dtype of each table's sample weights, if there are any.
    """
    tables = len(weight_dtypes)
    heads = come.payload(rank, 24 * tables).view(torch.int64).view(tables, 3)
    words = heads.new_empty(0)
    like, counts = [heads], [[tables]]
    of_tables = heads.tolist()
    for dtype, (num_bags, num_keys, weighted) in zip(weight_dtypes, of_tables, strict=True):
        like += [words, words]
        counts += [[num_bags], [num_keys]]
        if weighted:
            like.append(words.new_empty(0, dtype=dtype))
            counts.append([num_keys])
    arrays = iter(unpack(Parts(come.data, [come.begins[rank]]), like, counts)[1:])
    return [
        RaggedBags(next(arrays), next(arrays), next(arrays) if weighted else None)
        for _, _, weighted in of_tables
    ]
