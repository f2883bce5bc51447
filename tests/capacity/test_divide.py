"""Memory goes to the tables in which it brings the most hits."""

import itertools

import pytest
import torch

import sparsekit
from sparsekit.capacity import Curve, Point, Policy, bytes_per_row, divide

LRU, LFU = Policy("lru"), Policy("lfu")


def curve(points, keys=1000, most_at_once=1):
    found = [Point(policy, rows, rate) for policy, rows, rate in points]
    return Curve(10, keys, max(p.rows for p in found), most_at_once, 1.0, tuple(found))


def test_bytes_of_a_row_are_those_of_the_docs():
    # Figures from docs/capacity.md; a score has 8 bytes more.
    for name, size in {"SGD": 85, "RowWiseAdagrad": 89, "Adagrad": 149, "LazyAdam": 213}.items():
        assert bytes_per_row(16, getattr(sparsekit.optim, name)) == pytest.approx(size + 8, abs=1)
    assert bytes_per_row(64, sparsekit.optim.Adam) == pytest.approx(793 + 8, abs=1)
    assert bytes_per_row(16) == bytes_per_row(16, sparsekit.optim.SGD)


def test_bytes_of_a_row_do_not_depend_on_torchs_defaults():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            size = bytes_per_row(16, sparsekit.optim.LazyAdam)
    finally:
        torch.set_default_dtype(before)
    assert size == pytest.approx(221, abs=1)


def test_the_most_hits_of_all_divisions():
    # Concave, so that marginal analysis finds the optimum; 9 rows of the budget are 10 rows.
    curves = {
        "a": curve([(LRU, 9, 0.5), (LRU, 18, 0.7), (LRU, 27, 0.75)], keys=1000),
        "b": curve([(LRU, 9, 0.3), (LRU, 18, 0.5), (LRU, 27, 0.6)], keys=3000),
        "c": curve([(LRU, 9, 0.9), (LRU, 18, 0.95), (LRU, 27, 0.96)], keys=100),
    }
    sizes = {"a": 10.0, "b": 20.0, "c": 10.0}
    points = {
        name: [(p.rows, p.hit_rate * each.keys) for p in each.points]
        for name, each in curves.items()
    }
    for budget in (900, 1100, 1300):
        found = divide(budget, curves, sizes)
        assert sum(each.bytes for each in found.values()) <= budget
        best = max(
            sum(hits for _, hits in chosen)
            for chosen in itertools.product(*points.values())
            if sum(
                rows / 0.9 * size for (rows, _), size in zip(chosen, sizes.values(), strict=True)
            )
            <= budget
        )
        hits = sum(each.hit_rate * curves[name].keys for name, each in found.items())
        assert hits >= best - 1e-6


def test_a_budget_is_used_up_but_not_overdrawn():
    each = curve([(LRU, 1000, 0.5), (LRU, 10_000, 0.9)])
    for ranks in (1, 3, 7):
        found = divide(300_000, {"a": each, "b": each}, {"a": 100.0, "b": 50.0}, ranks)
        used = sum(one.bytes for one in found.values())
        assert 0.99 * 300_000 < used <= 300_000
        for one in found.values():
            assert one.rows_per_rank * ranks * 0.9 >= one.max_rows - 1e-6


def test_no_more_rows_than_keys():
    found = divide(10**9, {"a": curve([(LRU, 50, 0.5), (LFU, 90, 0.6)])}, {"a": 100.0})
    assert (found["a"].max_rows, found["a"].rows_per_rank, found["a"].bytes) == (90, 100, 10_000)
    assert found["a"].hit_rate == 0.6


def test_the_policy_that_is_best_at_the_rows():
    both = curve([(LRU, 100, 0.2), (LRU, 900, 0.9), (LFU, 100, 0.5), (LFU, 900, 0.7)])
    assert divide(2_000, {"a": both}, {"a": 10.0})["a"].policy == LFU
    assert divide(20_000, {"a": both}, {"a": 10.0})["a"].policy == LRU


def test_a_step_of_a_cliff_is_taken_as_a_whole():
    # Nothing is gained below 900 rows of a, but more than b gains once they are there.
    curves = {
        "a": curve([(LRU, 90, 0.0), (LRU, 450, 0.0), (LRU, 900, 0.9)]),
        "b": curve([(LRU, 90, 0.05), (LRU, 900, 0.1)]),
    }
    found = divide(10_100, curves, {"a": 10.0, "b": 10.0})
    assert found["a"].max_rows == 900


def test_too_small_for_a_lookup():
    each = curve([(LRU, 1000, 0.5)], most_at_once=90)
    with pytest.raises(ValueError, match="a budget of 500 bytes is 500 too small"):
        divide(500, {"a": each}, {"a": 10.0})
    assert divide(1000, {"a": each}, {"a": 10.0})["a"].max_rows == 90
