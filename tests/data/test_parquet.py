import itertools
import math
import os
import sys
from datetime import date
from decimal import Decimal

import numpy as np
import pytest
import torch

from sparsekit.data import Keys, ParquetReader
from sparsekit.errors import DataFormatError
from sparsekit.hashing import xxh64

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

from sparsekit.data import arrow_columns  # noqa: E402
from sparsekit.data.parquet_file import ParquetFiles  # noqa: E402


def write(path, columns, **settings):
    parquet.write_table(pa.table(columns), path, **settings)
    return path


def one(path, **settings):
    (batch,) = ParquetReader(path, 1000, **settings)
    return batch


def bags(batch, name):
    values, offsets = (part.tolist() for part in batch.sparse[name])
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
def test_integers_are_keys(tmp_path, kind):
    path = write(
        tmp_path / "x.parquet",
        {
            "one": pa.array([5, None, 100, 0], kind),
            "many": pa.array([[1, 2], [], None, [3, None, 4]], pa.list_(kind)),
            "fixed": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(kind, 2)),
            "large": pa.array([[9], [], [8, 7], None], pa.large_list(kind)),
        },
    )
    names = ["one", "many", "fixed", "large"]
    batch = one(path, sparse=dict.fromkeys(names, "int"))
    assert batch.sparse.keys() == names
    assert bags(batch, "one") == [[5], [], [100], [0]]
    assert bags(batch, "many") == [[1, 2], [], [], [3, 4]]
    assert bags(batch, "fixed") == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert bags(batch, "large") == [[9], [], [8, 7], []]
    hashed = one(path, sparse=names)
    for name in names:
        assert hashed.sparse[name][1].equal(batch.sparse[name][1])
        assert hashed.sparse[name][0].equal(xxh64(batch.sparse[name][0]))


def test_the_largest_integers(tmp_path):
    path = write(
        tmp_path / "x.parquet",
        {"u": pa.array([2**64 - 1, 0], pa.uint64()), "i": pa.array([-(2**63), 2**63 - 1])},
    )
    batch = one(path, sparse={"u": "int", "i": "int"})
    assert bags(batch, "u") == [[-1], [0]]
    assert bags(batch, "i") == [[-(2**63)], [2**63 - 1]]
    hashed = one(path, sparse=["u", "i"])  # hashed as decimal text
    for name, numbers in (("u", [2**64 - 1, 0]), ("i", [-(2**63), 2**63 - 1])):
        assert bags(hashed, name) == [[xxh64([str(number)]).item()] for number in numbers]


VIEWS = [pa.string_view(), pa.binary_view()]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("kind", [*TEXTS, *VIEWS], ids=str)
def test_text_is_hashed(tmp_path, kind):
    coded = pa.array(["a", "b", "a", None], pa.string() if kind in VIEWS else kind)
    path = write(
        tmp_path / "x.parquet",
        {
            "one": pa.array(["a", None, "Zürich", ""], kind),
            "many": pa.array([["a", "b"], None, [], ["c", None]], pa.list_(kind)),
            "large": pa.array([["a"], None, ["a", None], []], pa.large_list(kind)),
            "pair": pa.array([["a", "b"], ["b", "a"], None, [None, "c"]], pa.list_(kind, 2)),
            "coded": coded.dictionary_encode(),
        },
    )
    sparse = {"one": Keys(seed=3), "many": "hash", "coded": Keys(missing=-5)}
    batch = one(path, sparse=sparse)
    code = {text: xxh64([text]).item() for text in "abc"}
    assert bags(batch, "one") == [
        [xxh64([text], 3).item()] if text is not None else [] for text in ["a", None, "Zürich", ""]
    ]
    assert bags(batch, "many") == [[code["a"], code["b"]], [], [], [code["c"]]]
    assert bags(batch, "coded") == [[code["a"]], [code["b"]], [code["a"]], [-5]]
    batch = one(path, sparse={"large": Keys(seed=2**64 - 1, missing=7), "pair": "hash"})
    seeded = xxh64(["a"], 2**64 - 1).item()
    assert bags(batch, "large") == [[seeded], [7], [seeded], [7]]
    assert bags(batch, "pair") == [[code["a"], code["b"]], [code["b"], code["a"]], [], [code["c"]]]
    names = ["one", "many", "large", "pair"]
    in_order, shuffled = (one(path, sparse=names, shuffle=shuffle) for shuffle in (False, True))
    for name in names:
        assert sorted(bags(shuffled, name)) == sorted(bags(in_order, name))


