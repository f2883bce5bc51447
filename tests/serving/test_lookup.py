"""Lookups give the bits of a NumPy computation, with the kernels of every instruction set."""

import numpy as np
import pytest

from sparsekit.serving import Request, UnknownKeyError

from . import made
from .conftest import ISAS

PADDING = 5
# Lengths of bags: empty ones, those around a run of 256 and a chunk of 512, and longer ones.
LENGTHS = (0, 1, 3, 0, 1200, 256, 257, 511, 512, 513, 40, 0, 5, 2, 2, 300, 300)
DIMS = (1, 2, 3, 4, 10, 16, 64, 129, 300)


def table_of(rng, dim=16, n=300, **options):
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, n))
    fallbacks = 7 if options.get("miss") == "fallback" else 0
    keys = np.concatenate([keys, np.arange(fallbacks) + made.FIRST_FALLBACK])
    vectors = rng.normal(size=(len(keys), dim)).astype(np.float32)
    vectors[rng.random(vectors.shape) < 0.1] = 0
    return made.Table(keys, vectors, num_fallbacks=fallbacks, **options)


def bags_of(rng, table, lengths=LENGTHS, unknown=0.05):
    """Return keys with unknown ones and padding among them, offsets, and weights."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    known = table.keys[: len(table.keys) - table.num_fallbacks]
    keys = rng.choice(known, offsets[-1])
    unknown_keys = rng.random(len(keys)) < unknown
    keys[unknown_keys] = rng.integers(-(2**62), 2**62, unknown_keys.sum())
    keys[rng.random(len(keys)) < 0.05] = PADDING
    weights = rng.normal(size=len(keys)).astype(np.float32)
    if len(lengths) > 12:
        weights[offsets[12] : offsets[13]] = 0  # a bag with a weight of zero
    return keys, offsets, weights


def check(snapshot, table, keys, offsets, weights, combiner):
    got, found = snapshot.lookup(table.name, keys, offsets, weights, combiner, found=True)
    expected, expected_found = made.lookup(table, keys, offsets, weights, combiner)
    assert got.shape == expected.shape
    differ = got.view(np.uint32) != expected.view(np.uint32)
    assert not differ.any(), (np.argwhere(differ)[:3], got[differ][:3], expected[differ][:3])
    assert np.array_equal(found, expected_found)


def test_this_machine_has_more_than_one_instruction_set_or_says_so():
    assert "generic" in ISAS


@pytest.mark.parametrize("miss", ["initial", "zeros", "fallback"])
@pytest.mark.parametrize("row_format", made.FORMATS)
def test_pooling(opened, rng, isa, row_format, miss):
    for number, dim in enumerate(DIMS):
        table = table_of(rng, dim, row_format=row_format, miss=miss, padding_key=PADDING)
        snapshot = opened([table], f"{dim}.sks")
        combiners = made.COMBINERS if dim == 16 else made.COMBINERS[number % 4 :][:2]
        for combiner in combiners:
            keys, offsets, weights = bags_of(rng, table)
            check(snapshot, table, keys, offsets, None, combiner)
            if combiner not in ("none", "max"):
                check(snapshot, table, keys, offsets, weights, combiner)


@pytest.mark.parametrize("row_format", ["float32", "bfloat16", "float16"])
def test_odd_numbers(opened, rng, isa, row_format):
    """Zeros keep their sign without pooling, the first of equal maxima wins, NaN wins over all."""
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 6e-8, -1e-7, 1.0], np.float32)
    vectors = rng.choice(odd, (200, 24))
    table = made.Table(np.arange(200), vectors, row_format=row_format)
    snapshot = opened([table])
    keys, offsets = rng.integers(0, 200, 600), np.array([0, 1, 2, 5, 10, 20, 60, 600])
    with np.errstate(invalid="ignore"):
        for combiner in ("none", "max"):
            check(snapshot, table, keys, offsets, None, combiner)
        some, expected = (
            snapshot.lookup("table", keys, offsets, None, "sum"),
            made.lookup(table, keys, offsets, None, "sum")[0],
        )
    assert np.array_equal(some, expected, equal_nan=True)


@pytest.mark.parametrize("distribution", ["constant", "uniform"])
@pytest.mark.parametrize("row_format", ["float32", "bfloat16", "int8"])
def test_initial_vectors(opened, rng, row_format, distribution):
    """Only a table of bfloat16 rounds them, since training then has rounded them, too."""
    table = table_of(rng, 7, row_format=row_format, distribution=distribution, a=0.1, b=0.3)
    snapshot = opened([table])
    keys = rng.integers(-(2**62), 2**62, 50)
    check(snapshot, table, keys, None, None, "none")
    check(snapshot, table, keys, np.array([0, 20, 50]), None, "max")
    check(snapshot, table, keys, np.array([0, 20, 50]), None, "mean")


def test_a_negative_zero_that_is_an_initial_value_keeps_its_sign(opened):
    vectors = np.zeros((1, 5), np.float32)
    table = made.Table(np.array([1]), vectors, distribution="constant", a=-0.0)
    got = opened([table]).lookup("table", np.array([2]))
    assert np.signbit(got).all()


def test_padding_is_not_counted_and_not_looked_up(opened, rng):
    """Otherwise the mean of two keys and a padding key would divide by three."""
    vectors = np.array([[1.0], [3.0], [100.0]], np.float32)
    table = made.Table(np.array([1, 2, PADDING]), vectors, padding_key=PADDING, miss="error")
    keys = np.array([[1, PADDING, 2], [PADDING, PADDING, PADDING]])
    got, found = opened([table]).lookup("table", keys, combiner="mean", found=True)
    assert got.tolist() == [[2.0], [0.0]]
    assert found.tolist() == [[True, False, True], [False, False, False]]


def test_unknown_keys_can_be_an_error(opened, rng):
    snapshot = opened([table_of(rng, miss="error", name="films")])
    with pytest.raises(UnknownKeyError, match=r'model\.sks: table "films" has no key 123$'):
        snapshot.lookup("films", np.array([123]))


def test_keys_of_fallback_rows_are_not_for_lookups(opened, rng):
    snapshot = opened([table_of(rng, miss="fallback")])
    with pytest.raises(ValueError, match=r"key -9223372036854775802 .*fallback"):
        snapshot.lookup("table", np.array([made.FIRST_FALLBACK + 6]))
    snapshot.lookup("table", np.array([made.FIRST_FALLBACK + 7]))


def test_a_crowded_index(opened, rng):
    """Keys that share a home bucket spill over, from the last bucket to the first one."""
    seed, buckets = 99, 20
    candidates = rng.integers(-(2**63), 2**63 - 1, 3000)
    home = [h * buckets >> 64 for h in made.mixed(candidates ^ np.int64(seed)).tolist()]
    keys = candidates[np.array(home) == buckets - 1][:90]
    vectors = rng.normal(size=(90, 3)).astype(np.float32)
    table = made.Table(keys, vectors, index_seed=seed, num_buckets=buckets, miss="zeros")
    check(opened([table], verify=True), table, candidates, None, None, "none")


def test_many_features_in_one_call(opened, rng):
    """Features of several tables share chunks, and long and short bags follow one another."""
    tables = [
        table_of(rng, 8, name="a", row_format="int8", padding_key=PADDING),
        table_of(rng, 300, name="b", row_format="float32", miss="zeros", padding_key=PADDING),
        table_of(rng, 5, name="c", row_format="int4", miss="fallback", padding_key=PADDING),
    ]
    snapshot = opened(tables)
    requests, expected = [], []
    for number in range(60):
        table = tables[rng.integers(3)]
        lengths = np.concatenate([[0, 0], rng.integers(0, 40, 9), rng.choice([0, 600], 2), [1]])
        keys, offsets, weights = bags_of(rng, table, lengths)
        combiner = made.COMBINERS[number % 5]
        of_keys = None if combiner in ("none", "max") else weights
        requests.append(Request(table.name, keys, offsets, of_keys, combiner, number % 2 == 0))
        expected.append(made.lookup(table, keys, offsets, of_keys, combiner))
    for request, got, (vectors, found) in zip(
        requests, snapshot.lookup_many(requests), expected, strict=True
    ):
        if request.found:
            got, got_found = got
            assert np.array_equal(got_found, found)
        assert np.array_equal(got.view(np.uint32), vectors.view(np.uint32))


def test_a_table_without_rows(opened):
    table = made.Table(np.zeros(0, np.int64), np.zeros((0, 4), np.float32), miss="zeros")
    got, found = opened([table], verify=True).lookup("table", np.array([1, 0, -1]), found=True)
    assert not got.any()
    assert got.shape == (3, 4)
    assert not found.any()
