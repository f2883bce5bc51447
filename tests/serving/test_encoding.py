"""Rows, indexes and checksums of snapshots, against NumPy, zlib and a bound."""

import zlib

import numpy as np
import pytest

from sparsekit.serving import encoding
from sparsekit.serving.format import BUCKET, ROW_FORMATS

MOST = {"int8": 255, "int4": 15}


def odd_rows(dim, seed=0):
    """Return rows of many scales: far from 0, constant, tiny, with zeros of both signs."""
    random = np.random.default_rng(seed)
    scales = 10.0 ** np.arange(-9, 5)
    rows = [random.normal(size=(30, dim)) * scale for scale in scales]
    rows += [value + random.normal(size=(30, dim)) * 1e-5 for value in (0.1, 0.2, -3.3, 1000.7)]
    rows += [np.full((1, dim), value) for value in (0.1, 0.2, -0.2, 0.0, -0.0, 65519.0, 1e-42)]
    rows += [random.choice([0.0, -0.0], (30, dim)), random.choice([0.0, -0.0, 1.0], (30, dim))]
    rows += [random.uniform(-65500, 65500, (30, dim)), random.uniform(0, 9e5, (30, dim))]
    return np.concatenate(rows).astype(np.float32)


def quantised(rows, word):
    """Encode rows by the formulas of docs/serving_format.md, in float32."""
    most, f4 = np.float32(MOST[word]), np.float32
    least = rows.min(1, keepdims=True)
    first = np.take_along_axis(rows, (rows == least).argmax(1)[:, None], 1)
    bias = first.astype(np.float16)
    width = rows.max(1, keepdims=True) - bias.astype(f4)
    scale = (width / most).astype(np.float16)
    scale[scale == 0] = 1
    q = np.rint((rows - bias.astype(f4)) * (f4(1) / scale.astype(f4))).clip(0, most)
    q = q.astype(np.uint8)
    if word == "int4":
        q = np.pad(q, ((0, 0), (0, q.shape[1] % 2)))
        q = q[:, ::2] | q[:, 1::2] << 4
    return np.concatenate([q, scale.view(np.uint8), bias.view(np.uint8)], 1)


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("word", MOST)
def test_quantised_rows_are_those_of_the_formulas(word, dim):
    rows = odd_rows(dim)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = quantised(rows, word)
    finite = np.isfinite(expected[:, -4:].copy().view(np.float16)).all(1)
    assert finite.sum() > len(rows) / 2
    found = encoding.encode_rows(rows[finite], word)
    np.testing.assert_array_equal(found, expected[finite])
    scale, bias = found[:, -4:].copy().view(np.float16).astype(np.float32).T[..., None]
    q = found[:, :-4]
    if word == "int4":
        q = np.stack([q & 15, q >> 4], 2).reshape(len(q), -1)[:, :dim]
    np.testing.assert_array_equal(
        encoding.decode_rows(found, word, dim), scale * q.astype(np.float32) + bias
    )


@pytest.mark.parametrize("dim", [2, 16, 65])
@pytest.mark.parametrize("word", MOST)
def test_vectors_are_within_the_bound_of_the_format(word, dim):
    rows, most = odd_rows(dim, seed=1), MOST[word]
    with np.errstate(over="ignore", invalid="ignore"):
        rows = rows[np.isfinite(quantised(rows, word)[:, -4:].copy().view("f2")).all(1)]
    encoded = encoding.encode_rows(rows, word)
    error = np.abs(encoding.decode_rows(encoded, word, dim) - rows.astype(np.float64)).max(1)
    scale, bias = encoded[:, -4:].copy().view(np.float16).astype(np.float64).T
    least, largest = rows.min(1).astype(np.float64), rows.max(1).astype(np.float64)
    width = largest - bias
    rounding = 2.0**-20 * np.maximum(abs(least), abs(largest))
    bound = np.maximum(abs(scale) / 2, abs(bias - least) + abs(width - most * scale))
    replaced = np.float16(width / most) == 0
    assert replaced.any()
    bound = np.where(replaced, np.maximum(abs(bias - least), abs(width)), bound) + rounding
    assert (error <= bound).all()
    assert (error > bound / 2).mean() > 0.15  # it is no loose bound
    # The relations of bias and scale to the row, by the precision of float16.
    assert (abs(bias - least) <= np.maximum(2.0**-11 * abs(least), 2.0**-25)).all()
    far = abs(width - most * scale) > np.maximum(2.0**-11 * abs(width), most * 2.0**-25)
    assert (replaced | ~far).all()


def test_float16_rounds_as_numpy_does():
    bits = np.arange(65536, dtype=np.uint16)
    halves = bits.view(np.float16)
    wide = halves.astype(np.float32)[:, None]
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(
        encoding.decode_rows(bits.view(np.uint8).reshape(-1, 2), "float16", 1)[finite], wide[finite]
    )
    # Numbers in the middle of two float16 numbers, and those next to them.
    ascending = np.sort(wide[finite].reshape(-1))
    middle = (ascending[1:] + ascending[:-1]) / 2
    rows = np.concatenate([np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)])
    found = encoding.encode_rows(rows[:, None], "float16").view(np.float16)
    np.testing.assert_array_equal(found.reshape(-1), rows.astype(np.float16))


