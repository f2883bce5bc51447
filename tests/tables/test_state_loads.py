"""A load resets a table's marks, and refuses values that new keys would overwrite."""

import copy

import pytest
import torch

from sparsekit.nn import Constant
from sparsekit.tables import state as module
from sparsekit.tables.hash_table import HashTable
from sparsekit.tables.state import refuse_lost_values
from sparsekit.tables.weight import EmbeddingWeight

from .made import both, of_rank, parts_of, same, table_of, without

T = torch.tensor


WAYS = {
    "load_state_dict": lambda table, state, assign: table.load_state_dict(state, assign=assign),
    "load": lambda table, state, assign: module.load(table, module.entries_of(state, ""), assign),
}
ways = pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)


@both
@ways
@pytest.mark.parametrize("capacity", [3, 9, 20])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_load_leaves(capacity, assign, frozen, load, monkeypatch):
    of_rank(monkeypatch, 1, 2)
    table = table_of(1, 2, 3, 4, seed=2).requires_grad_(not frozen)
    saved = table_of(7, 8, 9, seed=3, capacity=capacity)
    saved.weight.data[:3] *= 5
    calls, own = [], table.weight
    own.before_read = lambda *_: calls.append(len(table.table))
    with torch.no_grad():
        own[8] = 7  # a row without a key
    assert own.written()
    table.checked_modes, own.moved = {True, False}, False
    with torch.device("meta"):  # nothing may be made on the default device
        load(table, saved.state_dict(), assign)
    assert {each.device.type for each in table.state_dict().values()} == {"cpu"}
    assert calls[:1] == [4]
    weight = table.weight
    assert (weight is own) != assign
    assert (type(weight), weight.requires_grad) == (EmbeddingWeight, not frozen)
    assert weight.shape == (9, 2)
    assert weight[:3].tolist() == [[5, 5], [10, 10], [15, 15]]
    assert not weight[3:].any()
    assert not weight.written()
    assert not weight.moved
    assert weight.is_contiguous()
    assert table.checked_modes == set()
    assert (int(table.seed), table.shard.tolist()) == (3, [1, 2])
    assert table.table.keys().tolist() == weight.keys().tolist() == [7, 8, 9]
    assert table.table.rows_of._layer() is table
    refuse_lost_values(table, True)
    saved.table.clear_()
    assert table.table.keys().tolist() == [7, 8, 9]
    assert (weight.data_ptr() == saved.weight.data_ptr()) == (assign and capacity == 9)


@both
def test_states_of_optimizers_follow_a_load(assign):
    table, saved = table_of(1, 2, 3), table_of(3, 7, 1)
    optimizer = torch.optim.SGD([table.weight], lr=0.1)
    table.weight.is_stepped_by(optimizer)
    optimizer.state[table.weight] = {"m": torch.arange(9.0) + 1}
    table.load_state_dict(saved.state_dict(), assign=assign)
    if not assign:
        assert optimizer.state[table.weight]["m"].tolist() == [3, 0, 1] + [0] * 6


@both
@ways
def test_moved_rows_of_a_state_count_as_moved(assign, load):
    table, saved = table_of(1), table_of(7)
    saved.weight.data[5] = 3
    load(table, saved.state_dict(), assign)
    assert table.weight.moved
    refuse_lost_values(table, True)


@both
def test_a_load_without_the_table(assign):
    rows, saved = table_of(use_hashtable=False, seed=1), table_of(use_hashtable=False, seed=2)
    calls = []
    rows.weight.before_read = lambda weight, at: calls.append((at, float(weight.data[0, 0])))
    first = float(rows.weight.data[0, 0])
    rows.load_state_dict(saved.state_dict(), assign=assign)
    assert calls == [(None, first)]  # missed steps belong to the rows of before
    assert same(parts_of(rows), parts_of(saved))
    state = without(parts_of(saved), "shard")
    state["seed"] += 1
    rows.load_state_dict(state, assign=assign)  # as older versions saved it
    assert (int(rows.seed), rows.shard.tolist()) == (3, [0, 1])
    before = parts_of(rows)
    result = torch.nn.ModuleDict({"a": rows}).load_state_dict({}, strict=False, assign=assign)
    assert result.missing_keys == ["a.weight", "a.seed", "a.shard"]
    assert same(parts_of(rows), before)
    rows._parameters["weight"] = other = torch.nn.Parameter(rows.weight.detach())
    torch.nn.ModuleDict({"a": rows}).load_state_dict({}, strict=False, assign=assign)
    assert rows.weight is other


@both
def test_weights_in_other_strides_become_contiguous(assign):
    table, state = table_of(1), parts_of(table_of(7, 8))
    state["weight"] = state["weight"].T.contiguous().T
    table.load_state_dict(state, assign=assign)
    assert table.weight.is_contiguous()
    assert not table.weight.moved
    assert table.weight[:2].tolist() == [[1, 1], [2, 2]]


