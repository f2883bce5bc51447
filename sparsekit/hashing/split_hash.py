"""Encodes categorical features as columns of a wide, sparse matrix, by feature hashing."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .._extras import needed
from ..errors import check_int
from .values import checked_seed, xxh64

__all__ = ["Collisions", "SplitHashEncoder"]

_NAME = "SplitHashEncoder"
_SHIFTS = (48, 32, 16, 0)
# Maximum number of values for a feature. With more, 16 bits could not address a block's columns.
_MOST_VALUES = 2**32
# 2**64 / golden ratio, as a signed integer: an odd number with an irregular bit pattern.
_MIX = 0x9E3779B97F4A7C15 - 2**64


@dataclass(frozen=True)
class Collisions:
    """Counts a feature's collisions: distinct values that get the same columns as another value."""

    feature: str
    values: int  # number of distinct values, compared by their 64-bit hashes
    codes: int  # number of distinct sets of columns
    expected: float  # expected number of collisions if all sets of columns are equally likely

    @property
    def observed(self) -> int:
        """Return the number of collisions in the data."""
        return self.values - self.codes


class SplitHashEncoder:
    """Encodes rows of categorical features as rows of a sparse matrix by hashing.

    No fitting is needed. A feature with up to L values has ``bucket = max(32, 4 * ceil(sqrt(L)))``
    columns. The features' columns follow one another in the order of `feature_lengths`. A value is
    hashed to ``h = xxh64(value, salt)``; see `sparsekit.hashing.xxh64`, which treats 3 like "3",
    and None like "".

    - ``splits=4``: the columns form four blocks of ``w = bucket / 4`` columns. Block k has a 1 in
      its column ``((h >> (48 - 16 * k)) & 0xFFFF) % w``. Two values collide only if they share the
      columns in all four blocks.
    - ``splits=1``, one-hot: there is a single 1, in column ``h % bucket``.

    Each row has exactly ``splits * len(feature_lengths)`` entries. The columns of a value depend
    only on the value and on the feature's length, position and salt.

    Args:
        feature_lengths: The expected number of distinct values of each feature, by name, in
            ``[1, 2**32]``. If there are more values, collisions become more frequent.
        splits: 4 or 1.
        salts: Hash seeds, in ``[0, 2**64)``, by feature; 0 for features not named.
        signed: Whether some entries are -1.0, so that collisions cancel on average, as in
            scikit-learn's ``FeatureHasher``. If False, all entries are 1.0. Entry k of a value is
            negative if bit ``63 - k`` of ``(h ^ (h >> 32)) * 0x9E3779B97F4A7C15 % 2**64`` is set.

    Raises:
        TypeError, ValueError: a setting is out of range; the message names it.

    Example:
        >>> encoder = SplitHashEncoder({"day": 7, "item": 100_000})
        >>> encoder.width
        1300
        >>> keys, offsets = encoder.encode({"day": [3], "item": ["item_42"]}, to="bags")
        >>> keys
        tensor([  6,  10,  22,  28, 341, 504, 791, 988])

    """

    def __init__(
        self,
        feature_lengths: Mapping[str, int],
        splits: int = 4,
        *,
        salts: Mapping[str, int] | None = None,
        signed: bool = False,
    ) -> None:
        if not isinstance(feature_lengths, Mapping) or not feature_lengths:
            raise ValueError(
                f"{_NAME}: feature_lengths must map the name of each feature to its number of "
                f"values, got {feature_lengths!r}"
            )
        if splits not in (4, 1):
            raise ValueError(f"{_NAME}: splits must be 4, or 1 for one-hot; got {splits!r}")
        salts = salts or {}
        if strangers := [name for name in salts if name not in feature_lengths]:
            raise ValueError(f"{_NAME}: salts names {strangers}, which feature_lengths lacks")
        self.feature_lengths = {
            name: check_int(_NAME, f"feature_lengths[{name!r}]", n, 1, _MOST_VALUES)
            for name, n in feature_lengths.items()
        }
        self.splits = splits
        self.salts = {name: _salt(name, salts.get(name, 0)) for name in feature_lengths}
        self.signed = bool(signed)
        # Each feature's number of columns (square roots are rounded up), and its first column.
        lengths = self.feature_lengths.items()
        self.buckets = {name: max(32, 4 * (math.isqrt(n - 1) + 1)) for name, n in lengths}
        *starts, self.width = itertools.accumulate(self.buckets.values(), initial=0)
        self.starts = dict(zip(self.buckets, starts, strict=True))

    @property
    def row_nnz(self) -> int:
        """Return the number of entries in each row."""
        return self.splits * len(self.feature_lengths)

    def encode(self, columns: Any, to: Literal["torch", "scipy", "bags"] = "torch") -> Any:
        """Encode a table's rows as a sparse matrix.

        Args:
            columns: A dict, pyarrow Table or DataFrame that has n values for each feature, in any
                form that `xxh64` accepts. Columns that are not features are ignored.
            to: Form of the result.

                - ``"torch"``: a torch CSR tensor, float32 ``[n, width]``;
                - ``"scipy"``: a ``scipy.sparse.csr_array`` of the same matrix;
                - ``"bags"``: keys int64 ``[n * row_nnz]`` and offsets int64 ``[n + 1]``, with each
                  row as a bag of columns. Bags cannot represent signs.

        Returns:
            The rows, with columns in ascending order. Sparsekit's layers accept all three forms.

        Raises:
            TypeError, ValueError: a column is missing, is refused by `xxh64`, or differs in length
                from the first column; bags are requested from a signed encoder; or `to` is unknown.
            ImportError: scipy is not installed.
        """
        if to not in ("torch", "scipy", "bags"):
            raise ValueError(f"{_NAME}: to must be 'torch', 'scipy' or 'bags', got {to!r}")
        if to == "bags" and self.signed:
            raise ValueError(f"{_NAME}: bags have no place for signs; use to='torch' or 'scipy'")
        hashes = self._hashes(columns)
        n = len(next(iter(hashes.values())))
        keys = torch.cat([self._columns(name, h) for name, h in hashes.items()], 1).view(-1)
        offsets = torch.arange(n + 1, device=keys.device) * self.row_nnz
        if to == "bags":
            return keys, offsets
        if self.signed:
            entries = torch.cat([self._signs(h) for h in hashes.values()], 1).view(-1)
        else:
            entries = torch.ones(len(keys), device=keys.device)
        shape = n, self.width
        if to == "scipy":
            return _scipy_csr(entries, keys, offsets, shape)
        return torch.sparse_csr_tensor(offsets, keys, entries, shape, check_invariants=False)

    def collisions(self, columns: Any) -> list[Collisions]:
        """Count the collisions between the distinct values of each feature.

        Args:
            columns: see `encode`.
        """
        report = []
        for name, hashes in self._hashes(columns).items():
            distinct = hashes.unique()
            block = self.buckets[name] // self.splits
            # Combine the columns of a value into one integer, which differs for different columns,
            # even if it wraps around to a negative number.
            places = [block**k for k in range(self.splits)]
            codes = (self._in_blocks(name, distinct) * hashes.new_tensor(places)).sum(1).unique()
            values, sets = len(distinct), block**self.splits
            # Compute values - sets * (1 - (1 - 1 / sets) ** values) without losing digits.
            expected = values + sets * math.expm1(values * math.log1p(-1 / sets))
            report.append(Collisions(name, values, len(codes), expected))
        return report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as JSON; an encoder has no other state."""
        features = [
            {"name": name, "length": length, "salt": self.salts[name]}
            for name, length in self.feature_lengths.items()
        ]
        settings = {"format": _NAME, "version": 1, "splits": self.splits, "signed": self.signed}
        text = json.dumps({**settings, "features": features}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], feature_lengths: Mapping[str, int] | None = None
    ) -> SplitHashEncoder:
        """Load an encoder written by `save`.

        Args:
            path: the file.
            feature_lengths: The lengths that the file must have; None accepts any. Other
                lengths map values to other columns, which do not fit the trained weights.

        Raises:
            ValueError: the file does not contain an encoder, or its features differ from the
                expected ones in name, order or length.
        """
        try:
            saved = json.loads(Path(path).read_bytes())
            if (saved["format"], saved["version"]) != (_NAME, 1):
                raise ValueError("another format or version")
            lengths = {one["name"]: one["length"] for one in saved["features"]}
            salts = {one["name"]: one["salt"] for one in saved["features"]}
            encoder = cls(lengths, saved["splits"], salts=salts, signed=saved["signed"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not what {_NAME}.save has written ({error})") from error
        if feature_lengths is not None:
            check_same_features(str(path), encoder.feature_lengths, dict(feature_lengths))
        return encoder

    def __repr__(self) -> str:
        return f"{_NAME}({self.feature_lengths}, splits={self.splits}, signed={self.signed})"

    def _hashes(self, columns: Any) -> dict[str, torch.Tensor]:
        """Return the hashes of each feature's values, int64 [n], by name."""
        hashes: dict[str, torch.Tensor] = {}
        for name, salt in self.salts.items():
            try:
                column = columns[name]
            except KeyError:
                raise ValueError(f"{_NAME}: columns has no column {name!r}") from None
            try:
                hashes[name] = xxh64(column, salt)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{_NAME}: feature {name!r}: {error}") from error
            first = next(iter(hashes))
            if len(hashes[name]) != len(hashes[first]):
                raise ValueError(
                    f"{_NAME}: feature {name!r} has {len(hashes[name])} values, but {first!r} has "
                    f"{len(hashes[first])}"
                )
        return hashes

    def _columns(self, name: str, hashes: torch.Tensor) -> torch.Tensor:
        """Return the columns of each value, int64 [n, splits], in ascending order."""
        block = self.buckets[name] // self.splits
        blocks = torch.arange(self.splits, device=hashes.device) * block + self.starts[name]
        return self._in_blocks(name, hashes).add_(blocks)

    def _in_blocks(self, name: str, hashes: torch.Tensor) -> torch.Tensor:
        """Return the column of each entry within its block, int64 [n, splits]."""
        block = self.buckets[name] // self.splits
        if self.splits == 1:
            # The hash is unsigned: add 2**64 to hashes that int64 represents as negative numbers.
            columns = hashes.remainder(block) + (hashes < 0) * (2**64 % block)
            return columns.remainder_(block).view(-1, 1)
        chunks = hashes.view(-1, 1) >> hashes.new_tensor(_SHIFTS)
        return chunks.bitwise_and_(0xFFFF).remainder_(block)

    def _signs(self, hashes: torch.Tensor) -> torch.Tensor:
        """Return signs 1.0 or -1.0, float32 [n, splits]."""
        mixed = (hashes ^ (hashes >> 32 & 0xFFFFFFFF)) * _MIX
        bits = mixed.view(-1, 1) >> torch.arange(63, 63 - self.splits, -1, device=hashes.device)
        return 1.0 - 2.0 * (bits & 1)


