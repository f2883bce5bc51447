"""The reference functions have the same signatures as the ops."""

import inspect

import pytest
from reference import groups as reference_group
from reference import ops as reference

from sparsekit import ops


def parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


# The reference has a class for hash tables, so it has no function for the ops on hash tables.
NAMES = [n for n in ops.__all__ if not n.startswith(("hash_table_", "group_find"))]


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_ops(name):
    module = reference_group if name.startswith("group_") else reference
    assert parameters(getattr(module, name)) == parameters(getattr(ops, name))
