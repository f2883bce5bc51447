"""Tests of a hash table's link to a layer's rows, its process, and its saved state."""

import copy
import math
import os
import pickle
import re

import pytest
import torch

from sparsekit import Embedding, HashTable, TableFullError, ops
from sparsekit.tables import hash_table as module
from sparsekit.tables.hash_table import RowBound, RowsOf

from .made import parts_of

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
    rows_of = RowsOf(plain)
    rows_of.clear_from(1)
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


def test_seeds_are_drawn_but_not_from_torch():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    seeds = [int(HashTable(1).hash_seed) for _ in range(24)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(seeds)) == 24
    assert min(seeds) < 0 < max(seeds)
    table = table_of(3)
    before = int(table.hash_seed)
    table.clear_()
    assert int(table.hash_seed) != before
    assert (len(table), table.find(T([3])).tolist()) == (0, [-1])
    assert table.find_or_insert(T([4, 3])).tolist() == [0, 1]


def test_tables_on_meta():
    table = HashTable(9, device="meta")
    assert {each.device.type for each in table.buffers()} == {"meta"}
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
    monkeypatch.setattr(module.os, "getpid", lambda: own)
    private.refuse_sharing()
    assert private.find_or_insert(T([4])).tolist() == [1]
    with pytest.raises(RuntimeError, match=REFUSED.format(made, own)):
        shared.find_or_insert(T([4]))
    assert shared.find(T([3, 4])).tolist() == [0, -1]
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


def test_a_full_table_says_how_many_distinct_keys_it_refuses():
    table = table_of(1, 2, capacity=3)
    table.rank = 4
    with pytest.raises(TableFullError) as raised:
        table.find_or_insert(T([9, 8, 1, 9, 8]))
    error = raised.value
    assert (error.layer, error.rank, error.size, error.capacity, error.refused) == ("n", 4, 2, 3, 2)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([1], TypeError, "keys must be a tensor, got list"),
        (T([1.0]), TypeError, "keys must be int64 or int32, got torch.float32"),
        (T([1]).to("meta"), ValueError, "keys is on meta, the table on cpu"),
    ],
)
def test_keys_that_are_refused(keys, error, message):
    table = table_of(1)
    for call in (table.find, table.find_or_insert):
        with pytest.raises(error, match=f"^n: {message}$"):
            call(keys)


# Saved states


def with_buckets(state, change):
    """Return the state after a change of the keys [buckets, 5] and the rows [buckets, 5]."""
    buckets = state["buckets"].clone()
    change(buckets[:, :5], buckets.view(torch.int32)[:, 10:15])
    return {**state, "buckets": buckets}


def set_row(key, row):
    def change(keys, rows):
        rows[(keys == key) & (rows >= 0)] = row

    return change


def set_key(key, other):
    def change(keys, rows):
        keys[(keys == key) & (rows >= 0)] = other

    return change


DAMAGED = "the state is damaged: its {} rows do not have one key each"
STATES = {
    "too many rows": (lambda s: {**s, "size": T([10])}, ValueError,
                      "the state has 10 rows in use, which must be in [0, 9], the capacity here"),
    "negative": (lambda s: {**s, "size": T([-1])}, ValueError,
                 "the state has -1 rows in use, which must be in [0, 9], the capacity here"),
    "one row more": (lambda s: {**s, "size": T([4])}, ValueError, DAMAGED.format(4)),
    "one row less": (lambda s: {**s, "size": T([2])}, ValueError,
                     "the state is damaged: a key has row 2, but 2 rows are in use"),
    "a row beyond": (lambda s: with_buckets(s, set_row(7, 3)), ValueError,
                     "the state is damaged: a key has row 3, but 3 rows are in use"),
    "no key": (lambda s: with_buckets(s, set_row(7, -1)), ValueError, DAMAGED.format(3)),
    "a row twice": (lambda s: with_buckets(s, set_row(7, 1)), ValueError, DAMAGED.format(3)),
    "a row twice beside none": (lambda s: {**with_buckets(s, set_row(7, 1)), "size": T([4])},
                                ValueError, DAMAGED.format(4)),
    "more keys than rows": (
        lambda s: {**with_buckets(s, set_row(9, 1)), "size": T([2])}, ValueError,
        DAMAGED.format(2)),
    "a key twice": (lambda s: with_buckets(s, set_key(7, 8)), ValueError,
                    "the state is damaged: a key has two rows"),
    "buckets of floats": (lambda s: {**s, "buckets": s["buckets"].float()}, TypeError,
                          "buckets in the state must be int64, got torch.float32"),
    "narrow buckets": (lambda s: {**s, "buckets": s["buckets"][:, :7]}, ValueError,
                       "buckets in the state must have shape [any, 8], got [3, 7]"),
    "two seeds": (lambda s: {**s, "hash_seed": T([1, 2])}, ValueError,
                  "hash_seed in the state must have shape [1], got [2]"),
    "a seed of int32": (lambda s: {**s, "hash_seed": T([1]).int()}, TypeError,
                        "hash_seed in the state must be int64, got torch.int32"),
    "two sizes": (lambda s: {**s, "size": T([3, 3])}, ValueError,
                  "size in the state must have shape [1], got [2]"),
    "a size of int32": (lambda s: {**s, "size": T([3]).int()}, TypeError,
                        "size in the state must be int64, got torch.int32"),
    "no size": (lambda s: {n: s[n] for n in ("buckets", "hash_seed")}, ValueError,
                "the state has no size, only buckets, hash_seed; all entries are loaded together"),
}  # fmt: skip


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("change", "error", "message"), STATES.values(), ids=STATES)
def test_states_that_are_refused(change, error, message, assign):
    state, table = change(parts_of(table_of(7, 8, 9))), table_of(5, 6)
    with pytest.raises(error, match=f"^n: {re.escape(message)}$"):
        table.restored(state, None)
    before = parts_of(table)
    with pytest.raises(RuntimeError, match=re.escape(f"n: {message}")):
        table.load_state_dict(state, assign=assign)
    assert all(torch.equal(each, before[name]) for name, each in table.state_dict().items())


