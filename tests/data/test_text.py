import csv
import gzip
import io
import math

import numpy as np
import pytest
import torch

from sparsekit.data import CriteoReader, CsvReader, Keys
from sparsekit.errors import DataFormatError

from .criteo import DENSE, SPARSE, random_lines, read_lines, rows_of
from .written import one, write, xxh


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("block_bytes", [100, 1000, 8 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_criteo_equals_a_few_lines_of_python(tmp_path, compress, block_bytes, end):
    lines = random_lines(300)
    for last in (end, ""):
        path = write(tmp_path / "day_0", end.join(lines) + last, compress)
        batches = list(CriteoReader(path, 64, block_bytes=block_bytes))
        assert [batch.rows for batch in batches] == [64] * 4 + [44]
        assert rows_of(batches) == read_lines(lines)
    assert batches[0].label.dtype == batches[0].dense.dtype == torch.float32
    assert batches[0].sparse.keys() == SPARSE
    assert batches[0].dense.shape == (64, len(DENSE))
    assert batches[0].dense.is_contiguous()


def test_files_are_read_one_after_another(tmp_path):
    lines = random_lines(50)
    first = write(tmp_path / "a", "\n".join(lines[:20]) + "\n")
    second = write(tmp_path / "b.gz", "\n".join(lines[20:]) + "\n", compress=True)
    batches = list(CriteoReader([first, str(second)], 32))
    assert [batch.rows for batch in batches] == [32, 18]
    assert rows_of(batches) == read_lines(lines)


def test_any_size_of_block_gives_the_same_rows(tmp_path):
    path = write(tmp_path / "x.csv", "a,b\n" + "".join(f"{i},{'y' * (i % 7)}\n" for i in range(40)))
    for block_bytes in range(1, 60):
        batch = one(path, dense=["a"], sparse=["b"], block_bytes=block_bytes)
        assert batch.dense.view(-1).tolist() == list(range(40))
        keys = [xxh("y" * (i % 7)) for i in range(40) if i % 7]
        assert batch.sparse.values().tolist() == keys


def test_kinds_of_keys(tmp_path):
    path = write(
        tmp_path / "x.csv",
        "id,name,tag,hex\n"
        "-9223372036854775808,Zürich,a|b||a,ffffffffffffffff\n"
        "+9223372036854775807,,,\n"
        "007,0,|,DEADbeef\n",
    )
    batch = one(
        path,
        sparse={
            "id": "int",
            "name": Keys("hash", missing=-7),
            "tag": Keys(separator="|", seed=5),
            "hex": "hex",
        },
    )
    bags = {
        name: tuple(part.tolist() for part in bag) for name, bag in batch.sparse.to_dict().items()
    }
    assert bags == {
        "id": ([-(2**63), 2**63 - 1, 7], [0, 1, 2, 3]),
        "name": ([xxh("Zürich"), -7, xxh("0")], [0, 1, 2, 3]),
        "tag": ([xxh(text, 5) for text in "aba"], [0, 3, 3, 3]),
        "hex": ([-1, 0xDEADBEEF], [0, 1, 1, 2]),
    }
    assert batch.label is None
    assert batch.dense.shape == (3, 0)


def test_numbers(tmp_path):
    texts = [
        "0",
        "-0",
        "1",
        "-12",
        "+3",
        "999999999",
        "1234567890123",
        "0.1",
        ".5",
        "5.",
        "-1e-3",
        "3.4028234e38",
        "1e-46",
        "16777217",
        "123456789.123",
    ]
    path = write(tmp_path / "x.csv", "a\n" + "\n".join(texts) + "\n")
    numbers = one(path, dense=["a"]).dense.view(-1)
    assert numbers.numpy().tobytes() == np.array([float(text) for text in texts], "f").tobytes()


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "1x",
        "inf",
        "nan",
        "-",
        "+",
        "+-1",
        "1e39",
        "-1e999",
        "0x10",
        " 1",
        "1 ",
        "1_0",
        "1\0",
        "1.2.3",
        "e5",
        '"',
    ],
)
def test_what_is_no_number(tmp_path, text):
    path = write(tmp_path / "x.csv", f"a,b\n1,2\n3,{text}\n")
    with pytest.raises(DataFormatError, match=r"x\.csv, line 3, column 2 \('b'\): not a finite"):
        list(CsvReader(path, 10, dense=["a", "b"], quote=None))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("int", "1.0", "not a 64-bit integer"),
        ("int", "9223372036854775808", "not a 64-bit integer"),
        ("int", "", None),
        ("int", "12a", "not a 64-bit integer"),
        ("int", "\0", "not a 64-bit integer"),
        ("hex", "g", "not a hexadecimal number of at most 16 digits"),
        ("hex", "0123456789abcdef0", "not a hexadecimal number of at most 16 digits"),
        ("hex", "-1", "not a hexadecimal number of at most 16 digits"),
        ("hash", "\0x", None),
    ],
)
def test_what_is_no_key(tmp_path, kind, text, reason):
    path = write(tmp_path / "x.csv", f"a,b\n1,2\n3,{text}\n")
    reader = CsvReader(path, 10, dense=["a"], sparse={"b": kind})
    if reason is None:
        assert len(list(reader)) == 1
        return
    with pytest.raises(DataFormatError, match=rf"x\.csv, line 3, column 2 \('b'\): {reason}: '3,"):
        list(reader)


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ("1", 2, "too few fields"),
        ("", None, None),
        ("1,2,3", 3, "too many fields"),
        ("1,2,", 3, "too many fields"),
        (",2", 1, "an empty field"),
        ('"1"x,2', 1, "text after the closing quote"),
        ('"1""",2', 1, "not a finite number"),
        ("1," + "x" * 100, 1, "too long a line"),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_malformed_lines_are_named_or_skipped(tmp_path, line, column, reason, compress):
    path = write(tmp_path / "x.csv", f"a,b\r\n1,2\r\n{line}\r\n3,4\r\n{line}\r\n", compress)
    settings = {"label": "a", "sparse": ["b"], "max_line_bytes": 70, "block_bytes": 16}
    if reason is not None:
        with pytest.raises(DataFormatError) as error:
            list(CsvReader(path, 10, **settings))
        assert str(error.value).startswith(f"{path}, line 3, column {column}")
        assert f"{reason}" in str(error.value)
        assert str(error.value).endswith(f"{line[:60]!r}{'...' if len(line) > 60 else ''}")
        assert len(str(error.value)) < len(str(path)) + 200
    reader = CsvReader(path, 10, on_error="skip", **settings)
    (batch,) = reader
    assert batch.label.tolist() == [1, 3]
    assert batch.sparse.values().tolist() == [xxh("2"), xxh("4")]
    assert reader.skipped == (0 if reason is None else 2)