def test_binary_of_one_size_is_hashed(tmp_path):
    path = write(tmp_path / "x.parquet", {"a": pa.array([b"ab", None, b"\0d"], pa.binary(2))})
    batch = one(path, sparse=["a"])
    assert bags(batch, "a") == [[xxh64([b"ab"]).item()], [], [xxh64([b"\0d"]).item()]]


def test_missing_keys_are_put_where_a_bag_is_null_or_empty(tmp_path):
    path = write(
        tmp_path / "x.parquet", {"a": [[1, 2], None, [], [3, None], [None]], "b": range(5)}
    )
    batch = one(path, sparse={"a": Keys("int", missing=7)}, dense=["b"])
    assert bags(batch, "a") == [[1, 2], [7], [7], [3], [7]]


def test_numbers_and_labels(tmp_path):
    path = write(
        tmp_path / "x.parquet",
        {
            "label": [True, False, True],
            "a": pa.array([1.5, None, math.nan], pa.float64()),
            "b": pa.array([None, -3, 2**40], pa.int64()),
        },
    )
    batch = one(path, label="label", dense=["b", "a"], missing=-1.0)
    assert batch.label.tolist() == [1, 0, 1]
    assert batch.dense.tolist() == [[-1, 1.5], [-3, -1], [2**40, -1]]
    assert batch.dense.dtype == batch.label.dtype == torch.float32
    batch.dense[0] = 5  # does not write to Arrow's memory


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_without_a_label_or_with_infinity_are_named_or_skipped(tmp_path, shuffle):
    path = write(
        tmp_path / "x.parquet",
        {"label": [0.0, None, 2.0, math.nan, 4.0, 5.0], "a": [0, 1, 2, 3, 4, math.inf]},
        row_group_size=2,
    )
    settings = {"label": "label", "dense": ["a"], "shuffle": shuffle}
    if not shuffle:
        with pytest.raises(DataFormatError, match=r"x\.parquet, row 2, column 'label': not a fin"):
            list(ParquetReader(path, 4, **settings))
        with pytest.raises(DataFormatError, match=r"x\.parquet, row 6, column 'a': an infinite"):
            list(ParquetReader(path, 4, dense=["a"]))
    reader = ParquetReader(path, 4, on_error="skip", **settings)
    assert sorted(row for batch in reader for row in batch.label.tolist()) == [0, 2, 4]
    assert reader.skipped == 3


def test_int64_keys_are_not_copied(tmp_path, monkeypatch):
    values = np.arange(300_000)
    lists = pa.ListArray.from_arrays(np.arange(0, 300_001, 3), values)
    path = write(tmp_path / "x.parquet", {"a": lists})
    tables = []
    read = parquet.ParquetFile.read_row_groups
    monkeypatch.setattr(
        parquet.ParquetFile,
        "read_row_groups",
        lambda *args, **kwargs: tables.append(read(*args, **kwargs)) or tables[-1],
    )
    first, second = ParquetReader(path, 50_000, sparse={"a": "int"})
    (column,) = tables[0]["a"].chunks
    address = column.values.buffers()[1].address
    assert first.sparse.values().data_ptr() == address
    assert second.sparse.values().data_ptr() == address + 150_000 * 8
    assert second.sparse.values().equal(torch.arange(150_000, 300_000))
    assert second.sparse.offsets().equal(torch.arange(50_001) * 3)


