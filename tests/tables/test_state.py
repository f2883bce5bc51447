"""A table's state has the right entries, and a load refuses states that do not fit."""

import re

import pytest
import torch

from sparsekit.tables.own_shard import OwnShard
from sparsekit.tables.owners import even_map
from sparsekit.tables.state import TableTensors, entries_of, own_entries

from .made import both, of_rank, parts_of, same, table_of, without

T = torch.tensor
CPU = torch.device("cpu")
OF_TABLE = ["table.buckets", "table.hash_seed", "table.size"]


def flipped(world_size=2):
    return even_map(world_size, CPU).flip(0)


# Saved entries


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_names_and_values_of_a_state(world_size, use_hashtable, monkeypatch):
    of_rank(monkeypatch, 0, world_size)
    table = table_of(use_hashtable=use_hashtable)
    placed = use_hashtable and world_size > 1
    names = ["weight", "seed", "shard", *(["owners"] if placed else [])]
    names += OF_TABLE if use_hashtable else []
    own, state = own_entries(table), table.state_dict()
    assert list(own) == list(table.sharded_state()) == names
    assert state.keys() == own.keys()
    assert all(own[name] is table.get_parameter("weight") for name in ["weight"])
    for name, each in state.items():
        assert each.data_ptr() == own[name].data_ptr()
        assert type(each) is (OwnShard if name == "shard" and world_size > 1 else torch.Tensor)
    kept = table.state_dict(keep_vars=True)
    assert kept["weight"] is table.weight
    inside = torch.nn.ModuleDict({"a": table}).state_dict()
    assert inside.keys() == {f"a.{name}" for name in names}
    if world_size > 1:
        assert (inside["a.shard"].layer, inside["a.shard"].tolist()) == ("n", [0, 2])
        assert inside["a.shard"].exchange() is None
    assert list(entries_of(inside, "a.")) == list(state)
    beside = {**inside, "a.other": 1, "a.table": 2, "a.tables.size": 3, "b.seed": 4, "seed": 5}
    assert entries_of(beside, "a.") == entries_of(inside, "a.")
    assert entries_of({"table.other": 3, "owners": 4}, "") == {"table.other": 3, "owners": 4}


def test_the_exchange_of_a_saved_shard(monkeypatch):
    of_rank(monkeypatch, 1, 2)
    table, exchange = table_of(), type("Exchange", (), {"parts_saved": 0})()
    monkeypatch.setattr(table, "process_exchange", lambda: exchange)
    assert table.state_dict()["shard"].exchange() is exchange


def test_rows_catch_up_before_they_are_saved():
    table = table_of(4)
    calls = []

    def catch_up(weight, rows):
        calls.append(rows)
        weight.data[0] = 8

    table.weight.before_read = catch_up
    assert table.state_dict()["weight"][0].tolist() == [8, 8]
    rows = T([0])
    table.catch_up(rows)
    assert calls[0] is None
    assert calls[1] is rows
    table._parameters["weight"] = torch.nn.Parameter(torch.zeros(9, 2))
    table.catch_up()


def test_a_base_has_no_exchange():
    with pytest.raises(NotImplementedError):
        TableTensors().process_exchange()


# Refused states


def rows_beyond(state):
    return {**state, "weight": state["weight"][:2]}


WIDE = "key {} of row 1 is no int32, which the layer takes; make it with key_dtype=torch.int64"
REFUSED = {
    "only the weight": (lambda s: {"weight": s["weight"]},
        "the state has no seed, only weight, as that of a torch.nn.Embedding, whose row i is the "
        "vector of id i; so call assign(torch.arange(len(weight)), weight)"),
    "no seed": (lambda s: without(s, "seed"),
        "the state has no seed, only weight, shard, table.buckets, table.hash_seed, table.size; "
        "all entries"),
    "no weight": (lambda s: without(s, "weight"), "the state has no weight, only "),
    "no buckets": (lambda s: without(s, *OF_TABLE), "the state has no buckets, only ; all"),
    "another rank": (lambda s: {**s, "shard": T([1, 2])},
        "the state is that of rank 1 of 2, whose keys and rows do not belong to rank 0 of 1; each "
        "rank saves its own state and loads it again"),
    "only another rank": (lambda s: {**s, "shard": T([1, 1])}, "the state is that of rank 1 of 1"),
    "another world": (lambda s: {**s, "shard": T([0, 3])}, "the state is that of rank 0 of 3, "),
    "three numbers": (lambda s: {**s, "shard": T([0, 1, 2])},
        "shard in the state must have shape [2], got [3]"),
    "a shard of int32": (lambda s: {**s, "shard": T([0, 1]).int()},
        "shard in the state must be int64, got torch.int32"),
    "owners": (lambda s: {**s, "owners": even_map(1, CPU)},
        "the state has owners, though it is that of one rank alone"),
    "another dim": (lambda s: {**s, "weight": torch.ones(9, 3)},
        "weight in the state must have shape [any, 2], got [9, 3]"),
    "an int weight": (lambda s: {**s, "weight": s["weight"].int()},
        "weight in the state must be float"),
    "two seeds": (lambda s: {**s, "seed": T([1, 2])},
        "seed in the state must have shape [1], got [2]"),
    "a seed of int32": (lambda s: {**s, "seed": T([1]).int()},
        "seed in the state must be int64, got torch.int32"),
    "rows without a vector": (rows_beyond,
        "the state is damaged: 3 rows are in use, but weight has 2"),
    "many rows": (lambda s: {**s, "table.size": T([10])},
        "the state has 10 rows in use, which must be in [0, 9], the capacity here"),
}  # fmt: skip


