"""Several arrays of rows in one part for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .exchange import HEAD_BYTES, Come, padded


def pack(
    parts: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """Bytes to send to each rank, from several arrays of rows.

    Args:
        parts: ``[n_t, dim_t]`` or ``[n_t]`` of any dtypes, contiguous; the rows for rank 0 first.
        counts: for each part, its rows for each rank.

    Returns:
        uint8 ``[total]``, rank by rank and for each rank its head and part by part, and the bytes
        of each rank.
    """
    raw = [part.reshape(-1).view(torch.uint8) for part in parts]
    sizes = [_part_bytes(part, count) for part, count in zip(parts, counts, strict=True)]
    pieces = [part.split(size) for part, size in zip(raw, sizes, strict=True)]
    flat = []
    for rank, of_rank in enumerate(zip(*sizes, strict=True)):
        flat.append(raw[0].new_zeros(HEAD_BYTES))
        for part, size in enumerate(of_rank):
            flat.append(pieces[part][rank])
            flat.append(raw[part].new_zeros(padded(size) - size))
    return torch.cat(flat), packed_sizes(parts, counts)


def packed_sizes(like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> list[int]:
    """The bytes for, or from, each rank of what `pack` makes; see there and `unpack`."""
    sizes = [_part_bytes(part, count) for part, count in zip(like, counts, strict=True)]
    return [HEAD_BYTES + sum(map(padded, of_rank)) for of_rank in zip(*sizes, strict=True)]


def unpack(
    come: Come, like: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Undo `pack` at the receiver: arrays of rows, rank 0's first.

    Args:
        come: what the ranks have sent.
        like: for each part, a tensor of its dtype and row shape.
        counts: for each part, its rows from each rank.
    """
    sizes = [_part_bytes(part, count) for part, count in zip(like, counts, strict=True)]
    pieces: list[list[torch.Tensor]] = [[] for _ in like]
    for begin, of_rank in zip(come.begins, zip(*sizes, strict=True), strict=True):
        at = begin + HEAD_BYTES
        for part, size in enumerate(of_rank):
            pieces[part].append(come.data[at : at + size])
            at += padded(size)
    return [
        torch.cat(piece).view(part.dtype).view(sum(count), *part.shape[1:])
        for piece, part, count in zip(pieces, like, counts, strict=True)
    ]


def _part_bytes(part: torch.Tensor, counts: Sequence[int]) -> list[int]:
    row = part.element_size() * math.prod(part.shape[1:])
    return [count * row for count in counts]
