"""Tests of batches and their bags of keys on small examples."""

import pytest
import torch

from sparsekit.data import Batch, KeyedJaggedTensor
from sparsekit.data.batch import concatenate, joined

# Bags of feature a: [1, 2], [], [3]; of feature b: [], [4], [5, 6].
BAGS = KeyedJaggedTensor(["a", "b"], torch.arange(1, 7), torch.tensor([0, 2, 2, 3, 3, 4, 6]))
BATCH = Batch(torch.tensor([0.0, 1.0, 2.0]), torch.arange(6.0).view(3, 2), BAGS)


def lists(bags):
    return {name: [part.tolist() for part in bag] for name, bag in bags.items()}


def test_bags_of_each_feature():
    assert (BAGS.keys(), BAGS.stride(), BATCH.rows) == (["a", "b"], 3, 3)
    assert BAGS.lengths().tolist() == [2, 0, 1, 0, 1, 2]
    expected = {"a": [[1, 2, 3], [0, 2, 2, 3]], "b": [[4, 5, 6], [0, 0, 1, 3]]}
    assert lists(BAGS.to_dict()) == expected
    assert lists({name: BAGS[name] for name in "ab"}) == expected
    assert repr(BAGS) == "KeyedJaggedTensor(2 features, batch 3, 6 keys)"
    with pytest.raises(KeyError, match=r"no feature 'c'; there are \['a', 'b'\]"):
        BAGS["c"]


def test_bags_of_no_rows_or_no_features():
    none = torch.zeros(1, dtype=torch.int64)
    empty = KeyedJaggedTensor(["a", "b"], none[:0], none)
    assert empty.stride() == 0
    assert lists(empty.to_dict()) == {"a": [[], [0]], "b": [[], [0]]}
    assert lists({"b": empty["b"]}) == {"b": [[], [0]]}
    assert KeyedJaggedTensor([], none[:0], none).to_dict() == {}


def test_batches_are_put_together_feature_by_feature():
    one = Batch(
        torch.tensor([3.0]),
        torch.tensor([[6.0, 7.0]]),
        KeyedJaggedTensor(["a", "b"], torch.tensor([7, 8]), torch.tensor([0, 1, 2])),
    )
    empty = Batch(
        torch.empty(0),
        torch.empty(0, 2),
        KeyedJaggedTensor(["a", "b"], torch.empty(0, dtype=torch.int64), torch.tensor([0])),
    )
    whole = concatenate([BATCH, empty, one])
    assert whole.label.tolist() == [0, 1, 2, 3]
    assert whole.dense.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert whole.sparse.keys() == ["a", "b"]
    assert whole.sparse.values().tolist() == [1, 2, 3, 7, 4, 5, 6, 8]
    assert whole.sparse.offsets().tolist() == [0, 2, 2, 3, 4, 4, 5, 7, 8]
    assert concatenate([BATCH]) is BATCH
    bare = KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), torch.tensor([0]))
    assert concatenate([Batch(None, batch.dense, bare) for batch in (BATCH, one)]).label is None


def test_all_parts_go_to_a_device():
    moved = BATCH.to("meta")
    parts = (moved.label, moved.dense, moved.sparse.values(), moved.sparse.offsets())
    assert {part.device.type for part in parts} == {"meta"}
    assert moved.sparse.keys() == ["a", "b"]
    assert BATCH._replace(label=None).to("meta").label is None
    same = BATCH.to("cpu")
    assert torch.equal(same.label, BATCH.label)
    assert torch.equal(same.dense, BATCH.dense)
    assert lists(same.sparse.to_dict()) == lists(BAGS.to_dict())


@pytest.mark.parametrize("batch", [BATCH, BATCH._replace(label=None)])
def test_all_parts_are_pinned_and_need_not_be_waited_for(monkeypatch, batch):
    """A stand-in marks pinned and moved tensors, since pinned memory needs a GPU."""

    def waited(tensor, device, non_blocking=False):
        return tensor + (1000 if non_blocking else 100)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 10)
    monkeypatch.setattr(torch.Tensor, "to", waited)
    ways = (batch.pin_memory(), batch.to("cuda"), batch.to("cuda", non_blocking=True))
    for moved, added in zip(ways, (10, 100, 1000), strict=True):
        if batch.label is None:
            assert moved.label is None
        else:
            assert moved.label.equal(batch.label + added)
        assert moved.dense.equal(batch.dense + added)
        assert moved.sparse.values().equal(BAGS.values() + added)
        assert moved.sparse.offsets().equal(BAGS.offsets() + added)
        assert moved.sparse.keys() == BAGS.keys()


def test_a_single_piece_is_not_copied():
    values = torch.arange(3)
    assert joined(["a"], [(values, torch.tensor([1, 2]))]).values() is values
    assert concatenate([BATCH]) is BATCH
