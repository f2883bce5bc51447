"""Predicted hit rates are those of plain Python and of real tables."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit.capacity import CapacityCurve, Policy, measured
from sparsekit.capacity.curve import POLICIES
from sparsekit.data import CriteoReader, write_criteo_sample
from sparsekit.datasets import DatasetUnavailableError, adult

from .plain import hit_rate, zipf

EXTREMES = [0, -1, -(2**63), 2**63 - 1]


def curve_of(lookups, **options):
    curve = CapacityCurve(**options)
    for keys in lookups:
        curve.add(keys)
    return curve.read()


def test_few_keys_are_exact():
    lookups = zipf(300, 40, 1300, 0.3)
    lookups[5] = torch.empty(0, dtype=torch.int64)
    lookups[50] = torch.tensor(EXTREMES * 2, dtype=torch.int64)
    found = curve_of(lookups, rows=[45, 60, 150, 10**6], ttls=[1, 7, 40, 300])
    assert found.rate == 1
    assert found.lookups == 1300
    assert found.distinct == len(torch.cat(lookups).unique())
    assert found.keys == sum(len(keys.unique()) for keys in lookups)
    assert found.most_at_once == max(len(keys.unique()) for keys in lookups)
    plain = [keys.tolist() for keys in lookups]
    for policy, rows, predicted in found.points:
        options = {"ttl": policy.ttl}
        if policy.ttl is None:
            options = {"score": policy.score, "admission": policy.admission, "rows": rows}
        expected = hit_rate(plain, halve_every=1000, **options)
        assert predicted == pytest.approx(expected, abs=1e-12), (policy, rows)
    assert len(found.points) == 4 * (4 + 1) + 4


def test_how_lookups_are_cut_into_pieces_does_not_matter():
    lookups = zipf(3000, 128, 400, 1)
    at_once, piecewise = curve_of(lookups), CapacityCurve()
    for keys in lookups:
        piecewise.add(keys)
        piecewise.read()
    again = piecewise.read()
    for before, after in zip(at_once.points, again.points, strict=False):
        assert after.policy == before.policy
    rates = {(p.policy, p.rows): p.hit_rate for p in at_once.points if p.policy.ttl is None}
    for point in again.points:
        if (point.policy, point.rows) in rates:
            assert point.hit_rate == pytest.approx(rates[point.policy, point.rows], abs=1e-12)


def adult_values():
    """Return lookups of the values of 256 people, three times in other orders."""
    try:
        everyone = adult()
    except DatasetUnavailableError as error:
        pytest.skip(str(error))
    texts = [np.char.add(f"{name}=", values) for name, values in everyone.columns.items()]
    keys = sparsekit.hashing.xxh64(np.stack(texts, 1).ravel()).view(len(everyone), -1)
    orders = [torch.randperm(len(keys), generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    return [keys[rows].flatten() for order in orders for rows in order.split(256)]


def criteo_values(folder):
    """Return lookups of the feature of a file in Criteo's format with the most values."""
    write_criteo_sample(folder / "day", rows=150_000)
    reader = CriteoReader(folder / "day", 1024)
    return [batch.sparse["C10"][0] for batch in reader]


@pytest.mark.parametrize(
    ("name", "sample", "rows", "ttls"),
    [
        ("zipf", 16384, (8000, 16000, 32000, 64000, 128_000), (5, 10, 20, 50, 100)),
        ("adult", 16384, (1000, 2000, 5000, 10000, 20000), (2, 5, 20, 50, 100)),
        ("criteo", 16384, (2000, 4000, 8000, 16000, 32000), (2, 5, 20, 50, 100)),
    ],
)
def test_a_sample_is_within_a_point_of_real_tables(tmp_path, name, sample, rows, ttls):
    if name == "zipf":
        lookups = zipf(300_000, 2048, 300, 5)
    else:
        lookups = adult_values() if name == "adult" else criteo_values(tmp_path)
    found = curve_of(lookups, rows=rows, ttls=ttls, sample=sample)
    assert found.rate <= 0.5
    assert found.keys == sum(len(keys.unique()) for keys in lookups)
    assert found.distinct == pytest.approx(len(torch.cat(lookups).unique()), rel=0.005)
    rates = measured(found, lookups)
    errors = {
        (str(point.policy), point.policy.ttl, point.rows): point.hit_rate - rate
        for point, rate in zip(found.points, rates, strict=True)
    }
    assert len(errors) == len(found.points) >= 4 * 5 + 5
    assert {name: error for name, error in errors.items() if abs(error) > 0.01} == {}
    assert max(rates) - min(rates) > 0.2


