"""Tests of the formula, options and errors of sparsekit.hashing.SplitHashEncoder.

Known answers and the other requirements are in systems/test_s0_wide.py.
"""

import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from split_hash import columns_of, expected_columns
from xxh64_oracle import unsigned

from sparsekit.hashing import SplitHashEncoder, split_hash

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

VALUES = st.one_of(st.none(), st.integers(), st.binary(max_size=9), st.sampled_from("abc"))


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


HASHES = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -0x0123456789ABCDEF]


@pytest.mark.parametrize("splits", [4, 1])
def test_hashes_at_the_ends_of_their_range(monkeypatch, splits):
    monkeypatch.setattr(split_hash, "xxh64", lambda *_: torch.tensor(HASHES))
    encoder = SplitHashEncoder({"a": 50_000}, splits, signed=True)
    matrix, w = encoder.encode({"a": HASHES}), encoder.width // splits
    for h, columns, signs in zip(
        [h % 2**64 for h in HASHES],
        matrix.col_indices().view(-1, splits).tolist(),
        matrix.values().view(-1, splits).tolist(),
        strict=True,
    ):
        shifts = (48, 32, 16, 0)
        of_blocks = [k * w + (h >> shift & 0xFFFF) % w for k, shift in enumerate(shifts)]
        assert columns == ([h % w] if splits == 1 else of_blocks)
        mixed = (h ^ (h >> 32)) * 0x9E3779B97F4A7C15 % 2**64
        assert signs == [1 - 2 * (mixed >> (63 - k) & 1) for k in range(splits)]


@pytest.mark.parametrize("signed", [False, True])
def test_torch_and_scipy_get_the_same_matrix(signed):
    encoder, data = SplitHashEncoder({"a": 7, "b": 99}, signed=signed), {"a": "xyz", "b": [1, 2, 3]}
    data["a"] = list(data["a"])
    tensor, matrix = encoder.encode(data), encoder.encode(data, to="scipy")
    assert (tensor.dtype, matrix.dtype) == (torch.float32, np.float32)
    assert tensor.to_dense().tolist() == matrix.toarray().tolist()
    assert matrix.has_canonical_format


@pytest.mark.parametrize(("width", "dtype"), [(2**31 - 1, np.int32), (2**32, np.int64)])
def test_scipy_gets_the_indices_that_it_would_choose(width, dtype):
    keys, offsets = torch.tensor([width - 1]), torch.tensor([0, 1])
    matrix = split_hash._scipy_csr(torch.ones(1), keys, offsets, (1, width))
    assert matrix.indices.tolist() == [width - 1]
    assert (matrix.indices.dtype, matrix.indptr.dtype) == (dtype, dtype)


def test_widths():
    lengths = {"a": 1, "b": 64, "c": 65, "d": 100_000, "e": 2**32, "f": 65535**2 + 1}
    encoder = SplitHashEncoder(lengths)
    assert list(encoder.buckets.values()) == [32, 32, 36, 1268, 262144, 262144]
    assert list(encoder.starts.values()) == [0, 32, 64, 100, 1368, 263512]
    assert (encoder.width, encoder.row_nnz) == (525656, 24)
    assert SplitHashEncoder(lengths, 1).row_nnz == 6


class Frame:
    """Stand-in for a DataFrame: returns a column by its name."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, name):
        return np.array(self.data[name], object)


@pytest.mark.parametrize("table", [pa.table, pa.record_batch, Frame])
def test_all_tables_give_the_same(table):
    data = {"city": ["Bern", None, "Zürich"], "day": [1, 2, 3], "other": [0.5, 0.5, 0.5]}
    encoder = SplitHashEncoder({"day": 7, "city": 5000})
    assert columns_of(encoder, table(data)).equal(columns_of(encoder, data))


def test_signs_are_as_documented_and_cancel_on_average():
    encoder = SplitHashEncoder({"a": 50_000}, signed=True)
    data = {"a": range(20_000)}
    signs = encoder.encode(data).values().view(-1, 4)
    for value in (0, 19_999):
        h = unsigned(value)
        mixed = (h ^ (h >> 32)) * 0x9E3779B97F4A7C15 % 2**64
        assert signs[value].tolist() == [1 - 2 * (mixed >> (63 - k) & 1) for k in range(4)]
    # Signs are independent of one another and of the columns.
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


@pytest.mark.parametrize("splits", [4, 1])
@pytest.mark.parametrize("signed", [False, True])
def test_save_and_load_keep_all_settings(tmp_path, splits, signed):
    encoder = SplitHashEncoder({"b": 5, "a": 7}, splits, salts={"a": 2**64 - 1}, signed=signed)
    encoder.save(tmp_path / "x")
    loaded = SplitHashEncoder.load(tmp_path / "x")
    assert vars(loaded) == vars(encoder)
    assert list(loaded.starts) == ["b", "a"]
    text = f"SplitHashEncoder({{'b': 5, 'a': 7}}, splits={splits}, signed={signed})"
    assert repr(loaded) == text
    assert (tmp_path / "x").read_text().endswith("}\n")


def test_a_file_of_another_version_is_refused(tmp_path):
    SplitHashEncoder({"a": 5}).save(tmp_path / "x")
    text = (tmp_path / "x").read_text()
    (tmp_path / "x").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="another format or version"):
        SplitHashEncoder.load(tmp_path / "x")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other", "version": 1}'])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "x").write_text(content)
    with pytest.raises(ValueError, match=r"x: not what SplitHashEncoder\.save has written"):
        SplitHashEncoder.load(tmp_path / "x")


def test_a_file_of_other_lengths_is_refused(tmp_path):
    SplitHashEncoder({"a": 5, "b": 7}).save(tmp_path / "x")
    loaded = SplitHashEncoder.load(tmp_path / "x", {"a": 5, "b": 7})
    assert loaded.feature_lengths == {"a": 5, "b": 7}
    with pytest.raises(ValueError, match=r"feature 'b' was saved with length 7, but .* has 8"):
        SplitHashEncoder.load(tmp_path / "x", {"a": 5, "b": 8})
    for others in ({}, {"a": 5}, {"b": 7, "a": 5}, {"a": 5, "c": 7}):
        with pytest.raises(ValueError, match=r"features \['a', 'b'\], in this order, but"):
            SplitHashEncoder.load(tmp_path / "x", others)


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
        ({"a": 5}, {"salts": {"a": 0.5}}, TypeError, r"salts\['a'\]: seed must be an int"),
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
        ({"a": [1], "b": [1, 2]}, ValueError, "feature 'b' has 2 values, but 'a' has 1"),
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
    with pytest.raises(ImportError, match=r"pip install 'sparsekit-torch\[data\]'"):
        SplitHashEncoder({"a": 5}).encode({"a": [1]}, to="scipy")