def test_marks_of_choice(tmp_path):
    path = write(tmp_path / "x.csv", "'a;1';\"b;'c'\n'1';\"x\";'u;''v'';w'\n")
    batch = one(path, sparse=["a;1", '"b', "c"], delimiter=";", quote="'")
    assert batch.sparse.values().tolist() == [xxh("1"), xxh('"x"'), xxh("u;'v';w")]
    path = write(tmp_path / "y.csv", '"a"|b\n"1"|x\n')
    batch = one(path, sparse=['"a"', "b"], delimiter="|", quote=None)
    assert batch.sparse.values().tolist() == [xxh('"1"'), xxh("x")]
    extremes = {'"a"': Keys(seed=2**64 - 1), "b": Keys("hash", "/", -(2**63))}
    path = write(tmp_path / "y.csv", '"a"|b\nx|\n')
    values = one(path, sparse=extremes, delimiter="|", quote=None).sparse.values()
    assert values.tolist() == [xxh("x", 2**64 - 1), -(2**63)]


def test_quotes(tmp_path):
    path = write(tmp_path / "x.csv", '"a","b""c",d\n"1","x,""y""",""\n2,"",it"s\n')
    batch = one(path, dense=["a"], sparse=['b"c', "d"])
    assert batch.dense.view(-1).tolist() == [1, 2]
    assert batch.sparse.values().tolist() == [xxh('x,"y"'), xxh('it"s')]
    assert batch.sparse.offsets().tolist() == [0, 1, 1, 1, 2]


