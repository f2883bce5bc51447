"""Checks in one call what is the same for many objects as it was before."""

from types import SimpleNamespace

import pytest
import torch

from sparsekit import _pybind as unchanged
from sparsekit._pybind import TensorPlaces

A, B, C = object(), object(), object()


def test_dicts_with_the_same_objects():
    own = {"a": A, "b": B}
    assert unchanged.dict_has(own, ["b", "a", "b"], [B, A, B])
    for keys, values in ((["a"], [B]), (["c"], [A]), (["a"], [A, B]), (["a", "b"], [A])):
        assert not unchanged.dict_has(own, keys, values)
    assert unchanged.dict_is(own, ["a", "b"], [A, B])
    for keys, values in ((["a"], [A]), (["b", "a"], [B, A]), (["a", "c"], [A, B]), ([], [])):
        assert not unchanged.dict_is(own, keys, values)
    with pytest.raises(TypeError):
        unchanged.dict_has(own, [[]], [A])


def test_keys_of_many_dicts():
    dicts = [{"a": A, "x": C}, {"a": B, "x": A}]
    assert unchanged.each_dict_has(dicts, ["a"], [A, B])
    assert unchanged.each_dict_has(dicts, ["x", "a"], [C, A, A, B])
    for values in [A, A], [A], [A, B, C], []:
        assert not unchanged.each_dict_has(dicts, ["a"], values)
    for values in [A, A, C, B], [C, A, A, A], [C, A, A]:
        assert not unchanged.each_dict_has(dicts, ["x", "a"], values)
    assert not unchanged.each_dict_has([*dicts, {}], ["a"], [A, B, C])
    assert unchanged.no_dict_has(dicts, "b")
    assert not unchanged.no_dict_has([*dicts, {"b": None}], "b")


def test_lists_of_the_same_objects():
    assert unchanged.lists_are([A, B], [A, B])
    for other in [A], [B, A], [A, B, C]:
        assert not unchanged.lists_are([A, B], other)


def test_attributes_of_many_objects():
    objects = [SimpleNamespace(one=A, n=3, m=3), SimpleNamespace(one=A, n=10**20, m=10**20)]
    assert unchanged.each_is(objects, "one", A)
    assert not unchanged.each_is(objects, "one", B)
    assert not unchanged.each_is([*objects, SimpleNamespace()], "one", A)
    assert unchanged.each_equal(objects, "n", "m")
    for other in SimpleNamespace(n=3, m=4), SimpleNamespace(n=3), SimpleNamespace(n=None, m=None):
        assert not unchanged.each_equal([*objects, other], "n", "m")
    others = [SimpleNamespace(n=None), SimpleNamespace()]
    unchanged.count_up([*objects, *others], "n")
    assert [one.n for one in objects] == [4, 10**20 + 1]
    assert others == [SimpleNamespace(n=None), SimpleNamespace()]


def test_an_object_that_empties_the_list_while_it_is_asked():
    class Emptying:
        @property
        def n(self):
            objects.clear()
            return 3

    objects = [Emptying(), Emptying()]
    assert unchanged.each_equal(objects, "n", "n")
    assert objects == []


def test_places_of_tensors():
    room = torch.zeros(6, 4)
    tensors = [room[:3], torch.zeros(()), torch.nn.Parameter(torch.zeros(5)), room.t()]
    places = TensorPlaces(tensors)
    assert places.are_of([room[:3], *tensors[1:3], room.t()])
    assert not places.are_of(tensors[:3])
    for other in (room[1:4], room[:2], room[:3, :2], room.view(torch.int32)[:3], room.flatten()):
        assert not places.are_of([other, *tensors[1:]])
    assert not places.are_of([*tensors[:3], room.view(4, 6)])
    for other in room.view(1, 1, 6, 4), 3, torch.zeros(2).to_sparse():
        assert not places.are_of([other, *tensors[1:]])
    with torch.no_grad():
        tensors[2].data = torch.zeros(5)
    assert not places.are_of(tensors)
    with pytest.raises(ValueError, match="more than 2 dimensions"):
        TensorPlaces([torch.zeros(1, 1, 1)])
    with pytest.raises(RuntimeError, match="int"):
        TensorPlaces([3])
