"""Reads reviews of items by users, and makes documents from them for text models."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .._content import lines_of
from ..errors import DataFormatError
from .ratings import Ratings

__all__ = [
    "Corpus",
    "Documents",
    "Reviews",
    "Vocabulary",
    "generated_reviews",
    "read_reviews",
    "reviews_of_films",
    "split_reviews",
    "words_of",
]

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
# Numbers that stand for padding and for words outside the vocabulary.
PADDING, UNKNOWN = 0, 1
# Fields in Amazon's review files: for each field's name up to the 2018 edition, its name in the
# 2023 edition and its type.
FIELDS: dict[str, tuple[str, Any]] = {
    "reviewerID": ("user_id", str),
    "asin": ("asin", str),
    "overall": ("rating", (int, float)),
    "reviewText": ("text", str),
    "unixReviewTime": ("timestamp", (int, float)),
}
MISSING = {"reviewText": "", "unixReviewTime": None}


def words_of(text: str) -> list[str]:
    """Split a string into words, and convert them to lower case."""
    return WORD.findall(text.lower())


@dataclass(frozen=True, eq=False)
class Reviews:
    """n reviews of items by users.

    Attributes:
        ratings: users, items, ratings and times ``[n]``; see `Ratings`.
        texts: for each review, the words that it adds to the user's document.
        of_items: for each review, the words that it adds to the item's document; None if they are
            the same as in ``texts``.
        descriptions: for each item, the words at the beginning of the item's document, which belong
            to no author.
    """

    ratings: Ratings
    texts: list[list[str]]
    of_items: list[list[str]] | None = None
    descriptions: Mapping[int, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: torch.Tensor) -> Reviews:
        """Select reviews by their positions, an int64 tensor."""
        at = index.tolist()
        return Reviews(
            self.ratings[index],
            [self.texts[i] for i in at],
            None if self.of_items is None else [self.of_items[i] for i in at],
            self.descriptions,
        )


def split_reviews(ratings: Ratings, test_fraction: float = 0.2) -> tuple[torch.Tensor, ...]:
    """Split ratings into a training and a test part; return the int64 positions of each.

    The test part contains each user's latest reviews, as in `Ratings.split_by_time`. If a user has
    reviewed an item several times, only the latest review is used, so no pair of user and item is
    in both parts.

    Raises:
        ValueError: test_fraction is not in [0, 1).
    """
    order = ratings.timestamps.argsort(stable=True).tolist()
    pairs = list(zip(ratings.users.tolist(), ratings.items.tolist(), strict=True))
    latest = torch.tensor(sorted({pairs[i]: i for i in order}.values()), dtype=torch.int64)
    # Replace each rating with its index in `latest`, so that the split yields indices.
    once = ratings[latest]
    marked = Ratings(once.users, once.items, torch.arange(len(once)), once.timestamps)
    train, test = marked.split_by_time(test_fraction)
    return latest[train.ratings], latest[test.ratings]


class Vocabulary:
    """Assigns numbers to words, starting with 2 for the most frequent word.

    0 stands for padding, 1 for unknown words. Equally frequent words are ordered by code points, so
    that the numbers do not depend on how Python hashes strings.

    Args:
        texts: lists of words.
        min_count: number of occurrences that a word needs to get a number.
        most: maximum number of words; the most frequent ones are kept.
    """

    def __init__(
        self, texts: Iterable[Sequence[str]], min_count: int = 2, most: int | None = None
    ) -> None:
        counts = Counter(itertools.chain.from_iterable(texts))
        frequent = [(-count, word) for word, count in counts.items() if count >= min_count]
        self.words = [word for _, word in sorted(frequent)[:most]]
        self._numbers = {word: number for number, word in enumerate(self.words, UNKNOWN + 1)}

    def __len__(self) -> int:
        """Return how many word numbers exist, including those for padding and unknown words."""
        return UNKNOWN + 1 + len(self.words)

    def __call__(self, words: Iterable[str]) -> list[int]:
        """Return the number of each word."""
        return [self._numbers.get(word, UNKNOWN) for word in words]


class Documents:
    """The documents of users or items (the owners), each made of pieces by several authors.

    Args:
        pieces: for each owner, (author, word numbers) pairs in the document's order; author -1
            means no author.
        length: number of words in a document, which is cut or padded to fit.
    """

    def __init__(self, pieces: Mapping[int, Sequence[tuple[int, list[int]]]], length: int) -> None:
        self.length = length
        owners = sorted(pieces)
        words, authors, counts = [], [], []
        for owner in owners:
            of_author: Counter[int] = Counter()
            for author, piece in pieces[owner]:
                of_author[author] += len(piece)
            # Keep enough words to fill a document no matter which author is left out.
            most = length + max(of_author.values(), default=0)
            flat = [(word, a) for a, piece in pieces[owner] for word in piece][:most]
            words += [word for word, _ in flat]
            authors += [author for _, author in flat]
            counts.append(len(flat))
        self.owners = torch.tensor(owners, dtype=torch.int64)
        self.starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int64)
        self.words = torch.tensor(words, dtype=torch.int64)
        self.authors = torch.tensor(authors, dtype=torch.int64)

    def __call__(self, owners: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
        """Return the owners' documents, int64 ``[n, length]``, each without one author's words.

        Args:
            owners: int64 ``[n]``; the document of an unknown owner is all padding.
            without: author to leave out of each document, int64 ``[n]``.
        """
        result = torch.full((len(owners), self.length), PADDING)
        if len(self.owners) == 0:
            return result
        at = torch.searchsorted(self.owners, owners).clamp(max=len(self.owners) - 1)
        counts = torch.where(self.owners[at] == owners, self.starts[at + 1] - self.starts[at], 0)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        row = torch.repeat_interleave(torch.arange(len(owners)), counts)
        source = self.starts[at][row] + torch.arange(len(row)) - offsets[row]
        keep = self.authors[source] != without[row]
        # Number of words kept before each word, over all documents; the next line subtracts those
        # kept before the word's own document begins.
        before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
        place = before[:-1] - before[offsets[row]]
        keep &= place < self.length
        result[row[keep], place[keep]] = self.words[source[keep]]
        return result


class Corpus:
    """The documents of users and items, made from the training part of the reviews.

    A user's document consists of the user's reviews, the latest first. An item's document consists
    of its description, if any, and its reviews. For predicting a user's rating of an item, both
    documents leave out that user's review of that item.

    Args:
        train: training part of the reviews; must not contain reviews to be predicted.
        length: number of words in a document.
        min_count: a word with fewer occurrences is treated as unknown.
    """

    def __init__(self, train: Reviews, length: int = 800, min_count: int = 2) -> None:
        self.vocabulary = Vocabulary(train.texts, min_count)
        number = self.vocabulary
        of_users: dict[int, list[tuple[int, list[int]]]] = {}
        of_items = {item: [(-1, number(text))] for item, text in train.descriptions.items()}
        written = train.texts if train.of_items is None else train.of_items
        users, items = train.ratings.users.tolist(), train.ratings.items.tolist()
        for i in train.ratings.timestamps.argsort(stable=True).flip(0).tolist():
            of_users.setdefault(users[i], []).append((items[i], number(train.texts[i])))
            of_items.setdefault(items[i], []).append((users[i], number(written[i])))
        self.users = Documents(of_users, length)
        self.items = Documents(of_items, length)

    def __call__(
        self, users: torch.Tensor, items: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the documents of users and of items, int64 ``[n, length]``, for pairs of ids."""
        return self.users(users, without=items), self.items(items, without=users)


