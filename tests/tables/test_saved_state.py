"""Entries of saved states are checked one by one and loaded all at once."""

import re

import pytest
import torch

from sparsekit.tables import saved_state as saved

T = torch.tensor


def test_entries_by_name():
    state = {"a.x": 1, "a.y": 2, "x": 3, "b.z": 4}
    assert saved.entries(state, "a.", ["y", "x", "z"]) == {"y": 2, "x": 1}
    assert saved.entries(state, "", iter(["x", "y"])) == {"x": 3}
    assert saved.entries({"x": None}, "", ["x"]) == {"x": None}


def entry(value, dtypes=(torch.int64,), shape=(2,), name="x"):
    return saved.entry("layer", {"x": value, "y": 3}, name, dtypes, shape)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"name": "z"}, ValueError,
         "layer: the state has no z, only x, y; all entries are loaded together"),
        ({"value": [1, 2]}, TypeError, "layer: x in the state must be a tensor, got [1, 2]"),
        ({"value": None}, TypeError, "layer: x in the state must be a tensor, got None"),
        ({"value": "v" * 99}, TypeError,
         f"layer: x in the state must be a tensor, got '{'v' * 79}"),
        ({"value": T([1.0, 2])}, TypeError,
         "layer: x in the state must be int64, got torch.float32"),
        ({"dtypes": (torch.int16, torch.bool)}, TypeError,
         "layer: x in the state must be int16 or bool, got torch.int64"),
        *(
            ({"shape": shape}, ValueError,
             f"layer: x in the state must have shape [{said}], got [2]")
            for shape, said in (
                ((3,), "3"), ((1,), "1"), ((), ""), ((2, None), "2, any"), ((None, 8), "any, 8"),
                ((2, 1), "2, 1"),
            )
        ),
        ({"value": T([[1, 2]]), "shape": (None, 3)}, ValueError,
         "layer: x in the state must have shape [any, 3], got [1, 2]"),
        ({"value": T([1, 2]).to_sparse()}, ValueError,
         "layer: x in the state must be a dense tensor on cpu or cuda, got torch.sparse_coo on "
         "cpu"),
        ({"value": T([1, 2]).to("meta")}, ValueError,
         "layer: x in the state must be a dense tensor on cpu or cuda, got torch.strided on meta"),
    ],
)  # fmt: skip
def test_an_entry_that_is_refused(given, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        entry(**{"value": T([1, 2]), **given})


def test_an_entry_that_is_taken():
    value = torch.ones(3, 2, requires_grad=True)
    for shape in ((3, 2), (None, 2), (3, None), (None, None)):
        found = entry(value, (torch.float64, torch.float32), shape)
        assert not found.requires_grad
        assert found.data_ptr() == value.data_ptr()
    assert entry(torch.zeros(0, 2), (torch.float32,), (None, 2)).shape == (0, 2)
    assert entry(torch.zeros(()), (torch.float32,), ()).shape == ()


def test_a_module_on_meta_takes_no_copies():
    saved.refuse_meta("n", None)
    for device in ("cpu", "cuda"):
        saved.refuse_meta("n", torch.device(device))
    said = (
        r"^n: the module is on meta, where a state cannot be copied to; load it with assign=True, "
        r"or call to_empty\(device=\.\.\.\) before$"
    )
    with pytest.raises(ValueError, match=said):
        saved.refuse_meta("n", torch.device("meta"))


def test_all_are_copied_or_replaced():
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    saved.copy_all(iter([(targets[0], torch.ones(2).double()), (targets[1], T([1, 2, 3]))]))
    assert [each.tolist() for each in targets] == [[1, 1], [1, 2, 3]]
    dicts = [{"a": 1, "b": 2}, {"c": 3}]
    saved.replace_all([(dicts[0], {"a": 5}), (dicts[1], {"d": 6})])
    assert dicts == [{"a": 5, "b": 2}, {"c": 3, "d": 6}]
