"""A table notifies its weight once when keys change, and zeroes rows that have lost their keys."""

import copy
import pickle

import pytest
import torch

from sparsekit import Embedding
from sparsekit.tables.hash_table import HashTable
from sparsekit.tables.rows_of import RowsOf

T = torch.tensor


def told():
    layer, calls = Embedding(9, 2, name="n"), []
    layer.weight.note_keys = lambda: calls.append("note")
    layer.weight.follow_keys = lambda: calls.append("follow")
    return layer, layer.table.rows_of, calls


def test_the_weight_is_told_once_however_deep_the_change():
    layer, rows_of, calls = told()
    for _ in range(2):
        with rows_of.changing():
            with rows_of.changing():
                assert calls == ["note"]
            layer.table.clear_()
            assert calls == ["note"]
        assert calls == ["note", "follow"]
        calls.clear()


def test_states_do_not_move_after_an_error():
    _, rows_of, calls = told()
    with pytest.raises(ValueError, match="x"), rows_of.changing():
        raise ValueError("x")
    assert calls == ["note"]
    with rows_of.changing():
        pass
    assert calls == ["note", "note", "follow"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_table_has_no_layer(copied):
    layer = Embedding(9, 2)
    layer.assign(T([5]), torch.ones(1, 2))
    table = copied(layer.table)
    table.clear_()
    assert layer.weight[0].tolist() == [1, 1]
    assert type(copied(layer.table.rows_of)) is RowsOf
    both = copied(layer)
    both.table.clear_()
    assert not both.weight.any()
    assert layer.weight[0].tolist() == [1, 1]


def test_rows_without_keys_are_zeroed():
    layer = Embedding(9, 2)
    layer.assign(torch.arange(4), torch.ones(4, 2))
    layer.table.rows_of.clear_from(3)
    assert layer.weight.sum(1).tolist() == [2, 2, 2, 0, 0, 0, 0, 0, 0]
    other = HashTable(9)
    other.find_or_insert(T([7]))
    layer.table.load_state_dict(other.state_dict())
    assert layer.weight.sum(1).tolist() == [2, 0, 0, 0, 0, 0, 0, 0, 0]
    layer.table.clear_()
    assert not layer.weight.any()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": 0}, ValueError, r"capacity must be in \[1, 2147483647\], got 0"),
        ({"capacity": 2**31}, ValueError, "capacity must be in .*, got 2147483648"),
        ({"capacity": 2.0}, TypeError, "capacity must be an int, got 2.0"),
        ({"load_factor": "1"}, TypeError, "load_factor must be a number, got '1'"),
        ({"load_factor": 0}, ValueError, r"load_factor must be in \(0, 1\], got 0"),
        ({"load_factor": 1.01}, ValueError, r"load_factor must be in \(0, 1\], got 1.01"),
    ],
)
def test_sizes_of_tables_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"^n: {message}"):
        HashTable(**{"capacity": 9, "name": "n", **arguments})


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([1], TypeError, "keys must be a tensor, got list"),
        (T([1.0]), TypeError, "keys must be int64 or int32, got torch.float32"),
        (T([1]).to("meta"), ValueError, "keys is on meta, the table on cpu"),
    ],
)
def test_keys_that_a_table_refuses(keys, error, message):
    table = HashTable(9, name="n")
    for call in (table.find, table.find_or_insert):
        with pytest.raises(error, match=f"^n: {message}"):
            call(keys)


def test_tables_as_values():
    table = HashTable(5, load_factor=1, name="n")
    assert table
    assert len(table.buckets) == 1
    assert len(HashTable(6, load_factor=1).buckets) == 2
    assert table.extra_repr() == "size=0, capacity=5, load_factor=1"
    assert table.to("meta").extra_repr() == "size=?, capacity=5, load_factor=1"
    table.to_empty(device="cpu")
    assert len(table) == 0
    assert table.find_or_insert(T([[3, 4], [3, 5]])).tolist() == [[0, 1], [0, 2]]
    assert table.find(T([[4, 9]])).tolist() == [[1, -1]]