QUOTED = [
    ["1", "x\ny"],
    ["2", 'two\r\n"lines", and\n\n3,not a row\n'],
    ["4", ""],
    ["5", "\n"],
    ["6", 'it"s'],
    ["7", "plain"],
]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_newline_within_quotes_does_not_end_a_line(tmp_path, compress, end):
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([["number", "the\ntext"], *QUOTED])
    path = write(tmp_path / "x.csv", text.getvalue().removesuffix(end), compress)
    settings = {"dense": ["number"], "sparse": {"the\ntext": Keys(missing=0)}}
    keys = [xxh(text) if text else 0 for _, text in QUOTED]
    for block_bytes in (*range(1, 90), 8 << 20):
        batch = one(path, block_bytes=block_bytes, **settings)
        assert batch.dense.view(-1).tolist() == [float(number) for number, _ in QUOTED]
        assert batch.sparse.values().tolist() == keys
    # The rows are the same when shuffled, and on ranks that start inside the file.
    for block_bytes in range(1, 90, 7):
        parts = [
            CsvReader(path, 2, rank=r, world_size=2, block_bytes=block_bytes, **settings)
            for r in range(2)
        ]
        read = [int(n) for part in parts for batch in part for n in batch.dense.view(-1)]
        assert read == [1, 2, 4, 5, 6, 7]
        shuffled = CsvReader(path, 10, shuffle=True, block_bytes=block_bytes, **settings)
        for _ in range(2):
            (batch,) = shuffled
            pairs = zip(batch.dense.view(-1).tolist(), batch.sparse.values().tolist(), strict=True)
            assert sorted(pairs) == sorted(zip(map(float, read), keys, strict=True))


def test_quotes_are_text_where_they_do_not_begin_a_field(tmp_path):
    text = 'a,b\n1,5" disk\n2,3" and 4"\n3,x"",y\n4,"x"\n5,"y"z"\n6,"u\nv"\n'
    path = write(tmp_path / "x.csv", text)
    for block_bytes in range(1, 80):
        reader = CsvReader(
            path, 9, dense=["a"], sparse=["b"], block_bytes=block_bytes, on_error="skip"
        )
        (batch,) = reader
        assert batch.dense.view(-1).tolist() == [1, 2, 4, 6]
        assert batch.sparse.values().tolist() == [
            xxh(t) for t in ('5" disk', '3" and 4"', "x", "u\nv")
        ]
        assert reader.skipped == 2
    plain = CsvReader(path, 9, dense=["a"], sparse=["b"], quote=None, on_error="skip")
    assert [batch.dense.view(-1).tolist() for batch in plain] == [[1, 2, 4, 5, 6]]


@pytest.mark.parametrize("compress", [False, True])
def test_a_quote_that_is_never_closed_is_not_left_out(tmp_path, compress):
    """An unclosed quote always raises, since it may have swallowed any number of rows."""
    text = 'a,b\n1,x\n2,y,z\n3,"u\n' + "4,v\n" * 50
    path = write(tmp_path / "x.csv", text, compress)
    for block_bytes in (5, 60, 8 << 20):
        for max_line_bytes in (10, 1000):
            reader = CsvReader(
                path,
                10,
                dense=["a"],
                sparse=["b"],
                on_error="skip",
                block_bytes=block_bytes,
                max_line_bytes=max_line_bytes,
            )
            message = (
                r"x\.csv, line 4, column \d \('.'\): a quote that is not closed before the file"
            )
            with pytest.raises(DataFormatError, match=message):
                list(reader)
            assert reader.skipped == 1  # the line before was skipped
    (batch,) = CsvReader(path, 100, dense=["a"], quote=None, on_error="skip")
    assert batch.rows == 52


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("a,b\r1,2\r3,4\r", {"dense": ["a"]}),
        ("a,b\r1,2\n3,4\n", {"dense": ["a"]}),
        ("x\ry\rz", {"columns": ["a"], "sparse": ["a"]}),
    ],
)
def test_lines_that_end_with_a_return_alone_are_refused(tmp_path, text, settings):
    path = write(tmp_path / "x.csv", text)
    with pytest.raises(DataFormatError, match=r'x\.csv: lines end with "\\r" alone'):
        CsvReader(path, 5, **settings)


def test_a_return_within_a_line_is_text(tmp_path):
    path = write(tmp_path / "x.csv", "x\ry\nz\n")
    batch = one(path, columns=["a"], sparse=["a"])
    assert batch.sparse.values().tolist() == [xxh("x\ry"), xxh("z")]


def test_bytes_of_no_text_are_shown(tmp_path):
    path = write(tmp_path / "x.csv", b"a,b\n1,\xff\n\xfe,2\n")
    with pytest.raises(DataFormatError, match=r"line 3, column 1 .*: '\\\\xfe,2'$"):
        list(CsvReader(path, 5, dense=["a"]))