def reviews_of_films(train: Ratings, films: Mapping[int, list[str]]) -> Reviews:
    """Turn ratings into reviews, for data without text, such as MovieLens.

    A rating adds the film's words to the user's document. To the film's document, it adds the words
    of the film that the user rated just before, or just after if this rating is the user's first.
    The film's own words, already at the start of its document, would be the same for all ratings.
    """
    order, _, _, from_end = train.by_user()
    items = train.items.tolist()
    texts = [films.get(item, []) for item in items]
    others: list[list[str]] = [[]] * len(train)
    places, ends = order.tolist(), from_end.tolist()
    for k, i in enumerate(places):
        first = ends[k - 1] == 1  # right for k = 0 too, since the very last rating is a user's last
        if not first or ends[k] > 1:
            others[i] = texts[places[k + 1 if first else k - 1]]
    return Reviews(train, texts, others, films)


def read_reviews(path: str | os.PathLike[str]) -> Reviews:
    """Read reviews from a file of JSON lines in Amazon's format.

    Each line is an object with the strings ``reviewerID`` and ``asin``, the rating ``overall``, and
    optionally ``reviewText`` and ``unixReviewTime``. In the 2023 edition, the names are
    ``user_id``, ``asin``, ``rating``, ``text`` and ``timestamp``. A review without text has no
    words. A review without a time gets the time of the previous review. Users and items are
    numbered from 0, in the order of their names. The file may be compressed by gzip, bzip2 or xz,
    or be a pipe.

    Raises:
        DataFormatError: a line is malformed (the message gives its number), there are no lines, or
            the first bytes are not text.
        OSError: the file cannot be read.
    """
    source = os.fspath(path)
    rows: list[tuple[str, str, float, list[str], float]] = []
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_review(line, rows[-1][-1] if rows else 0.0))
        except (ValueError, OverflowError, RecursionError) as error:
            raise DataFormatError(f"{source}:{number}: {error}") from None
    if not rows:
        raise DataFormatError(f"{source}: no reviews")
    users, items, stars, texts, times = zip(*rows, strict=True)
    return Reviews(
        Ratings(
            _numbered(users),
            _numbered(items),
            torch.tensor(stars, dtype=torch.float32),
            torch.tensor(times, dtype=torch.float64),
        ),
        list(texts),
    )


