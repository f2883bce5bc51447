"""sparsekit.hashing.SplitHashEncoder: the rule, its known answers and what it must hold."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxh64_oracle import unsigned

import sparsekit
from sparsekit.hashing import SplitHashEncoder

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

VALUES = st.one_of(st.none(), st.integers(), st.binary(max_size=9), st.sampled_from("abc"))


def expected_columns(value, length, splits=4, salt=0):
    """By the formula, in Python's whole numbers."""
    h, bucket = unsigned(value, salt), max(32, 4 * math.ceil(math.sqrt(length)))
    if splits == 1:
        return [h % bucket]
    w = bucket // 4
    return [k * w + (h >> (48 - 16 * k) & 0xFFFF) % w for k in range(4)]


def columns_of(encoder, columns):
    keys, offsets = encoder.encode(columns, to="bags")
    n = len(offsets) - 1
    assert offsets.tolist() == list(range(0, n * encoder.row_nnz + 1, encoder.row_nnz))
    return keys.view(n, encoder.row_nnz)


@pytest.mark.parametrize(
    ("value", "length", "w", "chunks"),
    [
        ("3", 7, 8, (6, 2, 6, 4)),
        ("item_42", 100_000, 317, (309, 155, 125, 5)),
        ("", 7, 8, (6, 7, 0, 1)),
    ],
)
def test_the_known_answers(value, length, w, chunks):
    encoder = SplitHashEncoder({"a": length})
    assert encoder.width == 4 * w
    expected = [k * w + chunk for k, chunk in enumerate(chunks)]
    assert columns_of(encoder, {"a": [value]}).tolist() == [expected]
    one_hot = columns_of(SplitHashEncoder({"a": length}, 1), {"a": [value]})
    assert one_hot.item() == unsigned(value) % (4 * w)


@pytest.mark.parametrize(("length", "lost"), [(64, 1), (10_000, 1), (100_000, 0), (1_000_000, 2)])
def test_the_known_numbers_of_distinct_tuples(length, lost):
    (found,) = SplitHashEncoder({"a": length}).collisions({"a": pa.array(map(str, range(length)))})
    assert (found.values, found.codes, found.observed) == (length, length - lost, lost)
    assert found.expected == pytest.approx(0.5, rel=0.03)


@given(
    value=VALUES,
    length=st.integers(1, 2**32),
    splits=st.sampled_from([4, 1]),
    salt=st.integers(0, 2**64 - 1),
)
@settings(max_examples=100)
def test_any_value_has_the_columns_of_the_formula(value, length, splits, salt):
    encoder = SplitHashEncoder({"a": length}, splits, salts={"a": salt})
    found = columns_of(encoder, {"a": [value]}).tolist()
    assert found == [expected_columns(value, length, splits, salt)]


def test_widths():
    lengths = {"a": 1, "b": 64, "c": 65, "d": 100_000, "e": 2**32, "f": 65535**2 + 1}
    encoder = SplitHashEncoder(lengths)
    assert list(encoder.buckets.values()) == [32, 32, 36, 1268, 262144, 262144]
    assert list(encoder.starts.values()) == [0, 32, 64, 100, 1368, 263512]
    assert (encoder.width, encoder.row_nnz) == (525656, 24)
    assert SplitHashEncoder(lengths, 1).row_nnz == 6


def test_a_code_does_not_depend_on_neighbours_or_frame():
    encoder = SplitHashEncoder({"a": 1000})
    alone = columns_of(encoder, {"a": ["x"]})[0]
    for frame in (["x", "y"], ["a"] * 5 + ["x"], [None, 7, "x", b"\xff"], np.array(["x", "yz"])):
        row = columns_of(encoder, {"a": frame, "b": [0.5]})[list(frame).index("x")]
        assert torch.equal(row, alone)


