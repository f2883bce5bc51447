"""Several arrays of rows in one part for each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from .exchange import HEAD_BYTES, Parts, padded


def pack(to: Parts, arrays: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> None:
    """Write several arrays of rows to the parts for the ranks, array by array behind the heads.

    Args:
        to: what is written to.
        arrays: ``[n_t, dim_t]`` or ``[n_t]`` of any dtypes; the rows for rank 0 first.
        counts: of each array, its rows for each rank.
    """
    rest = [array.contiguous().view(-1).view(torch.uint8) for array in arrays]
    for pieces in _pieces(to, arrays, counts):
        for t, piece in enumerate(pieces):
            piece.copy_(rest[t][: len(piece)])
            rest[t] = rest[t][len(piece) :]


def packed_sizes(like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> list[int]:
    """The bytes for, or from, each rank of what `pack` writes; see there and `unpack`."""
    sizes = [_array_bytes(array, count) for array, count in zip(like, counts, strict=True)]
    return [HEAD_BYTES + sum(map(padded, of_rank)) for of_rank in zip(*sizes, strict=True)]


def unpack(
    come: Parts, like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Undo `pack` at the receiver: arrays of rows, rank 0's first.

    Args:
        come: what the ranks have sent.
        like: for each array, a tensor of its dtype and row shape.
        counts: for each array, its rows from each rank.
    """
    of_arrays = zip(*_pieces(come, like, counts), strict=True)
    return [
        torch.cat(pieces).view(array.dtype).view(sum(count), *array.shape[1:])
        for pieces, array, count in zip(of_arrays, like, counts, strict=True)
    ]


def _pieces(
    parts: Parts, like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> Iterator[list[torch.Tensor]]:
    """For each rank, the bytes of each array."""
    sizes = [_array_bytes(array, count) for array, count in zip(like, counts, strict=True)]
    for begin, of_rank in zip(parts.begins, zip(*sizes, strict=True), strict=True):
        at, pieces = begin + HEAD_BYTES, []
        for size in of_rank:
            pieces.append(parts.data[at : at + size])
            at += padded(size)
        yield pieces


def _array_bytes(array: torch.Tensor, counts: Sequence[int]) -> list[int]:
    row = array.element_size() * math.prod(array.shape[1:])
    return [count * row for count in counts]