def test_truncated_and_damaged_files(tmp_path):
    path = write(tmp_path / "x.parquet", {"a": range(10_000)}, compression="snappy")
    whole = path.read_bytes()
    for content in (whole[:-10], whole[: len(whole) // 2], b"", b"PAR1", b"not at all"):
        path.write_bytes(content)
        with pytest.raises(DataFormatError, match=r"x\.parquet: "):
            ParquetReader(path, 10, dense=["a"])
    damaged = bytearray(whole)
    damaged[4:2000] = bytes(1996)
    path.write_bytes(bytes(damaged))
    with pytest.raises(DataFormatError, match=r"x\.parquet, row group 0: "):
        list(ParquetReader(path, 10, dense=["a"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense": ["c"]}, r"x\.parquet has no column 'c'"),
        (
            {"dense": ["text"]},
            r"column 'text' must have numbers, booleans, decimals or dates, but has string",
        ),
        (
            {"label": "list"},
            r"column 'list' must have numbers, booleans, decimals or dates, but has list",
        ),
        (
            {"sparse": ["float"]},
            r"column 'float' must have integers, strings, binary, booleans, dates or dec",
        ),
        ({"sparse": ["time"]}, r"column 'time' must have .*, or lists of them, but has timestamp"),
        ({"dense": ["time"]}, r"column 'time' must have .* dates, but has timestamp"),
        ({"sparse": {"price": "int"}}, r"column 'price' must have .* but has decimal128\(3, 2\)"),
        ({"sparse": {"large": "int"}}, r"column 'large' must have .* but has decimal128\(19, 0\)"),
        ({"sparse": {"float": "int"}}, r"column 'float' must have .* for kind 'int', or lists"),
        (
            {"sparse": {"text": "int"}},
            r"column 'text' must have integers, booleans, dates or whole dec.* for kind 'int'",
        ),
        ({"sparse": {"list": "hex"}}, r"sparse\['list'\]: kind 'hex' and separator are for text"),
        ({"sparse": {"text": Keys(separator=",")}}, r"sparse\['text'\]: kind 'hex' and separator"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, settings, message):
    price, time = pa.array([Decimal("1.50")]), pa.array([1], pa.timestamp("s"))
    columns = {"text": ["a"], "list": [[1]], "float": [1.0], "price": price, "time": time}
    columns["large"] = pa.array([Decimal(1)], pa.decimal128(19, 0))
    path = write(tmp_path / "x.parquet", columns)
    with pytest.raises(ValueError, match=f"^ParquetReader: .*{message}"):
        ParquetReader(path, 10, **settings)


@pytest.mark.time_limit(30)
def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(DataFormatError, match=f"^{path}: is no regular file, from which alone"):
            ParquetReader(path, 5, label="a")


def test_batches_over_row_groups_and_chunks(tmp_path):
    path = write(
        tmp_path / "x.parquet",
        {"a": [[i] * (i % 3) for i in range(100)], "b": range(100)},
        row_group_size=7,
    )
    batches = list(ParquetReader(path, 30, sparse={"a": "int", "b": "int"}))
    assert [batch.rows for batch in batches] == [30, 30, 30, 10]
    of_a, of_b = ([bag for batch in batches for bag in bags(batch, name)] for name in "ab")
    assert of_a == [[i] * (i % 3) for i in range(100)]
    assert of_b == [[i] for i in range(100)]


def test_columns_of_nulls_alone(tmp_path):
    path = write(
        tmp_path / "x.parquet",
        {
            "id": pa.nulls(3),
            "other": pa.nulls(3),
            "tags": pa.array([[None], [], None], pa.list_(pa.null())),
            "price": pa.nulls(3),
        },
    )
    sparse = {"id": "hash", "other": Keys("int", missing=7), "tags": "int"}
    batch = one(path, sparse=sparse, dense=["price"], missing=-1)
    assert bags(batch, "id") == bags(batch, "tags") == [[], [], []]
    assert bags(batch, "other") == [[7], [7], [7]]
    assert batch.dense.tolist() == [[-1], [-1], [-1]]
    reader = ParquetReader(path, 10, label="price", on_error="skip")
    assert (sum(batch.rows for batch in reader), reader.skipped) == (0, 3)


DAYS = [date(2024, 1, 31), None, date(1969, 12, 31)]
PRICES = [Decimal("1.50"), None, Decimal("-0.05")]
DECIMALS = [pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(30, 2), pa.decimal256(60, 2)]


@pytest.mark.parametrize(
    ("column", "texts", "keys", "numbers"),
    [
        (pa.array([True, None, False]), ["1", "0"], [1, 0], [1, 0]),
        (pa.array(DAYS, pa.date32()), ["2024-01-31", "1969-12-31"], [19753, -1], [19753, -1]),
        (pa.array(DAYS, pa.date64()), ["2024-01-31", "1969-12-31"], [19753, -1], [19753, -1]),
        *((pa.array(PRICES, kind), ["1.50", "-0.05"], None, [1.5, -0.05]) for kind in DECIMALS),
        (pa.array([Decimal(10**17), None, Decimal(-3)]), [str(10**17), "-3"], [10**17, -3], None),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_booleans_dates_and_decimals(tmp_path, column, texts, keys, numbers):
    lists = pa.ListArray.from_arrays([0, 2, 3, 3], column)
    path = write(tmp_path / "x.parquet", {"one": column, "many": lists})
    sparse = {"one": "hash", "many": "hash"}
    batch = one(path, sparse=sparse)
    first, second = ([xxh64([text]).item()] for text in texts)
    assert bags(batch, "one") == [first, [], second]
    assert bags(batch, "many") == [first, second, []]
    if keys is not None:
        batch = one(path, sparse=dict.fromkeys(sparse, "int"))
        assert bags(batch, "one") == [[keys[0]], [], [keys[1]]]
        assert bags(batch, "many") == [[keys[0]], [keys[1]], []]
    if numbers is not None:
        batch = one(path, dense=["one"], missing=9)
        assert batch.dense.flatten().tolist() == pytest.approx([numbers[0], 9, numbers[1]])


def test_columns_in_several_pieces_or_none():
    """A column may have several pieces: Arrow splits a column that is too long for one array."""
    whole = pa.array([[1, 2], None, [3], []], pa.list_(pa.int64()))
    for pieces in ([whole], [whole[:1], whole[1:]], [whole[:0], whole]):
        values, lengths = arrow_columns.bags(pa.chunked_array(pieces), Keys("int"))
        assert (values.tolist(), lengths.tolist()) == ([1, 2, 3], [2, 0, 1, 0])
    for kind in (pa.int64(), pa.string(), pa.list_(pa.int64())):
        values, lengths = arrow_columns.bags(pa.chunked_array([], kind), Keys())
        assert (values.tolist(), lengths.tolist()) == ([], [])


def test_without_its_package_the_reader_says_what_is_missing(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", {"a": range(3)})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = r"^ParquetReader needs pyarrow: pip install '.*\[data\]'"
    for read in (lambda: ParquetReader(path, 5, label="a"), lambda: ParquetFiles().shape(path)):
        with pytest.raises(ImportError, match=message):
            read()


@pytest.mark.parametrize("more", [-1, 1])
def test_a_row_group_of_more_or_fewer_rows_than_its_file_says(tmp_path, monkeypatch, more):
    path = write(tmp_path / "x.parquet", {"a": range(20)}, row_group_size=10)
    reader = ParquetReader(path, 10, dense=["a"])
    read = parquet.ParquetFile.read_row_groups

    def odd(file, groups, **settings):
        table = read(file, groups, **settings)
        return pa.concat_tables([table, table])[: table.num_rows + more]

    monkeypatch.setattr(parquet.ParquetFile, "read_row_groups", odd)
    message = rf"x\.parquet, row group 0: {10 + more} rows, where the file's end says 10"
    with pytest.raises(DataFormatError, match=message):
        list(reader)


def test_numbers_in_a_dictionary():
    """Dictionary columns are accepted: this pyarrow reads them as plain ones, others may not."""
    column = pa.array([5, None, 5]).dictionary_encode()
    assert arrow_columns.floats(pa.chunked_array([column]), -1).tolist() == [5, -1, 5]
    for kind in ("int", "hash"):
        values, lengths = arrow_columns.bags(pa.chunked_array([column]), Keys(kind))
        assert lengths.tolist() == [1, 0, 1]
        assert values.equal(torch.tensor([5, 5]) if kind == "int" else xxh64([5, 5]))


def test_a_date_in_milliseconds_is_its_day():
    day = pa.chunked_array([pa.array([86_400_001], pa.int64()).view(pa.date64())])
    assert arrow_columns.floats(day, 0.0).tolist() == [1]
    keys, _ = arrow_columns.bags(day, Keys("int"))
    assert keys.tolist() == [1]
    assert arrow_columns.bags(day, Keys())[0].equal(xxh64(["1970-01-02"]))


@pytest.mark.parametrize("kind", ["int", "hash"])
def test_no_keys_are_int64_like_others(kind):
    for column in (pa.array([None], pa.int32()), pa.array([[]], pa.list_(pa.int64()))):
        keys, lengths = arrow_columns.bags(pa.chunked_array([column]), Keys(kind))
        assert (keys.dtype, keys.tolist(), lengths.dtype) == (torch.int64, [], torch.int64)
        assert lengths.tolist() == [0]


def test_settings_unless_told_otherwise(tmp_path):
    path = write(tmp_path / "x.parquet", {"a": pa.array([1.5, None])})
    assert one(path, dense=["a"]).dense.tolist() == [[1.5], [0.0]]
    whole = {"missing": 0.0, "on_error": "raise", "shuffle": False, "seed": 0}
    reader, other = (ParquetReader(path, 5, dense=["a"], **each) for each in ({}, whole))
    assert reader.state_dict() == other.state_dict()
    assert reader._on_error == other._on_error


@pytest.mark.parametrize("missing", [0, -1, 2**63 - 1, -(2**63)])
def test_any_key_may_stand_for_a_null(tmp_path, missing):
    path = write(tmp_path / "x.parquet", {"a": pa.array([5, None]), "b": pa.array([[], [7]])})
    batch = one(path, sparse={name: Keys("int", missing=missing) for name in "ab"})
    assert bags(batch, "a") == [[5], [missing]]
    assert bags(batch, "b") == [[missing], [7]]
