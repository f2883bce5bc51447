"""Tests of a hash table's link to a layer's rows, its process, and its saved state."""

import copy
import math
import os
import pickle
import re
import types

import pytest
import torch

from sparsekit import HashTable, TableFullError
from sparsekit.tables import hash_table as module
from sparsekit.tables.hash_table import RowBound
from sparsekit.tables.rows_of import RowsOf

T = torch.tensor
INT64 = torch.int64


def table_of(*keys, capacity=9, **options):
    table = HashTable(capacity, name="n", **options)
    table.find_or_insert(torch.tensor(keys, dtype=INT64))
    return table


# Rows of a layer


class Weight:
    def __init__(self):
        self.calls = []

    def note_keys(self):
        self.calls.append("note")

    def follow_keys(self):
        self.calls.append("follow")


class Layer:
    def __init__(self):
        self.weight = Weight()


def test_the_weight_of_before_is_told_after_the_change():
    layer = Layer()
    rows_of, weight = RowsOf(layer), layer.weight
    with rows_of.changing():
        layer.weight = Weight()  # a load may replace the weight
    assert weight.calls == ["note", "follow"]
    assert layer.weight.calls == []
    with pytest.raises(KeyError), rows_of.changing(), rows_of.changing():
        raise KeyError
    assert layer.weight.calls == ["note"]
    with rows_of.changing():  # an error ends the change
        assert layer.weight.calls == ["note", "note"]
    assert layer.weight.calls == ["note", "note", "follow"]


def test_rows_of_no_layer_or_of_a_plain_weight_may_change():
    plain = torch.nn.Linear(2, 2)
    for rows_of in (RowsOf(), RowsOf(plain)):
        with rows_of.changing():
            pass
    layer = Layer()
    gone = RowsOf(layer)
    del layer
    with gone.changing():
        gone.clear_from(0)
    RowsOf().clear_from(0)
    rows_of, version = RowsOf(plain), plain.weight._version
    rows_of.clear_from(1)
    assert plain.weight._version > version  # a backward that saved the weight raises
    for copied in (copy.deepcopy(rows_of), pickle.loads(pickle.dumps(rows_of))):
        assert type(copied) is RowsOf
        assert copied._layer is None
    assert bool(plain.weight[0].any())
    assert not plain.weight[1].any()


# The bound on rows


def test_a_bound_before_anything_is_known():
    bound, size = RowBound(), torch.zeros(1)
    assert (bound.most, bound.entries) == (math.inf, 0)
    assert bound.add(size, 0) == 1  # an empty lookup counts as one key
    assert bound.add(size, 4) == 5
    assert bound.entries == 5
    bound.learn(2, 1)
    assert bound.most == 2 + 4
    bound.learn(9, 5)
    assert bound.most == 6  # a later report cannot raise the bound
    bound.learn(3, 5)
    assert bound.most == 3
    assert bound.add(size, 7) == 12
    assert bound.most == 10


def test_reports_from_before_a_write_teach_nothing():
    bound, size = RowBound(), torch.zeros(1)
    first = bound.add(size, 10)
    size.add_(1)
    second = bound.add(size, 5)
    assert bound.most == math.inf
    bound.learn(3, first)
    assert bound.most == math.inf
    bound.learn(3, second)
    assert bound.most == 3
    for _ in range(2):
        bound.add(size, 1)
    assert bound.most == 5
    with torch.inference_mode():
        other = torch.zeros(1)
    bound.learn(3, bound.add(other, 1))
    assert bound.most == math.inf


def test_a_bound_belongs_to_its_tensor():
    bound, size, other = RowBound(), torch.zeros(1), torch.zeros(1)
    bound.learn(3, bound.add(size, 10))
    assert other._version == size._version
    bound.add(other, 5)
    assert bound.most == math.inf


