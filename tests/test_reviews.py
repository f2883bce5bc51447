"""The right fields are read from each line of a file of reviews in Amazon's format."""

import gzip
import json
import math

import pytest
import torch

from sparsekit.datasets.reviews import read_reviews, split_reviews, words_of
from sparsekit.errors import DataFormatError

NAMES = ("reviewerID", "asin", "overall", "reviewText", "unixReviewTime")
NEW_NAMES = ("user_id", "asin", "rating", "text", "timestamp")


def read(folder, rows, names=NAMES, pack=bytes):
    """Write the rows to a file of reviews and read it; a value of ... leaves the field out."""
    lines = [
        json.dumps({n: value for n, value in zip(names, row, strict=False) if value is not ...})
        for row in rows
    ]
    path = folder / "reviews.json"
    path.write_bytes(pack("\n".join(lines).encode()))
    return read_reviews(path)


def test_words():
    text = "Don't shout: it's_a 3D-film, 'Ça va' rock'n'roll."
    expected = ["don't", "shout", "it's", "a", "3d", "film", "ça", "va", "rock'n'roll"]
    assert words_of(text) == expected


@pytest.mark.parametrize("names", [NAMES, NEW_NAMES])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_each_field_is_in_its_place(tmp_path, names, pack):
    """Users and items are numbered in the order of their names, not in line order."""
    rows = [("b", "y", 4, "Good, GOOD film's", 7), ("a", "z", 2.5, "", 5), ("b", "x", 1, "é 2", 6)]
    reviews = read(tmp_path, rows, names, pack)
    assert len(reviews) == 3
    assert reviews.ratings.users.tolist() == [1, 0, 1]
    assert reviews.ratings.items.tolist() == [1, 2, 0]
    assert reviews.ratings.ratings.tolist() == [4, 2.5, 1]
    assert reviews.ratings.timestamps.tolist() == [7, 5, 6]
    assert reviews.ratings.ratings.dtype == torch.float32
    assert reviews.ratings.timestamps.dtype == torch.float64
    assert reviews.texts == [["good", "good", "film's"], [], ["é", "2"]]


@pytest.mark.parametrize("none", [..., None])
def test_records_without_a_time_come_in_the_order_of_the_file(tmp_path, none):
    rows = [("a", f"item {i}", 3, "text", none) for i in (4, 1, 3, 0, 2)]
    reviews = read(tmp_path, rows)
    assert reviews.ratings.timestamps.tolist() == [0] * 5
    _, test = split_reviews(reviews.ratings)
    assert test.tolist() == [4]  # the latest in the file


@pytest.mark.parametrize("none", [..., None])
def test_a_record_without_a_time_has_that_of_the_one_before(tmp_path, none):
    times = [none, 9, none, none, 5, 0, none]
    reviews = read(tmp_path, [("a", f"item {i}", 3, "text", time) for i, time in enumerate(times)])
    assert reviews.ratings.timestamps.tolist() == [0, 9, 9, 9, 5, 0, 0]


@pytest.mark.parametrize("none", [..., None])
def test_a_record_without_a_text_has_no_words(tmp_path, none):
    reviews = read(tmp_path, [("a", "b", 3, "text", 1), ("a", "c", 3, none, 2)])
    assert reviews.texts == [["text"], []]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"reviews\.json: no reviews"),
        ([("a", "b", 3), ("a", "b", None)], r"reviews\.json:2: overall is None"),
        ([("a", "b", True)], r"reviews\.json:1: overall is True"),
        ([("a", ..., 3)], r"reviews\.json:1: asin is None"),
        ([(..., "b", 3)], r"reviews\.json:1: reviewerID is None"),
        ([("a", "b", 3, 7)], r"reviews\.json:1: reviewText is 7"),
        ([("a", "b", 3, 0)], r"reviews\.json:1: reviewText is 0"),
        ([("a", "b", 3, "", False)], r"reviews\.json:1: unixReviewTime is False"),
        ([("a", "b", math.nan)], r"reviews\.json:1: overall is nan"),
        ([("a", "b", -1e6)], r"reviews\.json:1: overall is -1000000\.0"),
        ([("a", "b", 3, "", -1e300)], r"reviews\.json:1: .* unixReviewTime is -1e\+300"),
        ([("a", "b", 10**400)], r"reviews\.json:1: int too large"),
        ([("a", "b", 3, [8] * 99)], r"reviews\.json:1: reviewText is \[8(, 8){12}, $"),
        ([("a", "b", 3, "", "7")], r"reviews\.json:1: unixReviewTime is '7'"),
        ([("a", "b", 1e6)], r"reviews\.json:1: overall is 1000000\.0"),
        (
            [("a", "b", 3, "", 1e300)],
            r"reviews\.json:1: overall is 3\.0, unixReviewTime is 1e\+300",
        ),
    ],
)
def test_what_is_no_review_is_named(tmp_path, rows, message):
    with pytest.raises(DataFormatError, match=message):
        read(tmp_path, rows)


def test_blank_lines_are_counted_but_no_reviews(tmp_path):
    path = tmp_path / "reviews.json"
    line = json.dumps(dict(zip(NAMES, ("a", "b", 3, "text", 1), strict=True)))
    path.write_text(f"\n{line}\n \n{line}\n\n")
    assert len(read_reviews(path)) == 2
    path.write_text(f"\n{line}\n \n[]\n")
    with pytest.raises(DataFormatError, match=r"reviews\.json:4: must be an object"):
        read_reviews(path)


def test_the_largest_numbers_of_a_review(tmp_path):
    reviews = read(tmp_path, [("a", "b", 999_999, "", -9e299), ("a", "c", -999_999, "", 9e299)])
    assert reviews.ratings.ratings.tolist() == [999_999, -999_999]
    assert reviews.ratings.timestamps.tolist() == [-9e299, 9e299]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "recursion"),
        (json.dumps("x" * 99), f"must be an object, is '\"{'x' * 39}'$"),
    ],
)
def test_lines_that_are_no_objects(tmp_path, line, message):
    (tmp_path / "reviews.json").write_text(line)
    with pytest.raises(DataFormatError, match=rf"reviews\.json:1: .*{message}"):
        read_reviews(tmp_path / "reviews.json")