def test_a_code_does_not_depend_on_pythonhashseed():
    program = (
        "from sparsekit.hashing import SplitHashEncoder as E; encoder = E({'a': 50, 'b': 9000}); "
        "print(encoder.encode({'b': ['x', 3], 'a': [None, b'y']}, to='bags')[0].tolist())"
    )
    path = [str(Path(sparsekit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [("x", None), (3, b"y")]
    expected = [
        column
        for b, a in rows
        for column in expected_columns(a, 50) + [32 + c for c in expected_columns(b, 9000)]
    ]
    assert json.loads(run.stdout) == expected


def test_int_str_bytes_and_none_follow_the_rules():
    columns = columns_of(SplitHashEncoder({"a": 10_000}), {"a": [3, "3", b"3", None, "", "None"]})
    assert columns[0].equal(columns[1])
    assert columns[0].equal(columns[2])
    assert columns[3].equal(columns[4])
    assert not columns[3].equal(columns[5])


class Frame:
    """What the encoder sees of a DataFrame: a column by its name."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, name):
        return np.array(self.data[name], object)


@pytest.mark.parametrize("table", [pa.table, pa.record_batch, Frame])
def test_all_tables_give_the_same(table):
    data = {"city": ["Bern", None, "Zürich"], "day": [1, 2, 3], "other": [0.5, 0.5, 0.5]}
    encoder = SplitHashEncoder({"day": 7, "city": 5000})
    assert columns_of(encoder, table(data)).equal(columns_of(encoder, data))


def some_data(n):
    draw = np.random.default_rng(0)
    return {name: draw.integers(0, high, n) for name, high in LENGTHS.items()}


LENGTHS = {"day": 7, "city": 1000, "item": 100_000}


@pytest.mark.parametrize("splits", [4, 1])
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("signed", [False, True])
def test_csr_has_exactly_its_ones_in_each_row_and_sorted_indices(n, splits, signed):
    encoder = SplitHashEncoder(LENGTHS, splits, signed=signed)
    matrix = encoder.encode(some_data(n), to="scipy")
    assert matrix.shape == (n, encoder.width)
    assert np.diff(matrix.indptr).tolist() == [3 * splits] * n
    assert matrix.data.dtype == np.float32
    assert (abs(matrix.data) == 1).all()
    assert signed or (matrix.data == 1).all()
    assert (np.diff(matrix.indices.reshape(n, 3 * splits)) > 0).all()
    matrix.check_format(full_check=True)
    tensor = encoder.encode(some_data(n), to="torch")
    parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    torch.sparse_csr_tensor(*parts, tensor.shape, check_invariants=True)
    for part, of_scipy in zip(parts, (matrix.indptr, matrix.indices, matrix.data), strict=True):
        assert part.tolist() == of_scipy.tolist()
    assert tensor.shape == matrix.shape


def test_signs_are_as_documented_and_cancel_on_average():
    encoder = SplitHashEncoder({"a": 50_000}, signed=True)
    data = {"a": range(20_000)}
    signs = encoder.encode(data).values().view(-1, 4)
    for value in (0, 19_999):
        h = unsigned(value)
        mixed = (h ^ (h >> 32)) * 0x9E3779B97F4A7C15 % 2**64
        assert signs[value].tolist() == [1 - 2 * (mixed >> (63 - k) & 1) for k in range(4)]
    # They are independent of one another and of the columns.
    assert signs.mean(0).abs().max() < 0.03  # 4 standard deviations
    assert (signs.T @ signs / 20_000 - torch.eye(4)).abs().max() < 0.03
    columns = encoder.encode(data).col_indices().view(-1, 4)
    assert signs[columns[:, 0] % 2 == 0, 0].mean().abs() < 0.05


def test_collisions_of_a_narrow_code_are_as_many_as_expected():
    values = {"a": [*range(3000), *range(100)]}
    split, one_hot = SplitHashEncoder({"a": 50}), SplitHashEncoder({"a": 50}, 1)
    (found,) = split.collisions(values)
    assert (found.feature, found.values) == ("a", 3000)
    assert found.codes == len(set(map(tuple, columns_of(split, values).tolist())))
    assert found.expected == pytest.approx(3000 - 8**4 * (1 - (1 - 8**-4) ** 3000))
    assert found.observed == pytest.approx(found.expected, rel=0.1)
    (found,) = one_hot.collisions(values)
    assert (found.codes, found.observed, found.expected) == (32, 2968, pytest.approx(2968))
    (found,) = split.collisions({"a": []})
    assert (found.values, found.codes, found.expected) == (0, 0, 0)


def test_save_and_load_round_trips(tmp_path):
    lengths = {"day": 7, "ïtem": 1000}
    encoder = SplitHashEncoder(lengths, 1, salts={"ïtem": 2**64 - 1}, signed=True)
    encoder.save(tmp_path / "encoder.json")
    loaded = SplitHashEncoder.load(tmp_path / "encoder.json", lengths)
    assert vars(loaded) == vars(encoder)
    assert json.loads((tmp_path / "encoder.json").read_text())["splits"] == 1


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"day": 7, "item": 1001}, "feature 'item' was saved with length 1000, but .* has 1001"),
        ({"item": 1000, "day": 7}, r"features \['day', 'item'\], in this order, but"),
        ({"day": 7}, r"feature_lengths has \['day'\]"),
    ],
)
def test_changed_feature_lengths_give_a_clear_error(tmp_path, lengths, message):
    SplitHashEncoder({"day": 7, "item": 1000}).save(tmp_path / "encoder.json")
    with pytest.raises(ValueError, match=rf"encoder\.json: .*{message}"):
        SplitHashEncoder.load(tmp_path / "encoder.json", lengths)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other", "version": 1}'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x").write_text(content)
    with pytest.raises(ValueError, match=r"x: not what SplitHashEncoder\.save has written"):
        SplitHashEncoder.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("lengths", "options", "error", "message"),
    [
        ({}, {}, ValueError, "feature_lengths must map"),
        ([7], {}, ValueError, "feature_lengths must map"),
        ({"a": 0}, {}, ValueError, r"feature_lengths\['a'\] must be in \[1, 4294967296\], got 0"),
        ({"a": 2**32 + 1}, {}, ValueError, r"feature_lengths\['a'\] must be in"),
        ({"a": 1.5}, {}, TypeError, r"feature_lengths\['a'\] must be an int, got 1.5"),
        ({"a": 5}, {"splits": 2}, ValueError, "splits must be 4, or 1 for one-hot; got 2"),
        ({"a": 5}, {"salts": {"b": 1}}, ValueError, r"salts names \['b'\]"),
        ({"a": 5}, {"salts": {"a": -1}}, ValueError, r"salts\['a'\]: seed must be in"),
    ],
)
def test_bad_settings_are_refused(lengths, options, error, message):
    with pytest.raises(error, match=f"SplitHashEncoder: .*{message}"):
        SplitHashEncoder(lengths, **options)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"a": [1]}, ValueError, "columns has no column 'b'"),
        (pa.table({"a": [1]}), ValueError, "columns has no column 'b'"),
        ({"a": [1, 2], "b": [1]}, ValueError, "feature 'b' has 1 values, but 'a' has 2"),
        ({"a": [1], "b": [0.5]}, TypeError, r"feature 'b': values\[0\] is of type float"),
        ({"a": ["\ud800"], "b": [1]}, ValueError, r"feature 'a': values\[0\] is a str with a"),
    ],
)
def test_bad_columns_are_refused(columns, error, message):
    with pytest.raises(error, match=f"SplitHashEncoder: .*{message}"):
        SplitHashEncoder({"a": 5, "b": 5}).encode(columns)


def test_what_cannot_be_returned_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="to must be 'torch', 'scipy' or 'bags', got 'dense'"):
        SplitHashEncoder({"a": 5}).encode({"a": [1]}, to="dense")
    with pytest.raises(ValueError, match="bags have no place for signs"):
        SplitHashEncoder({"a": 5}, signed=True).encode({"a": [1]}, to="bags")
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ImportError, match=r"pip install sparsekit\[data\]"):
        SplitHashEncoder({"a": 5}).encode({"a": [1]}, to="scipy")