@both
@pytest.mark.parametrize("frozen", [False, True])
def test_a_swap_of_tensors_leaves_the_type(assign, frozen):
    table, saved = table_of(1).requires_grad_(not frozen), table_of(7, 8)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        table.load_state_dict(saved.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert (type(table.weight), table.weight.requires_grad) == (EmbeddingWeight, not frozen)
    assert table.table.keys().tolist() == table.weight.keys().tolist() == [7, 8]
    assert not table.weight.written()


def test_a_plain_load_of_other_entries_is_the_librarys_own(monkeypatch):
    table, seen = table_of(1), []
    load = torch.nn.Module._load_from_state_dict
    monkeypatch.setattr(
        torch.nn.Module,
        "_load_from_state_dict",
        lambda self, *rest: (
            (seen.append(self.weight.noted_version), load(self, *rest))[1]
            if self is table
            else load(self, *rest)
        ),
    )
    table.load_state_dict(table_of(7).state_dict())
    assert seen == [None]


def test_rows_change_under_the_tables_context():
    table = table_of(1)
    calls = []
    table.weight.note_keys = lambda: calls.append("note")
    table.weight.follow_keys = lambda: calls.append("follow")
    with table.rows_changing():
        assert calls == ["note"]
    assert calls == ["note", "follow"]
    with table_of(use_hashtable=False).rows_changing():
        pass


# Values that would be lost


LOST = (
    "n: weight was written to {}, and a new key starts from the layer's initializer. For other "
    "initial values give the layer an embedding_initializer, such as sparsekit.nn.Constant(7.0); "
    "for pretrained vectors of known keys call assign(keys, vectors). To drop what was written, {}"
)
RESET = "call reset_parameters(), which drops keys too"
NO_KEYS = "before any of its rows had a key", RESET
AS_ZEROS = "as zeros, rows without a key too", RESET


def past(keys):
    undo = f"write zeros to weight[{keys}:] under torch.no_grad()"
    return f"past its {keys} keys, in rows that have none", undo


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("initializer", [None, Constant(0.0), Constant(1.0)], ids=str)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("values", ["zeros", "first free", "first", "with keys", "last", "both"])
@pytest.mark.parametrize("keys", [0, 3])
def test_values_that_new_keys_would_lose(keys, values, written, initializer, moved):
    table = table_of(*range(keys), embedding_initializer=initializer)
    weight = table.weight
    weight.data.zero_()
    places = {
        "first": [0],
        "first free": [keys],
        "with keys": [keys - 1],
        "last": [8],
        "both": [keys - 1, keys],
    }
    for place in places.get(values, []):
        if place >= 0:
            weight.data[place, 1] = -2
    weight.moved, weight.noted_version = moved, -7
    nonzero = bool(weight.any())
    lost = None
    if keys == 0:
        lost = NO_KEYS if nonzero or (written and initializer != Constant(0.0)) else None
    elif bool(weight[keys:].any()):
        lost = past(keys)
    elif written and not nonzero and initializer != Constant(0.0):
        lost = AS_ZEROS
    if lost and not moved:
        with pytest.raises(RuntimeError) as raised:
            refuse_lost_values(table, written)
        assert str(raised.value) == LOST.format(*lost)
        assert weight.noted_version == -7
        return
    refuse_lost_values(table, written)
    assert weight.noted_version == (weight._version if keys and written else -7)


def test_zeros_of_keys_are_refused_beside_values_in_rows_that_no_sample_has():
    table = table_of(5, capacity=201)
    table.weight.data.zero_()
    table.weight.data[1 + 100] = 1
    with pytest.raises(RuntimeError, match="written to as zeros"):
        refuse_lost_values(table, True)


def test_rows_past_the_first_with_keys_are_looked_at_too():
    rows = module.SEEN_ROWS + 5
    table = table_of(*range(rows), capacity=rows + 9)
    table.weight.data.zero_()
    table.weight.data[rows - 1] = 3
    refuse_lost_values(table, True)
    table.weight.data[rows - 1] = 0
    with pytest.raises(RuntimeError, match="written to as zeros"):
        refuse_lost_values(table, True)
    table._parameters["weight"] = torch.nn.Parameter(torch.ones(rows + 9, 2))
    with pytest.raises(RuntimeError, match=f"past its {rows} keys"):
        refuse_lost_values(table, False)


@both
def test_a_deep_copy_loads_alone(assign):
    table = table_of(1, 2)
    other = copy.deepcopy(table)
    other.load_state_dict(table_of(7).state_dict(), assign=assign)
    assert (table.table.keys().tolist(), other.table.keys().tolist()) == ([1, 2], [7])
    assert table.weight[:2].tolist() == [[1, 1], [2, 2]]
    assert isinstance(other.table, HashTable)