def test_bfloat16_rounds_as_torch_does():
    torch = pytest.importorskip("torch")
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), dtype=torch.int32)
    bits[:50_000] = bits[:50_000] & ~0x7FFF | 0x8000 & bits[:50_000]  # in the middle of two
    numbers = bits.view(torch.float32)
    rounded = numbers.bfloat16()
    numbers, rounded = (each[rounded.isfinite()] for each in (numbers, rounded))
    found = encoding.encode_rows(numbers.numpy()[:, None], "bfloat16")
    assert torch.equal(torch.from_numpy(found.view(np.int16)[:, 0]), rounded.view(torch.int16))
    wide = encoding.decode_rows(found, "bfloat16", 1)
    np.testing.assert_array_equal(wide[:, 0], rounded.float().numpy())


REFUSED = {
    "float32": [np.nan],
    "bfloat16": [np.nan, 3.4e38],
    "float16": [np.nan, np.inf, -np.inf, 65520.0, -1e30],
    "int8": [np.nan, np.inf, -np.inf, -65520.0, 65520.0 * 255],
    "int4": [np.nan, np.inf, -np.inf, -65520.0, 65520.0 * 15],
}
HELD = {
    "float32": [np.inf, -np.inf, 3.4e38, 1e-45],
    "bfloat16": [np.inf, -np.inf, 3.38e38],
    "float16": [65519.0, -65519.0, 1e-9],
    "int8": [-65519.0, 65500.0 * 255],
    "int4": [-65519.0, 65500.0 * 15],
}


@pytest.mark.parametrize("place", [0, 3, 16, 36])
@pytest.mark.parametrize("word", ROW_FORMATS)
def test_what_a_format_cannot_hold_is_refused(word, place):
    for value in REFUSED[word]:
        rows = np.zeros((5, 37), np.float32)
        rows[3:, place] = value
        with pytest.raises(encoding.RowError, match=f"row 3 cannot be stored as {word}") as caught:
            encoding.encode_rows(rows, word)
        assert caught.value.row == 3
    for value in HELD[word]:
        rows = np.zeros((5, 37), np.float32)
        rows[3:, place] = value
        encoding.encode_rows(rows, word)


def test_float64_beyond_float32_is_refused():
    with pytest.raises(encoding.RowError, match=r"row 1 .*: 1e\+39 is beyond its range"):
        encoding.encode_rows(np.array([[1.0], [1e39]]), "float32")
    assert np.isinf(encoding.encode_rows(np.array([[np.inf]]), "float32").view(np.float32)).all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"rows must be one of float32, .*; got 'int9'"):
        encoding.row_bytes("int9", 3)
    with pytest.raises(ValueError, match=r"uint8 \[n, 7\], got uint8 \[2, 6\]"):
        encoding.decode_rows(np.zeros((2, 6), np.uint8), "int8", 3)


@pytest.mark.parametrize("size", [*range(50), 63, 64, 65, 1000])
def test_crc32_is_that_of_zlib(size):
    data = np.random.default_rng(size).bytes(size)
    assert encoding.crc32(data) == zlib.crc32(data)
    for cut in (0, 1, size // 2, size):
        assert encoding.crc32(data[cut:], encoding.crc32(data[:cut])) == zlib.crc32(data)


def home_of(keys, seed, num_buckets):
    x = (keys ^ seed).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.array([int(each) * num_buckets >> 64 for each in x])


@pytest.mark.parametrize("num_buckets", [None, "full"])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 10, 997, 30_000])
def test_an_index_has_each_key_where_a_search_finds_it(n, num_buckets):
    random = np.random.default_rng(n)
    keys = np.unique(random.integers(-(2**63), 2**63, n))
    keys[: n // 2] = np.arange(n // 2)  # 0, the key of empty slots, among them
    keys = random.permutation(np.unique(keys))
    count = encoding.num_buckets(len(keys)) if num_buckets is None else max(1, -(-len(keys) // 5))
    buckets = np.full(count * 64, 77, np.uint8)
    encoding.build_index(keys, 5, buckets)
    buckets = buckets.view(BUCKET)
    used = buckets["rows"] >= 0
    assert used.sum() == len(keys)
    assert (np.diff(used.astype(int), axis=1) <= 0).all()  # slots in use come first
    assert not buckets["keys"][~used].any()
    assert (buckets["rows"][~used] == -1).all()
    rows = buckets["rows"][used]
    np.testing.assert_array_equal(buckets["keys"][used], keys[rows])
    # Every bucket between home and place is full, and counts the keys that have passed it.
    place = np.nonzero(used)[0]
    passed = np.zeros(count, int)
    home = home_of(keys[rows], np.int64(5), count)
    for begin, end in zip(home.tolist(), place.tolist(), strict=True):
        while begin != end:
            passed[begin] += 1
            begin = (begin + 1) % count
    np.testing.assert_array_equal(buckets["spilled"], passed)
    assert used[passed > 0].all()
    if num_buckets is None and n == 30_000:
        assert 1 + passed.sum() / n < 1.13  # buckets that the search for a key reads


def test_keys_that_occur_twice_are_named():
    keys = np.arange(10_000) * 3
    keys[7_000] = keys[20]
    with pytest.raises(ValueError, match="key 60 occurs twice, in rows 20 and 7000"):
        encoding.build_index(keys, 1, np.zeros(64 * encoding.num_buckets(len(keys)), np.uint8))
    with pytest.raises(ValueError, match="1 buckets cannot hold 6 keys"):
        encoding.build_index(np.arange(6), 1, np.zeros(64, np.uint8))