def test_byte_order_mark(tmp_path):
    for compress in (False, True):
        path = write(tmp_path / "x.csv", b"\xef\xbb\xbfa,b\n1,x\n", compress)
        assert one(path, dense=["a"], sparse=["b"]).dense.tolist() == [[1]]
        path = write(tmp_path / "q.csv", b'\xef\xbb\xbf"a\n",b\n1,x\n', compress)
        assert one(path, dense=["a\n"], sparse=["b"]).dense.tolist() == [[1]]
        path = write(tmp_path / "y.csv", b"\xef\xbb\xbf1,x\n", compress)
        for quote in ('"', None):
            batch = one(path, columns=["a", "b"], dense=["a"], quote=quote)
            assert batch.dense.tolist() == [[1]]
        path = write(tmp_path / "z.csv", "a,b\n1,x\n".encode("utf-16"), compress)
        with pytest.raises(DataFormatError, match="UTF-16"):
            one(path, dense=["a"])


def test_text_that_is_not_utf8_is_hashed_by_its_bytes(tmp_path):
    path = write(tmp_path / "x.csv", b"a\n\xff\xfe\0\n")
    assert one(path, sparse=["a"]).sparse.values().tolist() == [xxh(b"\xff\xfe\0")]
    path = write(tmp_path / "y.csv", b"\xffa\n1\n")
    with pytest.raises(DataFormatError, match="line 1: not UTF-8"):
        one(path, sparse=["a"])


def test_truncated_and_damaged_gzip(tmp_path):
    whole = gzip.compress("\n".join(random_lines(200)).encode())
    for content, reason in ((whole[:-1000], "truncated"), (whole[:-4], "truncated")):
        path = write(tmp_path / "day.gz", content)
        with pytest.raises(DataFormatError, match=rf"day\.gz: the file is {reason}"):
            list(CriteoReader(path, 10, block_bytes=1000, on_error="skip"))
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 0xFF
    path = write(tmp_path / "day.gz", bytes(damaged))
    with pytest.raises(DataFormatError, match=r"day\.gz"):
        list(CriteoReader(path, 10))


def test_a_file_that_got_shorter(tmp_path):
    path = write(tmp_path / "day", "\n".join(random_lines(20)))
    reader = CriteoReader(path, 5, block_bytes=1000)
    write(path, path.read_bytes()[:1500])
    with pytest.raises(DataFormatError, match="now it ends before"):
        list(reader)


def test_empty_files(tmp_path):
    path = write(tmp_path / "x", "")
    assert list(CriteoReader(path, 5)) == []
    assert list(CriteoReader([path, path], 5, shuffle=True)) == []
    path = write(tmp_path / "y.csv", "a,b")
    assert list(CsvReader(path, 5, dense=["a"])) == []
    assert CsvReader(path, 5, dense=["a"]).count_rows() == 0


def test_one_column_has_rows_without_a_value(tmp_path):
    path = write(tmp_path / "x.csv", "a\n1\n\n3\n")
    assert one(path, sparse={"a": "int"}).sparse.offsets().tolist() == [0, 1, 1, 2]


def test_missing_numbers_have_a_value_of_choice(tmp_path):
    path = write(tmp_path / "x.csv", "a,b\n1,\n,2\n")
    assert one(path, dense=["b", "a"]).dense.tolist() == [[0, 1], [2, 0]]
    dense = one(path, dense=["b", "a"], missing=math.nan).dense
    assert dense.isnan().tolist() == [[True, False], [False, True]]


def test_columns_that_are_not_read_may_have_any_text(tmp_path):
    """A name identifies a column even if it looks like another column's number."""
    names = ["other", "p", "k", "0", "q", "y", "1"]
    text = "x,2,one,-,3,4,two\ny,5,,1e999,6,7,\n,8,three,,9,10,four\n"
    settings = {"dense": ["q", "p"], "sparse": ["1", "k"], "label": "y"}
    whole = one(write(tmp_path / "x.csv", f"{','.join(names)}\n{text}"), **settings)
    bare = one(write(tmp_path / "y.csv", text), columns=names, **settings)
    for batch in (whole, bare):
        assert batch.dense.tolist() == [[3, 2], [6, 5], [9, 8]]
        assert batch.label.tolist() == [4, 7, 10]
        assert batch.sparse.keys() == ["k", "1"]
        assert batch.sparse.values().tolist() == [xxh(t) for t in ("one", "three", "two", "four")]
        assert batch.sparse.offsets().tolist() == [0, 1, 1, 2, 3, 3, 4]


def test_any_number_of_threads_gives_the_same(tmp_path):
    path = write(tmp_path / "day", "\n".join(random_lines(2000)))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(rows_of(CriteoReader(path, 1500)))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]