@both
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_states_that_are_refused(change, message, assign):
    table, calls = table_of(5, 6), []
    state = change(parts_of(table_of(7, 8, 9, seed=3)))
    table.checked_modes = {False}
    before, given = parts_of(table), dict(state)
    table.weight.before_read = lambda *_: calls.append(1)
    with pytest.raises(RuntimeError, match=re.escape(f"n: {message}")):
        table.load_state_dict(state, assign=assign)
    assert calls == []
    assert table.checked_modes == {False}
    assert same(parts_of(table), before)
    assert state.keys() == given.keys()
    assert all(state[name] is given[name] for name in given)


@both
def test_states_of_tables_of_another_kind(assign):
    rows, table = table_of(use_hashtable=False), table_of(4)
    with pytest.raises(
        RuntimeError, match="n: the state has a hash table, which there is not here"
    ):
        rows.load_state_dict(table.state_dict(), assign=assign)
    with pytest.raises(RuntimeError, match="n: the state has no buckets"):
        table.load_state_dict(rows.state_dict(), assign=assign)
    more = table_of(use_hashtable=False, capacity=10)
    with pytest.raises(RuntimeError, match=r"n: weight .* must have shape \[9, 2\], got \[10, 2\]"):
        rows.load_state_dict(more.state_dict(), assign=assign)


@both
@pytest.mark.parametrize(
    ("keys", "wide"),
    [([1, 2**31], 2**31), ([1, -(2**31) - 1, 2**40], -(2**31) - 1), ([2**31 - 1, -(2**31)], None)],
)
def test_wide_keys_are_refused_by_layers_of_int32(keys, wide, assign):
    saved, table = table_of(*keys), table_of(5, key_dtype=torch.int32)
    if wide is None:
        table.load_state_dict(saved.state_dict(), assign=assign)
        assert table.table.keys().tolist() == keys
        return
    with pytest.raises(RuntimeError, match=f"n: {WIDE.format(wide)}"):
        table.load_state_dict(saved.state_dict(), assign=assign)
    assert table.table.keys().tolist() == [5]


@both
def test_dtypes_of_weights(assign):
    for dtype in (torch.float16, torch.float64, torch.bfloat16, torch.float32):
        table, state = table_of(5), parts_of(table_of(7, 8))
        state["weight"] = state["weight"].to(dtype)
        if assign and dtype == torch.float16:
            with pytest.raises(RuntimeError, match=r"n: weight .* must be .*, got torch.float16"):
                table.load_state_dict(state, assign=True)
            continue
        table.load_state_dict(state, assign=assign)
        assert table.weight.dtype == (dtype if assign else torch.float32)
        assert table.weight[:2].tolist() == [[1, 1], [2, 2]]


def test_a_table_on_meta_takes_a_state_by_assignment():
    table, saved = table_of(device="meta"), table_of(7, 8, seed=3)
    rows = {"use_hashtable": False}
    for one, other in ((table, saved), (table_of(device="meta", **rows), table_of(**rows))):
        with pytest.raises(RuntimeError, match="n: the module is on meta, where"):
            one.load_state_dict(other.state_dict())
    table.load_state_dict(saved.state_dict(), assign=True)
    assert same(parts_of(table), parts_of(saved))
    assert table.weight.keys().tolist() == [7, 8]


# Owners


@both
def test_a_state_brings_its_map(assign, monkeypatch):
    of_rank(monkeypatch, 0, 2)
    table, saved = table_of(5), table_of(7, 8, seed=3)
    even = table.owners
    saved.owners = flipped().repeat_interleave(2)[::2]
    table.load_state_dict(saved.state_dict(), assign=assign)
    assert torch.equal(table.owners, flipped())
    assert table.owners is not even
    assert table.owners.is_contiguous()
    assert torch.equal(even, even_map(2, CPU).sort()[0])  # which other layers share
    mine, code = table.owners, table._code_of_map.of("n", table.owners, 2)
    saved.owners = even.clone()
    table.load_state_dict(parts_of(saved), assign=assign)
    assert torch.equal(table.owners, even)
    assert not assign or table.owners is even
    assert mine is not table.owners
    assert table._code_of_map.of("n", table.owners, 2) != code
    mine = table.owners
    table.load_state_dict(parts_of(saved), assign=assign)
    assert table.owners is mine  # an equal map stays


@both
def test_maps_that_are_refused(assign, monkeypatch):
    of_rank(monkeypatch, 0, 2)
    table, state = table_of(5), parts_of(table_of(7))
    before, own = parts_of(table), table.owners
    for owners, message in (
        (even_map(2, CPU)[1:], "n: owners in the state must have shape [65536], got [65535]"),
        (even_map(2, CPU).int(), "n: owners in the state must be int16, got torch.int32"),
        (even_map(2, CPU) + 1, "n: in the state: owners[32768] is 2, but there are 2 rank(s)"),
        (None, "n: the state was saved with placement='modulo', or by a version that had no other, "
               "and this layer has placement='hash', where keys live on other ranks; make the "
               "layer with the placement of the state"),
    ):  # fmt: skip
        given = without(state, "owners") if owners is None else {**state, "owners": owners}
        with pytest.raises(RuntimeError, match=re.escape(message)):
            table.load_state_dict(given, assign=assign)
        assert same(parts_of(table), before)
        assert table.owners is own
    modulo = table_of(5, placement="modulo")
    with pytest.raises(
        RuntimeError, match=r"saved with placement='hash', and this layer has .*'mod"
    ):
        modulo.load_state_dict(state, assign=assign)
    del state["shard"]
    with pytest.raises(RuntimeError, match="n: the state is that of rank 0 of 1, whose"):
        table.load_state_dict(state, assign=assign)
