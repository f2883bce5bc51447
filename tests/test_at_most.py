"""pytest's option --at-most leaves out parametrizations, but no value of a short parameter."""

import itertools
from types import SimpleNamespace

import pytest
from conftest import thinned


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
