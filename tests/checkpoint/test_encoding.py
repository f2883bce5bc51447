"""States are saved as JSON and tensors: a value is restored unchanged, or saving it raises."""

import enum
import math

import numpy as np
import pytest
import torch

from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.encoding import check_nesting, decoded, encoded, scalar


class Colour(enum.IntEnum):
    RED = 3


class Half(float):
    pass


PLAIN = {
    "NumPy's integer": (np.int64(2**62), 2**62),
    "NumPy's short float": (np.float32(0.1), float(np.float32(0.1))),
    "NumPy's float": (np.float64(0.5), 0.5),
    "NumPy's truth": (np.bool_(True), True),
    "an enumeration": (Colour.RED, 3),
    "a float of its own": (Half(0.5), 0.5),
    "infinity": (float("-inf"), float("-inf")),
    "NumPy's infinity": (np.float32("inf"), float("inf")),
    "nothing": (None, None),
    "items": ({(1, "a"): 2, None: 3, 2.5: 4, True: 5}, {(1, "a"): 2, None: 3, 2.5: 4, True: 5}),
    "a dollar": ({"$float": "inf"}, {"$float": "inf"}),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values(kind):
    value, expected = PLAIN[kind]
    tensors = {}
    found = decoded(encoded(value, "it", tensors), tensors)
    assert found == expected
    assert type(found) is type(expected)
    assert not tensors


def test_nan():
    assert math.isnan(decoded(encoded(float("nan"), "it", {}), {}))


def test_tensors_are_detached():
    tensors = {}
    encoded({"a": torch.ones(2, requires_grad=True)}, "it", tensors)
    assert not tensors["it.a"].requires_grad


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, torch.float32), (float("inf"), torch.float32), (0.1, torch.float64),
        (7, torch.int32), (2**40, torch.int64),
    ],
)  # fmt: skip
def test_numbers_of_a_table(value, dtype):
    tensor = torch.tensor(value, dtype=dtype)
    found = decoded(scalar(tensor, "it"), {})
    if dtype == torch.int64:
        assert found == value
        assert type(found) is int
    else:
        assert torch.equal(found, tensor)
        assert found.dtype == dtype


NOTHING = [
    {"$tensor": "x"}, {"$tensor": []}, {"$tensor": 5}, {"$tuple": 5}, {"$tuple": "ab"},
    {"$tuple": {"a": 1}}, {"$tuple": None}, {"$float": "5"}, {"$float": "infinity"},
    {"$float": 1.5}, {"$float": []}, {"$float": None}, {"$scalar": 5}, {"$scalar": []},
    {"$scalar": ["int32"]}, {"$scalar": ["int8", 1]}, {"$scalar": [[], 1]},
    {"$scalar": ["int32", "1"]}, {"$scalar": ["float32", [1]]}, {"$scalar": ["int32", 2**40]},
    {"$scalar": ["float32", None]}, {"$scalar": ["int32", 10**30]}, {"$items": 5},
    {"$items": {"a": 1}}, {"$items": [5]}, {"$items": [[1]]}, {"$items": [[1, 2, 3]]},
    {"$items": ["ab"]}, {"$items": [[[], 1]]}, {"$items": [[{"a": 1}, 1]]},
    {"$items": [[{"$tuple": [[]]}, 1]]}, {"$items": [[1, 2], "ab"]}, {"$odd": 1}, {"$": 1},
    {"$scalar": ["float32", 10**400]},
]  # fmt: skip


@pytest.mark.parametrize("value", NOTHING, ids=str)
@pytest.mark.parametrize(
    "around", [lambda v: v, lambda v: [v], lambda v: {"a": v}, lambda v: {"$tuple": [v]}]
)
def test_what_stands_for_nothing(value, around):
    with pytest.raises(CheckpointError, match=r"which stands for nothing$") as caught:
        decoded(around(value), {"y": torch.ones(1)})
    assert str(caught.value).startswith(f"a state has {repr(value)[:10]}")


def test_an_object_of_several_names_is_a_plain_one():
    for value in ({}, {"a": 1, "$float": "5"}, {"$float": "5", "a": 1}, {"a$": 1}):
        assert decoded(value, {}) == value


def test_a_dict_of_names_is_an_object_and_any_other_one_is_items():
    assert encoded({"a": 1, "": None}, "it", {}) == {"a": 1, "": None}
    assert encoded({}, "it", {}) == {}
    assert encoded({"a": 1, "$b": 2}, "it", {}) == {"$items": [["a", 1], ["$b", 2]]}
    assert encoded({3: 1}, "it", {}) == {"$items": [[3, 1]]}


def test_tensors_of_the_same_path_are_kept_apart():
    tensors = {}
    one, two, three = torch.ones(1), torch.zeros(2), torch.ones(3)
    value = {"a.b": {"c": one}, "a": {"b.c": two, "b": {"c": three}}}
    found = decoded(encoded(value, "it", tensors), tensors)
    assert list(tensors) == ["it.a.b.c", "it.a.b.c+", "it.a.b.c++"]
    assert found["a.b"]["c"] is not found["a"]["b.c"]
    assert [len(found["a.b"]["c"]), len(found["a"]["b.c"]), len(found["a"]["b"]["c"])] == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.eye(2).to_sparse(), "a tensor that is sparse_coo cannot be saved"),
        (torch.ones(2, device="meta"), "a tensor on meta cannot be saved"),
        ({1, 2}, "but no set$"),
        (1j, "but no complex$"),
        (b"x", "but no bytes$"),
    ],
)
def test_what_cannot_be_encoded_is_named_by_its_path(value, said):
    for around, path in (({"a": [0, value]}, r"it\.a\.1"), ({5: (value,)}, r"it\.5\.0")):
        with pytest.raises(CheckpointError, match=f"^{path}: .*{said}"):
            encoded(around, "it", {})


@pytest.mark.parametrize(
    "around", [lambda v: [v], lambda v: {"a": v}, lambda v: (v,), lambda v: {1: v}]
)
def test_what_is_nested_as_deeply_as_can_be_saved_can_be_loaded(around):
    levels = 49 if around(0) == {1: 0} else 98
    value = 5
    for _ in range(levels):
        value = around(value)
    text = encoded(value, "it", {})
    check_nesting([{"state": {"it": text}}], -1)
    assert decoded(text, {}) == value
    with pytest.raises(CheckpointError, match=r"^it.*: a state is nested deeper than 98$"):
        encoded(around(value), "it", {})


def test_nesting_of_a_manifest_is_limited():
    value = 5
    for _ in range(100):
        value = [value]
    check_nesting(value)
    for deeper in ([value], {"a": value}, {"$tuple": [value]}, {"$items": [value]}):
        with pytest.raises(CheckpointError, match=r"^a state is nested deeper than 100$"):
            check_nesting(deeper)
    check_nesting({"$tuple": value})


@pytest.mark.parametrize("dtype", [torch.int16, torch.bfloat16, torch.bool])
def test_numbers_that_a_table_cannot_have(dtype):
    with pytest.raises(CheckpointError, match=f"^it: a number for a table cannot be {dtype}$"):
        scalar(torch.ones((), dtype=dtype), "it")


def test_keys_of_a_dict_are_nested_as_deeply_as_its_values():
    key = 5
    for _ in range(96):
        key = (key,)
    text = encoded({key: 1}, "it", {})
    check_nesting([{"state": {"it": text}}], -1)
    assert decoded(text, {}) == {key: 1}
    with pytest.raises(CheckpointError, match=r"^it[.0]*: a state is nested deeper than 98$"):
        encoded({(key,): 1}, "it", {})
