import gzip
import tracemalloc

import numpy as np
import pytest

from sparsekit.data import CriteoReader, Keys, criteo_sample, write_criteo_sample
from sparsekit.data.criteo_sample import CARDINALITIES, KEYS_PER_BAG


def all_rows(path, **settings):
    (batch,) = CriteoReader(path, 10**6, **settings)
    return batch


def test_equal_arguments_give_equal_bytes(tmp_path):
    files = {}
    for name, rows, seed in (("a", 2000, 1), ("b", 2000, 1), ("c", 2000, 2), ("d", 50_000, 1)):
        write_criteo_sample(tmp_path / name, rows, seed)
        files[name] = (tmp_path / name).read_bytes()
    assert files["a"] == files["b"]
    assert files["a"] != files["c"]
    assert files["d"].startswith(files["a"])
    assert files["d"].count(b"\n") == 50_000
    write_criteo_sample(tmp_path / "a.gz", 2000, 1)
    packed = (tmp_path / "a.gz").read_bytes()
    assert gzip.decompress(packed) == files["a"]
    assert packed[3:8] == bytes(5)  # gzip's header contains no name and no time
    write_criteo_sample(tmp_path / "none", 0)
    assert (tmp_path / "none").read_bytes() == b""


def test_it_looks_like_criteo(tmp_path):
    write_criteo_sample(tmp_path / "day", 50_000)
    batch = all_rows(tmp_path / "day")
    assert 0.2 < batch.label.mean() < 0.3
    assert (batch.dense < 0).any()
    assert (batch.dense < 0).any(0).sum() == 1
    assert batch.dense.frac().eq(0).all()
    lengths = batch.sparse.lengths().view(26, -1)
    assert lengths.max() == 1
    missing = (lengths == 0).float().mean(1).tolist()
    assert missing == pytest.approx(([0.0, 0.03, 0.1, 0.4] * 7)[:26], abs=0.01)
    for (values, _), most in zip(batch.sparse.to_dict().values(), CARDINALITIES, strict=True):
        distinct, counts = values.unique(return_counts=True)
        assert len(distinct) <= most
        assert len(distinct) > min(most, 50) * 0.9
        assert 0 <= distinct.min() <= distinct.max() < 2**32
        if most > 10**6:
            # Under the zipf law, the second key is 2 ** 1.1 times less frequent than the first.
            first, second = counts.sort(descending=True).values[:2].tolist()
            assert first / second == pytest.approx(2**1.1, rel=0.25)


def test_labels_depend_on_categories(tmp_path):
    write_criteo_sample(tmp_path / "day", 50_000)
    batch = all_rows(tmp_path / "day")
    ranges = []
    for name in ("C6", "C13", "C17", "C19"):  # 3 to 14 values, each with a different click rate
        values, offsets = batch.sparse[name]
        labels = batch.label[offsets.diff().bool()]
        groups = [labels[values == value] for value in values.unique()]
        rates = [group.mean().item() for group in groups if len(group) > 2000]
        ranges.append(max(rates) - min(rates))
    assert max(ranges) > 0.08  # about 0.02 by chance


def test_multi_hot(tmp_path):
    write_criteo_sample(tmp_path / "day", 200, multi_hot=True)
    batch = all_rows(tmp_path / "day", keys=Keys("hex", separator=","))
    lengths = batch.sparse.lengths().view(26, 200)
    for of_feature, most in zip(lengths, KEYS_PER_BAG, strict=True):
        assert set(of_feature.tolist()) <= {0, most}
    assert lengths.max() == 100


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="write_criteo_sample: rows must be in"):
        write_criteo_sample(tmp_path / "x", -1)
    with pytest.raises(TypeError, match="write_criteo_sample: seed must be an int"):
        write_criteo_sample(tmp_path / "x", 1, 0.5)

    def interrupt(rows):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_criteo_sample(tmp_path / "x", 10, on_rows=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded(tmp_path):
    peaks = []
    for rows in (100_000, 400_000):
        tracemalloc.start()
        write_criteo_sample(tmp_path / "x", rows)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_words_are_mixed_by_the_finalizer_of_murmurhash3():
    words = np.array([0, 1, 2, 0x12345678, 0xFFFFFFFF], np.uint32)
    expected = []
    for word in words.tolist():
        word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
        word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
        expected.append(word ^ word >> 16)
    assert criteo_sample._mix(words).tolist() == expected


@pytest.mark.parametrize("column", [0, 1, 5, 8])
def test_integers_are_written_with_all_their_digits(column):
    drawn = np.random.default_rng(3).exponential(4.0 ** (column + 1), 2000)
    expected = drawn.astype(int).clip(max=999_999).tolist()
    text = criteo_sample._integers(np.random.default_rng(3), 2000, column)
    found = [bytes(row[row != 0]).decode() for row in text]
    assert all(each.endswith("\t") for each in found)
    shown = [(int(each), number) for each, number in zip(found, expected, strict=True) if each[:-1]]
    assert all(abs(each) == number for each, number in shown)
    assert any(each < 0 for each, _ in shown) == (column == 1)
    assert len(shown) / 2000 == pytest.approx(1 - 0.05 * column, abs=0.05)


@pytest.mark.parametrize("multi_hot", [False, True])
def test_rows_are_written_in_blocks_of_bounded_keys(tmp_path, monkeypatch, multi_hot):
    keys = sum(KEYS_PER_BAG) if multi_hot else 26
    monkeypatch.setattr(criteo_sample, "_BLOCK_KEYS", 10 * keys + 1)
    written = []
    write_criteo_sample(tmp_path / "x", 25, multi_hot=multi_hot, on_rows=written.append)
    assert written == [10, 10, 5]
    assert (tmp_path / "x").read_bytes().count(b"\n") == 25


def test_a_sample_unless_told_otherwise(tmp_path):
    write_criteo_sample(tmp_path / "x", 20)
    write_criteo_sample(tmp_path / "y", 20, seed=0, multi_hot=False)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()
