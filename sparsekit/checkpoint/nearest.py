"""Finds equal and nearly equal vectors in a bounded-size sample of a table's vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..tables.key_hash import mixed
from .changes import Fingerprints
from .files import PIECE

# Maximum number of vectors to compare; fewer are compared if their float32 copies would exceed
# PIECE bytes.
MOST_COMPARED = 8192
# Minimum cosine between two vectors that count as nearly equal.
NEAR = 0.999
_PAIRS = 5
_BLOCK = 256


@dataclass(frozen=True)
class Alike:
    """Vectors of a table that are equal, or point in nearly the same direction.

    Attributes:
        compared: number of vectors that were compared with one another.
        of: number of vectors that the compared ones were sampled from.
        equal: number of compared vectors that are bitwise equal to another one.
        near: number of compared vectors whose cosine with another one is at least 0.999.
        pairs: the pairs of keys with the highest cosines, at most 5, each with its cosine.
    """

    compared: int
    of: int
    equal: int
    near: int
    pairs: list[tuple[int, int, float]]


class Drawn:
    """Draws vectors from a table, piece by piece, and compares them with one another.

    It keeps the vectors whose fingerprints have the smallest hashes (a bottom-k sample). The sample
    is random, but any set of equal vectors, however small, is in it either entirely or not at all.

    Args:
        dim: number of elements in a vector.
        dtype: dtype of the vectors.
    """

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self._room = max(2, min(MOST_COMPARED, PIECE // (4 * dim)))
        self._of = 0
        self._hashes = torch.empty(0, dtype=torch.int64)
        self._keys = torch.empty(0, dtype=torch.int64)
        self._vectors = torch.empty(0, dim, dtype=dtype)

    def add(self, keys: torch.Tensor, vectors: torch.Tensor) -> None:
        """Draw from vectors ``[n, dim]``, finite and nonzero, with int64 keys ``[n]``."""
        self._of += len(keys)
        prints = Fingerprints(len(keys))
        prints.update([vectors], len(keys), np.empty(0, dtype=np.int64))
        hashes = mixed(torch.from_numpy(prints.of_rows.view(np.int64)))
        if len(self._hashes) == self._room:
            low = (hashes <= self._hashes[-1]).nonzero().squeeze(1)
            keys, vectors, hashes = keys[low], vectors[low], hashes[low]
        hashes, order = torch.cat([self._hashes, hashes]).sort(stable=True)
        order = order[: self._room]
        self._hashes = hashes[: self._room].clone()
        self._keys = torch.cat([self._keys, keys])[order]
        self._vectors = torch.cat([self._vectors, vectors])[order]

    def alike(self) -> Alike:
        """Compare the drawn vectors with one another."""
        size = len(self._keys)
        _, counts = self._hashes.unique(return_counts=True)
        near = torch.zeros(size, dtype=torch.bool)
        pairs: list[tuple[float, int, int]] = []
        directions = torch.cat([_directions(part) for part in self._vectors.split(_BLOCK)])
        # One-element vectors all point in one of two directions.
        for begin in range(0, size if directions.shape[1] > 1 else 0, _BLOCK):
            rows = torch.arange(begin, min(begin + _BLOCK, size))
            cosines = directions[rows] @ directions.T
            cosines.masked_fill_(torch.arange(size) <= rows[:, None], -2)  # each pair counts once
            found = cosines >= NEAR
            near[rows] |= found.any(1)
            near |= found.any(0)
            best = cosines.flatten().topk(min(_PAIRS, cosines.numel()))
            for cosine, at in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if cosine > -2:
                    pairs.append((min(cosine, 1.0), begin + at // size, at % size))
        pairs = sorted(pairs, key=lambda pair: -pair[0])[:_PAIRS]
        return Alike(
            compared=size,
            of=self._of,
            equal=int(counts[counts > 1].sum()),
            near=int(near.sum()),
            pairs=[(int(self._keys[a]), int(self._keys[b]), cosine) for cosine, a, b in pairs],
        )


def _directions(vectors: torch.Tensor) -> torch.Tensor:
    """Normalize vectors ``[n, dim]``, none of them 0; the result is float32."""
    vectors = vectors.double()
    # The square of a float64 may overflow or underflow.
    vectors = vectors / vectors.abs().amax(1, keepdim=True)
    return torch.nn.functional.normalize(vectors, dim=1).float()
