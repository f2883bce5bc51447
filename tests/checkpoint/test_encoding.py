"""States as JSON and tensors: a value is restored unchanged, or saving it raises."""

import enum
import math

import numpy as np
import pytest
import torch

from sparsekit.checkpoint import CheckpointError
from sparsekit.checkpoint.encoding import decoded, encoded, scalar


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
    {"$items": [[{"$tuple": [[]]}, 1]]}, {"$odd": 1}, {"$": 1},
]  # fmt: skip


@pytest.mark.parametrize("value", NOTHING, ids=str)
@pytest.mark.parametrize("around", [lambda v: v, lambda v: [v], lambda v: {"a": v}])
def test_what_stands_for_nothing(value, around):
    with pytest.raises(CheckpointError, match="which stands for nothing") as caught:
        decoded(around(value), {"y": torch.ones(1)})
    assert repr(value)[:10] in str(caught.value)


def test_an_object_of_several_names_is_a_plain_one():
    for value in ({}, {"a": 1, "$float": "5"}, {"$float": "5", "a": 1}, {"a$": 1}):
        assert decoded(value, {}) == value