def test_rows_of_a_ttl_are_those_in_use():
    lookups = zipf(100_000, 1024, 400, 5)
    found = curve_of(lookups, policies=(), ttls=(20, 100), sample=16384)
    for policy, rows, _ in found.points:
        layer = sparsekit.Embedding(None, 1, ttl=policy.ttl)
        most = 0
        with torch.no_grad():
            for keys in lookups:
                layer(keys)
                most = max(most, len(layer.table))
        assert rows == pytest.approx(most, rel=0.05)


def bytes_of(value, seen):
    """Return the bytes of all arrays and tensors that an object leads to."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, np.ndarray | torch.Tensor):
        return value.nbytes
    if isinstance(value, torch.nn.Module):
        return sum(tensor.nbytes for tensor in value.buffers())
    inner = vars(value).values() if hasattr(value, "__dict__") else ()
    if isinstance(value, list | tuple):
        inner = value
    return sum(bytes_of(each, seen) for each in inner)


def test_memory_does_not_grow_with_keys():
    curve, sizes = CapacityCurve(sample=2048), []
    for start in range(0, 6_000_000, 20_000):
        curve.add(torch.arange(start, start + 20_000))
        if start in (1_980_000, 5_980_000):
            curve.read()
            sizes.append(bytes_of(curve, set()))
    assert curve.read().distinct == pytest.approx(6_000_000, rel=0.005)
    assert curve.read().rate == 2**-12
    assert sizes[1] <= 1.1 * sizes[0] < 12e6


def test_sizes_double_below_the_number_of_keys():
    found = curve_of(zipf(200_000, 1024, 300, 5), policies=[Policy()], ttls=())
    rows = [point.rows for point in found.points]
    assert len(rows) == 6
    assert [b / a for a, b in pairwise(rows[:5])] == [2] * 4
    assert rows[4] < rows[5]
    assert rows[5] == pytest.approx(found.distinct, rel=0.05)
    assert [point.hit_rate for point in found.points] == sorted(p.hit_rate for p in found.points)


def test_ttls_are_powers_of_two_below_the_lookups():
    found = curve_of(zipf(2000, 64, 100, 1), policies=())
    assert [point.policy.ttl for point in found.points] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("lookups", [0, 1, 3])
def test_no_key_at_all(lookups):
    found = curve_of([torch.empty(0, dtype=torch.int64)] * lookups, rows=[5])
    assert (found.lookups, found.keys, found.distinct, found.most_at_once) == (lookups, 0, 0, 0)
    assert {point.hit_rate for point in found.points} == {0.0}


def test_a_single_key():
    found = curve_of([torch.tensor([-7])] * 10)
    assert found.distinct == found.most_at_once == 1
    rates = {str(point.policy): point.hit_rate for point in found.points}
    assert rates == {
        "lru": pytest.approx(0.9),
        "lfu": pytest.approx(0.9),
        "lru, admission 2": pytest.approx(0.8),
        "lfu, admission 2": pytest.approx(0.8),
        "ttl": pytest.approx(0.9),
    }


def test_a_lookup_with_more_keys_than_the_table_has_rows():
    lookups = [torch.arange(30), torch.arange(20, 50), torch.arange(30)] * 4
    found = curve_of(lookups, rows=[10], ttls=())
    assert found.points[0].hit_rate == pytest.approx(
        hit_rate([keys.tolist() for keys in lookups], 10)
    )
    assert measured(found, lookups) == pytest.approx([p.hit_rate for p in found.points])


def test_keys_are_copied():
    keys, curve = torch.tensor([1, 2]), CapacityCurve()
    curve.add(keys)
    keys.fill_(9)
    curve.add(keys)
    assert curve.read().distinct == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [0]}, r"CapacityCurve: rows must be in \[1, "),
        ({"ttls": [0]}, r"CapacityCurve: ttls must be in \[1, "),
        ({"sample": 0}, r"CapacityCurve: sample must be in \[1, "),
        ({"low_watermark": 0}, r"CapacityCurve: low_watermark must be in \(0, 1\], got 0"),
        ({"policies": [Policy(None, ttl=3)]}, "policies have a score, got ttl=3"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        CapacityCurve(**options)


def test_wrong_keys_and_policies():
    curve = CapacityCurve()
    with pytest.raises(TypeError, match=r"keys must be int64, got torch\.int32"):
        curve.add(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"keys must be 1-D, got the shape \[2, 2\]"):
        curve.add(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="score must be one of"):
        Policy("mru")
    with pytest.raises(ValueError, match="ttl=5 is predicted without score"):
        Policy("lru", ttl=5)
    with pytest.raises(ValueError, match=r"admission must be in \[1, "):
        Policy(admission=0)
    assert len(POLICIES) == 4
