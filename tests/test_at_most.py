"""--at-most and the mark `pairs` leave out parametrizations, but not the values that matter."""

import itertools
from types import SimpleNamespace

import pytest
from conftest import in_pairs, thinned


class Item:
    """Stand-in for a test: what `thinned` reads of it."""

    def __init__(self, **params):
        self.callspec = SimpleNamespace(params=params)


def stacked(**parameters):
    values = itertools.product(*parameters.values())
    return [Item(**dict(zip(parameters, each, strict=True))) for each in values]


@pytest.mark.parametrize("most", [2, 3, 7, 11])
def test_keeps_as_many_as_asked_from_the_first_to_the_last(most):
    items = stacked(size=[str(size) for size in range(50)])
    kept = thinned(items, most)
    assert kept == thinned(items, most)
    places = [items.index(item) for item in kept]
    assert len(places) == most
    assert (places[0], places[-1]) == (0, 49)
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert max(steps) - min(steps) <= 1


def test_few_are_all_kept():
    items = stacked(size=[1, 2], dtype=["a", "b", "c"])
    assert thinned(items, 6) == items


@pytest.mark.parametrize("most", [4, 5, 8, 16])
def test_every_value_of_a_short_parameter_remains(most):
    items = stacked(size=[[n] for n in range(40)], pattern=[["x"], ["y"], ["z"]], way=["a", "b"])
    kept = thinned(items, most)
    assert len(kept) <= most + 4
    for name, count in (("pattern", 3), ("way", 2)):
        assert len({id(item.callspec.params[name]) for item in kept}) == count


def test_a_value_that_the_even_spread_misses_is_added():
    items = [Item(dtype="b" if n == 1 else "a") for n in range(100)]
    assert items[1] in thinned(items, 4)


def pairs_of(items):
    return {
        pair
        for item in items
        for pair in itertools.combinations(((n, id(v)) for n, v in item.callspec.params.items()), 2)
    }


def test_every_pair_of_values_remains_in_few_cases():
    # Lists: values are compared by identity, since some cannot be hashed.
    items = stacked(
        size=[[n] for n in range(8)],
        pattern=[["x"], ["y"], ["z"], ["w"], ["v"]],
        way=[["a"], ["b"]],
        dtype=["p", "q", "r"],
    )
    kept = in_pairs(items)
    assert kept == in_pairs(items)
    assert kept == [item for item in items if item in kept]
    assert pairs_of(kept) == pairs_of(items)
    assert 40 <= len(kept) <= 48


def test_each_device_has_every_pair():
    items = stacked(size=[1, 2, 3], device=["cpu", "simt"], way=["a", "b"], dtype=["p", "q"])
    kept = in_pairs(items)
    for device in ("cpu", "simt"):
        own, of_kept = (
            [item for item in each if item.callspec.params["device"] == device]
            for each in (items, kept)
        )
        assert pairs_of(of_kept) == pairs_of(own)
        assert len(of_kept) < len(own)
    assert pairs_of(in_pairs(items, any_device=True)) == pairs_of(items)
    assert len(in_pairs(items, any_device=True)) < len(kept)


def test_two_parameters_keep_all_cases():
    items = stacked(size=[1, 2, 3], way=["a", "b"])
    assert in_pairs(items) == items