def _review(line: str, before: float) -> tuple[str, str, float, list[str], float]:
    """Parse a line; return user, item, rating, words and time (``before`` if it has no time)."""
    review = json.loads(line)
    if not isinstance(review, dict):
        raise ValueError(f"must be an object, is {line[:40]!r}")
    values: dict[str, Any] = {}
    for name, (other, kind) in FIELDS.items():
        value = review.get(name, review.get(other))
        if value is None and name in MISSING:
            value = MISSING[name]
        elif not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} is {repr(value)[:40]}")
        values[name] = value
    stars = float(values["overall"])
    time = before if values["unixReviewTime"] is None else float(values["unixReviewTime"])
    if not (abs(stars) < 1e6 and abs(time) < 1e300):  # also true if one of them is nan
        raise ValueError(f"overall is {stars}, unixReviewTime is {time}")
    return values["reviewerID"], values["asin"], stars, words_of(values["reviewText"]), time


def _numbered(names: Sequence[str]) -> torch.Tensor:
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.int64)


def generated_reviews(
    users: int = 30, items: int = 20, each: int = 8, words: int = 12, seed: int = 0
) -> Reviews:
    """Generate reviews for tests; one good or bad word in each determines its rating, 1 to 5.

    Each review also has a unique word, ``of{user}x{item}``.

    Args:
        users: number of users; each has a bias.
        items: number of items, at least ``each``; each has a bias.
        each: number of reviews by each user, all of different items.
        words: number of words in a review.
        seed: seed of all random draws.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    generous = torch.randn(users, generator=generator, device="cpu")
    quality = torch.randn(items, generator=generator, device="cpu")
    pairs, stars, texts = [], [], []
    for user in range(users):
        for item in torch.randperm(items, generator=generator, device="cpu")[:each].tolist():
            score = int((3 + generous[user] + quality[item]).round().clamp(1, 5))
            filler = torch.randint(40, (words - 2,), generator=generator, device="cpu").tolist()
            pairs.append((user, item))
            stars.append(float(score))
            texts.append([f"of{user}x{item}", f"stars{score}", *(f"word{w}" for w in filler)])
    ids = torch.tensor(pairs, dtype=torch.int64)
    times = torch.arange(len(pairs), dtype=torch.float64)
    return Reviews(Ratings(ids[:, 0], ids[:, 1], torch.tensor(stars), times), texts)
