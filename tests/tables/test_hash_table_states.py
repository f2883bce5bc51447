"""A hash table takes the keys of any sound state, and refuses others unchanged."""

import re

import pytest
import torch

from sparsekit import Embedding, HashTable, ops

from .made import parts_of

T = torch.tensor
INT64 = torch.int64


def table_of(*keys, capacity=9):
    table = HashTable(capacity, name="n")
    table.find_or_insert(torch.tensor(keys, dtype=INT64))
    return table


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
        with torch.device("meta"):
            new = table.restored(state, device)
        assert new.keys() == own.keys()
        assert new["buckets"].shape == own["buckets"].shape
        assert int(new["hash_seed"]) == int(state["hash_seed"])
        assert int(new["size"]) == len(keys)
        assert not {each.data_ptr() for each in new.values()} & {
            each.data_ptr() for each in (*state.values(), *table.buffers())
        }
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
    given, version = dict(state), table.size._version
    table.load_state_dict(state, assign=assign)
    assert assign or table.size._version > version  # so that a bound is known to be outdated
    assert calls == [4, (2, False)]
    assert layer.weight[:2].tolist() == [[1, 1], [1, 1]]
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
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: .*a.size") as raised:
        model.load_state_dict({n: v for n, v in state.items() if n[0] == "b"})
    assert "a: the state" not in str(raised.value)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"b.other\""):
        model["b"].load_state_dict({**parts_of(model["b"]), "b.other": T([1])})


def test_a_state_of_the_tables_own_tensors_is_taken_as_it_is():
    table = table_of(7, 8)
    calls = []
    table.restored = lambda *_: calls.append(1)
    table.load_state_dict(table.state_dict(keep_vars=True))
    assert calls == []
    assert table.keys().tolist() == [7, 8]
    del table.restored
    with pytest.raises(RuntimeError, match="n: the state is damaged: a key has row 1, but 1 rows"):
        table.load_state_dict({**table.state_dict(keep_vars=True), "size": T([1])})
