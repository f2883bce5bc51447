"""Readers of text raise errors for invalid arguments and files."""

import os

import pytest

from sparsekit.data import CriteoReader, CsvReader, Keys, text_file
from sparsekit.errors import DataFormatError

from .written import one, write


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ValueError, "name at least one column"),
        ({"dense": "a"}, TypeError, "dense must be a list of names, got 'a'"),
        ({"dense": ["c"]}, ValueError, r"x\.csv has no column 'c'; its columns are \['a', 'b'\]"),
        ({"dense": ["a"], "label": "a"}, ValueError, r"columns \['a'\] are named twice"),
        ({"dense": ["a", "a"]}, ValueError, r"columns \['a'\] are named twice"),
        ({"sparse": ["a", "a"]}, ValueError, r"sparse names \['a'\] twice"),
        ({"sparse": {"a": "text"}}, ValueError, r"sparse\['a'\]: kind must be one of .* 'text'"),
        ({"sparse": {"a": 3}}, TypeError, r"sparse\['a'\] must be Keys"),
        ({"sparse": {"a": Keys(separator="||")}}, ValueError, "separator must be one byte"),
        ({"sparse": {"a": Keys(separator=",")}}, ValueError, "separator is ','"),
        ({"sparse": {"a": Keys(missing=2**63)}}, ValueError, r"missing must be in"),
        ({"sparse": {"a": Keys(missing=-(2**63) - 1)}}, ValueError, r"missing must be in"),
        ({"sparse": {"a": Keys(missing=False)}}, TypeError, "missing must be an int, got False"),
        ({"sparse": {"a": Keys(seed=True)}}, TypeError, "seed must be an int, got True"),
        ({"sparse": {"a": Keys(seed=-1)}}, ValueError, r"seed must be in"),
        ({"sparse": {"a": Keys(seed=2**64)}}, ValueError, r"seed must be in"),
        ({"sparse": {"a": Keys(separator="ü")}}, ValueError, "separator must be one byte"),
        ({"sparse": {"a": Keys(separator="\n")}}, ValueError, r"separator is '\\n'"),
        ({"sparse": {"a": Keys(separator="\0")}}, ValueError, r"separator is '\\x00'"),
        ({"sparse": "a"}, TypeError, "sparse must be a list of names, got 'a'"),
        ({"dense": ["a"], "delimiter": "\r"}, ValueError, "delimiter must be one byte within"),
        ({"dense": ["a"], "delimiter": ""}, ValueError, "delimiter must be one byte within"),
        ({"dense": ["a"], "quote": ""}, ValueError, "quote must be one byte within"),
        ({"sparse": {"a": Keys(separator="")}}, ValueError, "separator must be one byte, got ''"),
        ({"dense": ["a"], "delimiter": "ab"}, ValueError, "delimiter must be one byte"),
        ({"dense": ["a"], "quote": "\n"}, ValueError, "quote must be one byte"),
        ({"dense": ["a"], "quote": ","}, ValueError, "delimiter and quote are both ','"),
        ({"dense": ["a"], "batch_size": 0}, ValueError, r"batch_size must be in \[1, .*got 0"),
        ({"dense": ["a"], "on_error": "ignore"}, ValueError, "on_error must be one of raise, skip"),
        ({"dense": ["a"], "rank": 1}, ValueError, "rank=1 and world_size=None go together"),
        ({"dense": ["a"], "rank": 2, "world_size": 2}, ValueError, r"rank must be in \[0, 1\]"),
        ({"dense": ["a"], "world_size": 2}, ValueError, "rank=None and world_size=2 go together"),
        ({"dense": ["a"], "rank": -1, "world_size": 2}, ValueError, r"rank must be in \[0, 1\]"),
        ({"dense": ["a"], "rank": 0, "world_size": 0}, ValueError, r"world_size must be in \[1, "),
        ({"dense": ["a"], "seed": -1}, ValueError, r"seed must be in \[0, "),
        ({"dense": ["a"], "max_line_bytes": 0}, ValueError, "max_line_bytes must be in"),
        ({"dense": ["a"], "block_bytes": 0}, ValueError, "block_bytes"),
        ({"dense": ["a"], "columns": ["a", "a"]}, ValueError, "more than one column 'a'"),
    ],
)
def test_bad_arguments(tmp_path, settings, error, message):
    path = write(tmp_path / "x.csv", "a,b\n1,2\n")
    with pytest.raises(error, match=f"^CsvReader: .*{message}"):
        CsvReader(path, **{"batch_size": 5, **settings})