@pytest.mark.parametrize("known", [True, False])
def test_a_lost_bound_stays_lost(known):
    bound, size = RowBound(), torch.zeros(1)
    if known:
        bound.learn(3, bound.add(size, 10))
    bound.lose()
    for _ in range(2):
        bound.learn(3, bound.add(size, 10))
        assert bound.most == math.inf
    for copied in (copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        copied.learn(3, copied.add(size, 10))
        assert copied.most == 3


# Making


@pytest.mark.parametrize(
    ("capacity", "load_factor", "buckets"),
    [(5, 1.0, 1), (6, 1, 2), (3, 0.6, 1), (4, 0.6, 2), (9, 0.6, 3), (1, 0.01, 20)],
)
def test_buckets_of_a_capacity(capacity, load_factor, buckets):
    table = HashTable(capacity, load_factor=load_factor)
    assert table.buckets.shape == (buckets, 8)
    assert (table.load_factor, table.capacity, table.rank) == (load_factor, capacity, 0)
    assert table.name == "HashTable"
    assert len(HashTable(9).buckets) == len(HashTable(9, load_factor=0.6).buckets)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be in [1, 2147483647], got 0"),
        ({"capacity": 2**31}, ValueError, "capacity must be in [1, 2147483647], got 2147483648"),
        ({"capacity": 2.0}, TypeError, "capacity must be an int, got 2.0"),
        ({"load_factor": "1"}, TypeError, "load_factor must be a number, got '1'"),
        ({"load_factor": None}, TypeError, "load_factor must be a number, got None"),
        ({"load_factor": 0}, ValueError, "load_factor must be in (0, 1], got 0"),
        ({"load_factor": -0.5}, ValueError, "load_factor must be in (0, 1], got -0.5"),
        ({"load_factor": 1.01}, ValueError, "load_factor must be in (0, 1], got 1.01"),
        ({"load_factor": math.nan}, ValueError, "load_factor must be in (0, 1], got nan"),
    ],
    ids=str,
)
def test_sizes_that_are_refused(arguments, error, message):
    with pytest.raises(error, match=f"^n: {re.escape(message)}$"):
        HashTable(**{"capacity": 9, "name": "n", "device": "meta", **arguments})


def test_seeds_are_drawn_but_not_from_torch():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seeds = [int(HashTable(1).hash_seed) for _ in range(24)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(seeds)) == 24
    assert min(seeds) < 0 < max(seeds)
    table = table_of(3)
    before, tensors = int(table.hash_seed), table.tensors()
    table.clear_()
    assert int(table.hash_seed) != before
    assert all(each is own for each, own in zip(table.tensors(), tensors, strict=True))
    assert (len(table), table.find(T([3])).tolist()) == (0, [-1])
    assert table.find_or_insert(T([4, 3])).tolist() == [0, 1]


def test_tables_on_meta():
    table, saved = HashTable(9, device="meta"), table_of(3, 5)
    with pytest.raises(RuntimeError, match="HashTable: the module is on meta"):
        table.load_state_dict(saved.state_dict())
    table.load_state_dict(saved.state_dict(), assign=True)
    assert table.keys().tolist() == [3, 5]
    table = HashTable(9, device="meta")
    assert table  # though it is empty, and has no size to ask for
    assert {each.device.type for each in table.buffers()} == {"meta"}
    table.clear_ = None  # there is nothing to clear yet
    table.to("meta")
    del table.clear_
    table.to_empty(device="cpu")
    assert table.find_or_insert(T([3])).tolist() == [0]
    seed = int(table.hash_seed)
    table.float()  # nothing is cleared by another move
    assert (len(table), int(table.hash_seed)) == (1, seed)
    assert repr(table) == "HashTable(size=1, capacity=9, load_factor=0.6)"
    assert repr(table.to("meta")) == "HashTable(size=?, capacity=9, load_factor=0.6)"


# Processes


REFUSED = (
    r"^n: processes share this table's memory, and only process {}, which made it, may insert "
    r"keys; this is process {}\. Look keys up in evaluation"
)


def test_only_the_process_that_made_shared_memory_inserts(monkeypatch):
    made, own = os.getpid(), os.getpid() + 1
    private, shared = table_of(3), table_of(3).share_memory()
    table = pickle.loads(pickle.dumps(shared))
    assert table.row_bound is not shared.row_bound
    assert type(table.row_bound) is type(shared.row_bound) is RowBound
    assert private._maker == shared._maker == table._maker == made
    monkeypatch.setattr(module.os, "getpid", lambda: own)
    private.refuse_sharing()
    assert shared.__getstate__()["_maker"] == made
    assert private.find_or_insert(T([4])).tolist() == [1]
    with pytest.raises(RuntimeError, match=REFUSED.format(made, own)):
        shared.find_or_insert(T([4]))
    assert shared.find(T([3, 4])).tolist() == [0, -1]
    on_device = types.SimpleNamespace(is_cpu=False, is_shared=lambda: True)
    with monkeypatch.context() as patch:  # tensors on a GPU always call themselves shared
        patch.setattr(shared, "tensors", lambda: [on_device])
        shared.refuse_sharing()
    private._maker = made
    assert private.__getstate__()["_maker"] == own
    for each in (copy.deepcopy(private), pickle.loads(pickle.dumps(private))):
        assert each._maker == own
    shared._note_maker()
    assert shared._maker == made
    private._note_maker()
    assert private._maker == own
    other = table_of(3)
    other._maker = made
    other.share_memory()  # this process shares it, so it is the one that inserts
    assert other.buckets.is_shared()
    assert other.find_or_insert(T([4])).tolist() == [1]