@pytest.mark.parametrize("keys", [[], [3], [7, -8, 9, 2**40, 5]])
@pytest.mark.parametrize("capacity", [5, 40])
def test_restored_buffers(keys, capacity):
    saved, table = table_of(*keys, capacity=20), table_of(1, 2, capacity=capacity)
    state, own = parts_of(saved), parts_of(table)
    for device in (None, torch.device("cpu")):
        new = table.restored(state, device)
        assert new.keys() == own.keys()
        assert new["buckets"].shape == own["buckets"].shape
        assert int(new["hash_seed"]) == int(state["hash_seed"])
        assert int(new["size"]) == len(keys)
        assert ops.hash_table_keys(*new.values()).tolist() == keys
    assert all(torch.equal(each, own[name]) for name, each in parts_of(table).items())
    with pytest.raises(
        ValueError, match=r"^n: the module is on meta, where a state cannot be copied"
    ):
        table.restored(state, torch.device("meta"))


def test_keys_are_read_from_all_parts_of_large_buckets():
    saved = parts_of(table_of(*range(30), capacity=30))
    rows = 1 << 20
    buckets = torch.empty(2 * rows + 5, 8, dtype=INT64)
    ops.hash_table_clear_(buckets)
    places = [0, 7, rows - 1, rows, rows + 1, 2 * rows - 1, 2 * rows, 2 * rows + 4]
    places += range(20, 20 + len(saved["buckets"]) - len(places))
    buckets[places] = saved["buckets"]
    table = HashTable(40)
    table.load_state_dict({**saved, "buckets": buckets})
    assert table.keys().tolist() == list(range(30))


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_changes_rows_and_clears_the_free_ones(assign):
    layer = Embedding(9, 2)
    layer.assign(torch.arange(4), torch.ones(4, 2))
    table, calls = layer.table, []
    layer.weight.note_keys = lambda: calls.append(len(table))
    layer.weight.follow_keys = lambda: calls.append((len(table), bool(layer.weight[2:].any())))
    before = table.tensors()
    state = parts_of(table_of(7, 8))
    given = dict(state)
    table.load_state_dict(state, assign=assign)
    assert calls == [4, (2, False)]
    assert [each is mine for each, mine in zip(table.tensors(), before, strict=True)] == [
        not assign
    ] * 3
    assert table.keys().tolist() == [7, 8]
    assert list(state) == list(given)
    assert all(state[name] is given[name] for name in given)


def test_a_load_that_fails_is_told_beside_other_errors():
    model = torch.nn.ModuleDict({"a": HashTable(2, name="a"), "b": HashTable(9, name="b")})
    state = {f"{name}.{n}": v for name in "ab" for n, v in parts_of(table_of(7, 8, 9)).items()}
    with pytest.raises(RuntimeError, match="a: the state has 3 rows in use") as raised:
        model.load_state_dict(state)
    assert "size mismatch" not in str(raised.value)
    assert model["b"].keys().tolist() == [7, 8, 9]
    assert len(model["a"]) == 0
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"a.buckets\""):
        model.load_state_dict({n: v for n, v in state.items() if n[0] == "b"})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"b.other\""):
        model["b"].load_state_dict({**parts_of(model["b"]), "b.other": T([1])})


def test_a_state_of_the_tables_own_tensors_is_taken_as_it_is():
    table = table_of(7, 8)
    calls = []
    table.restored = lambda *_: calls.append(1)
    table.load_state_dict(table.state_dict(keep_vars=True))
    assert calls == []
    assert table.keys().tolist() == [7, 8]