def test_bad_files(tmp_path):
    path = write(tmp_path / "x.csv", "a,b\n1,2\n")
    other = write(tmp_path / "y.csv", "b,a\n1,2\n")
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        CsvReader(tmp_path / "none", 5, dense=["a"])
    with pytest.raises(IsADirectoryError, match="is a folder"):
        CsvReader(tmp_path, 5, dense=["a"])
    with pytest.raises(DataFormatError, match=r"^/dev/zero: is no regular file, from which alone"):
        CsvReader("/dev/zero", 5, dense=["a"])
    with pytest.raises(ValueError, match="files is empty"):
        CsvReader([], 5, dense=["a"])
    with pytest.raises(ValueError, match=r"y\.csv has the columns \['b', 'a'\], but .*x\.csv has"):
        CsvReader([path, other], 5, dense=["a"])
    for text, settings, error, message in [
        ('"a,b\n1,2\n', {}, DataFormatError, r"csv, line 1: no names of columns: "),
        ("a" * 100 + ",b\n", {}, DataFormatError, "csv, line 1: longer than max_line_bytes=98"),
        ("\na,b\n1,2\n", {}, ValueError, "csv is empty, or begins with an empty line"),
        ("\na,b\n", {"quote": None}, ValueError, "csv is empty, or begins with an empty line"),
        ("alpha,b\n1,2\n", {"dense": ["alhpa"]}, ValueError, "did you mean alpha. Its columns"),
    ]:
        path = write(tmp_path / "z.csv", text)
        with pytest.raises(error, match=message):
            CsvReader(path, 5, **{"dense": ["a"], "max_line_bytes": 98, **settings})
    # This line is exactly as long as allowed.
    path = write(tmp_path / "z.csv", "a" * 96 + ",b\r\n1,2\n")
    assert one(path, dense=["b"], max_line_bytes=98).dense.tolist() == [[2]]


@pytest.mark.parametrize("make", [CsvReader, CriteoReader])
def test_settings_unless_told_otherwise(tmp_path, make):
    names = {"columns": ["a"], "dense": ["a"]}
    path = write(tmp_path / "x.csv", "1\n2\n")
    settings = {} if make is CriteoReader else names
    whole = {"missing": 0.0, "on_error": "raise", "shuffle": False, "seed": 0}
    reader, other = make(path, 5, **settings), make(path, 5, **settings, **whole)
    assert reader.state_dict() == other.state_dict()
    assert (reader.seed, reader.shuffle, reader._on_error) == (0, False, "raise")
    assert make(path, 5, **settings, shuffle=True).state_dict()["block_bytes"] == 8 << 20


def test_a_line_may_have_a_mebibyte_unless_told_otherwise(tmp_path):
    lines = [letter * 2**20 for letter in "yz"]
    path = write(tmp_path / "x.csv", "\n".join(["a", *lines]))
    assert one(path, sparse=["a"]).rows == 2
    path = write(tmp_path / "x.csv", "\n".join(["a", lines[0] + "y"]))
    with pytest.raises(DataFormatError, match="too long a line"):
        one(path, sparse=["a"])


def test_a_first_row_may_have_a_return_within_a_field(tmp_path):
    path = write(tmp_path / "x.csv", "1,x\ry\n2,z\n")
    assert one(path, columns=["a", "b"], dense=["a"]).dense.tolist() == [[1], [2]]
    path = write(tmp_path / "x.csv", "1,x\r2,z")
    with pytest.raises(DataFormatError, match=r"x\.csv: lines end with \"\\r\" alone"):
        one(path, columns=["a", "b"], dense=["a"])


def test_a_file_that_is_refused_is_closed(tmp_path):
    path = write(tmp_path / "x.csv", "a\rb\r")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DataFormatError) as kept:
        CsvReader(path, 5, dense=["a"])
    assert len(os.listdir("/proc/self/fd")) == before, kept


def test_the_column_of_a_quote_that_is_not_closed(tmp_path):
    for text, column in (('1,"x\n', r"column 2 \('b'\)"), ('"1,x\n', r"column 1 \('a'\)")):
        path = write(tmp_path / "x.csv", "a,b\n5,y\n" + text)
        for on_error in ("raise", "skip"):
            with pytest.raises(DataFormatError, match=f"line 3, {column}: a quote that is not cl"):
                one(path, dense=["a"], sparse=["b"], on_error=on_error)


def test_a_compressed_file_is_read_once_to_be_counted(tmp_path, monkeypatch):
    reader = CsvReader(write(tmp_path / "x.csv", "a\n1\n2\n", compress=True), 5, dense=["a"])
    opened, original = [], text_file.open_content
    monkeypatch.setattr(
        text_file, "open_content", lambda path: opened.append(path) or original(path)
    )
    assert reader.count_rows() == reader.count_rows() == 2
    assert len(opened) == 1


def test_no_more_than_twenty_columns_are_listed(tmp_path):
    names = [f"x{number}" for number in range(30)]
    path = write(tmp_path / "x.csv", ",".join(names) + "\n")
    with pytest.raises(ValueError, match=r"; its columns are \['x0', .*'x19'\]$"):
        CsvReader(path, 5, dense=["price"])