def _salt(name: str, salt: int) -> int:
    try:
        return checked_seed(salt)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_NAME}: salts[{name!r}]: {error}") from None


def check_same_features(path: str, saved: dict[str, int], asked: dict[str, int]) -> None:
    """Raise ValueError unless a file has the expected features, given as lengths by name."""
    if list(saved) != list(asked):
        raise ValueError(
            f"{path}: {_NAME} was saved with the features {list(saved)}, in this order, but "
            f"feature_lengths has {list(asked)}"
        )
    for name, length in saved.items():
        if length != asked[name]:
            raise ValueError(
                f"{path}: feature {name!r} was saved with length {length}, but feature_lengths "
                f"has {asked[name]}"
            )


def _scipy_csr(
    entries: torch.Tensor, keys: torch.Tensor, offsets: torch.Tensor, shape: tuple[int, int]
) -> Any:
    sparse = needed("scipy.sparse", f"{_NAME}: to='scipy'")
    # Use 32-bit indices if they suffice, as scipy does.
    small = max(shape[1], len(keys)) < 2**31
    index = torch.int32 if small else torch.int64
    parts = (part.cpu().numpy() for part in (entries, keys.to(index), offsets.to(index)))
    matrix = sparse.csr_array(tuple(parts), shape)
    matrix.has_canonical_format = True  # indices are sorted, so scipy need not check
    return matrix
