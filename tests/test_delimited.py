"""Rows and numbers of delimited text are parsed, and columns of ratings are found by name."""

import sys

import pytest
import torch

from sparsekit.datasets import Ratings, RatingsFormatError, movielens_100k, read_ratings
from sparsekit.datasets.delimited import finite, rows_of
from sparsekit.errors import DataFormatError
from sparsekit.hashing import xxh64


def test_rows_have_the_numbers_of_their_lines():
    lines = ["a, b\n", "\n", '"x,\n', 'y",c\n', " d ,e\n"]
    assert list(rows_of(lines, "x")) == [(1, ["a", "b"]), (4, ["x,\ny", "c"]), (5, ["d ", "e"])]
    assert list(rows_of(["a\t b\n"], "x", "\t")) == [(1, ["a", " b"])]
    assert list(rows_of(['a::"b::c":: d\n'], "x", "::")) == [(1, ["a", "b::c", " d"])]
    with pytest.raises(DataFormatError, match=r"^x:2: unexpected end of data$"):
        list(rows_of(["a\n", '"b'], "x"))


@pytest.mark.parametrize(
    "text", ["1", "-2.5", "+.5", "3.", "1e-3", "-1E+2", str(sys.float_info.max)]
)
def test_finite_numbers(text):
    assert finite(text) == finite(text, abs(float(text))) == float(text)


@pytest.mark.parametrize(
    "text", ["", "x", "1e999", "-1e999", "nan", "1_0", " 1", "1 ", "0x1", "٣", "."]
)
def test_what_is_no_finite_number(text):
    with pytest.raises(ValueError, match=rf"^{text!r} is not a finite number$"):
        finite(text)


def test_numbers_beyond_a_bound_and_long_texts():
    for text in ("2.5", "-2.5"):
        with pytest.raises(ValueError, match=rf"^'{text}' is not a finite number$"):
            finite(text, 2.25)
    with pytest.raises(ValueError, match=rf"^'{'9x' * 40}' is not a finite number$"):
        finite("9x" * 99)


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "x").write_text(text)
        return read_ratings(tmp_path / "x")

    return read


@pytest.mark.parametrize("user", ["user_id", "userId", "USER", " user "])
@pytest.mark.parametrize("item", ["item_id", "item", "movieId", "movie", "movie_id:token"])
def test_names_of_columns(read, user, item):
    found = read(f"timestamp,{item},{user},rating\n4,2,1,3\n")
    columns = (found.users, found.items, found.ratings, found.timestamps)
    assert [column.tolist() for column in columns] == [[1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3,4,5\n", ":1: the header must have one column 'user_id'"),
        ("a,b,c,4\n", ":1: the header must have one column 'user_id'"),
        ("a,b,3,d\n", ":1: the header must have one column 'user_id'"),
        ("\n1,2,1e39,4\n", ":2: '1e39' is not a finite number: '1,2,1e39,4'"),
        ("1,2,3,4\n" + "a" * 99 + ",2,x,4\n", rf":2: 'x' is not a finite number: '{'a' * 80}'$"),
        ("1,2,3,4\n" + "a" * 99 + " ,2,3,4\n", rf":2: user_id '{'a' * 80}' is empty or has blank"),
        (f"{'a' * 999},b\n", rf":1: .* it has \['{'a' * 198}\. Expected"),
    ],
)
def test_other_rows_are_refused(read, text, message):
    with pytest.raises(RatingsFormatError, match=message):
        read(text)


def test_tabs_count_more_than_colons(read):
    found = read("a::b\t2\t3\t4\n")
    assert found.users.tolist() == xxh64(["a::b"]).tolist()


def test_an_empty_path_is_a_path():
    with pytest.raises(OSError, match="No such file"):
        movielens_100k("")


@pytest.mark.parametrize(("count", "tested"), [(4, 0), (5, 1), (9, 1), (10, 2)])
def test_a_fifth_is_tested_on_unless_asked_otherwise(count, tested):
    users, items = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    ratings = Ratings(users, items, torch.ones(count), torch.arange(count).double())
    with torch.device("meta"):  # stands in for cuda, since it is available anywhere
        train, test = ratings.split_by_time()
    assert (len(train), len(test)) == (count - tested, tested)
    assert test.items.tolist() == items[count - tested :].tolist()