@pytest.mark.parametrize("shared", [False, True])
def test_a_state_of_an_older_version_gets_what_it_lacks(shared):
    table = table_of(3)
    if shared:
        table.share_memory()
    state = dict(vars(table))
    del state["_maker"], state["row_bound"]
    other = HashTable.__new__(HashTable)
    other.__setstate__(state)
    assert other._maker == os.getpid()
    assert type(other.row_bound) is RowBound
    state["_maker"], state["row_bound"] = -5, "own"
    other.__setstate__(state)
    assert other._maker == (-5 if shared else os.getpid())
    assert other.row_bound == "own"
    copied = table.__getstate__()
    copied["name"] = "other"
    assert table.name == "n"


# Lookups


def test_rows_have_the_shape_of_the_keys():
    table = HashTable(9)
    keys = T([[1, 2], [3, 1]])
    for call in (table.find_or_insert, table.find):
        assert call(keys).tolist() == [[0, 1], [2, 0]]
        assert call(keys[0]).tolist() == [0, 1]
        assert call(T(3)).tolist() == 2
    assert table.find(T([[7, 1], [3, 8]])).tolist() == [[-1, 0], [2, -1]]
    assert table.keys().tolist() == [1, 2, 3]
    assert table_of(9, -3, 5).keys().tolist() == [9, -3, 5]
    rows, status = table.find_or_insert_with_status(T([9, 1]))
    assert (rows.tolist(), status.tolist()) == ([3, 0], [3, 0])


def test_inserts_count_as_writes():
    table = table_of(1)
    before = [each._version for each in table.tensors()]
    table.find(T([5]))
    assert [each._version for each in table.tensors()] == before
    table.find_or_insert(T([5]))
    assert all(
        each._version > version for each, version in zip(table.tensors(), before, strict=True)
    )


@pytest.mark.parametrize(
    ("size", "keys", "refused"), [(2, [9, 8, 1, 9, 8], 2), (3, [9], 1), (3, [0, 1, 9, 9, 8, 7], 3)]
)
def test_a_full_table_says_how_many_distinct_keys_it_refuses(size, keys, refused):
    table = table_of(*range(size), capacity=3)
    table.rank = 4
    with pytest.raises(TableFullError) as raised:
        table.find_or_insert(T(keys))
    assert vars(raised.value) == {
        "layer": "n", "rank": 4, "size": size, "capacity": 3, "refused": refused,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([1], TypeError, "keys must be a tensor, got list"),
        (T([1.0]), TypeError, "keys must be int64 or int32, got torch.float32"),
        (T([1]).short(), TypeError, "keys must be int64 or int32, got torch.int16"),
        (T([1]).to("meta"), ValueError, "keys is on meta, the table on cpu"),
    ],
)
def test_keys_that_are_refused(keys, error, message):
    table = table_of(1)
    for call in (table.find, table.find_or_insert):
        with pytest.raises(error, match=f"^n: {message}$"):
            call(keys)


REFUSALS = {
    "another thread": (RuntimeError("op: another thread is inserting"), r"^users: op: another thr"),
    "any other": (RuntimeError("out of memory"), r"^out of memory$"),
    "damage on a device": (None, r"^users: the table is damaged: its size is 3 of 4, and no slot"),
}


@pytest.mark.parametrize(("error", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_the_op_says_is_said_of_the_table(error, message, monkeypatch):
    def refuse(*_):
        if error is not None:
            raise error
        return T([-1]), T([3, -1])

    monkeypatch.setattr(module, "_find_or_insert", refuse)
    with pytest.raises((RuntimeError, ValueError), match=message):
        HashTable(4, name="users").find_or_insert(T([1]))
