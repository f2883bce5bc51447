"""The plain torch versions are called as the ops are."""

import inspect

import pytest

from sparsekit import ops, reference


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


# The hash table's ops are methods of a class there.
@pytest.mark.parametrize("name", [n for n in ops.__all__ if not n.startswith("hash_table_")])
def test_signatures_are_those_of_the_ops(name):
    assert parameters(getattr(reference, name)) == parameters(getattr(ops, name))
