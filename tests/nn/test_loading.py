"""A saved state loads into a different capacity; a state that does not fit changes nothing."""

import copy
import functools

import pytest
import torch
from conftest import same_bits
from interruptions import interrupt

import sparsekit
from sparsekit import HashTable

from .bags import single, vectors

KEYS = [3, -(2**63), 0, 2**63 - 1, -1, 17, 18, 19, 20, 21]


def trained(keys=KEYS, **settings):
    """Return a layer whose vectors differ from the initial vectors."""
    layer = single(**settings)
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
    layer((torch.tensor(keys), torch.arange(len(keys) + 1))).sum().backward()
    optimizer.step()
    layer.zero_grad()
    return layer


def state_of(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


def same_state(one, other):
    assert set(one) == set(other)
    return all(same_bits(one[name], other[name]) for name in one)


def refused(layer, state, *parts, **how):
    """Check that loading the state raises an error that contains all parts, and changes nothing."""
    before = state_of(layer)
    given = dict(state)
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(state, **how)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert same_state(state_of(layer), before)
    assert list(state) == list(given)
    assert all(state[name] is given[name] for name in given)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("capacity", [10, 11, 300, 1000])
def test_a_state_of_another_capacity_loads_if_its_rows_fit(capacity, assign):
    saved = trained()
    layer = trained([5, 6, 7, 3], max_vocabulary_size_per_gpu=capacity, seed=99)
    layer.load_state_dict(state_of(saved), assign=assign)
    assert layer.table.keys().tolist() == KEYS
    assert layer.weight.shape == (capacity, 5)
    assert torch.equal(vectors(layer, KEYS), vectors(saved, KEYS))
    # The layer still trains: unseen keys start as in the saved layer, and gradients reach the rows.
    assert torch.equal(vectors(layer.eval(), [5, 99]), vectors(saved.eval(), [5, 99]))
    layer.train()
    saved.train()
    for one in (layer, saved):
        one((torch.tensor(KEYS[:3]), torch.arange(4))).sum().backward()
        sparsekit.optim.LazyAdam(one.parameters(), lr=0.1).step()
    assert torch.equal(vectors(layer, KEYS), vectors(saved, KEYS))


def test_rows_that_a_smaller_state_does_not_have_are_unused():
    layer = trained(list(range(50)))
    layer.load_state_dict(trained(max_vocabulary_size_per_gpu=10).state_dict())
    assert layer.weight[:10].all()
    assert not layer.weight[10:].any()


def test_a_float16_weight_is_cast_but_not_assigned():
    saved = trained(dtype=torch.bfloat16)
    state = state_of(saved)
    state["weight"] = state["weight"].half()
    refused(trained([1]), state, "weight", "got torch.float16", assign=True)
    layer = trained([1], dtype=torch.bfloat16)
    layer.load_state_dict(state)
    assert torch.equal(vectors(layer, KEYS), vectors(saved, KEYS))


def test_a_state_of_more_rows_than_there_are_is_refused():
    refused(trained([1, 2], max_vocabulary_size_per_gpu=9), trained().state_dict(), "10 rows", "9")


def test_a_state_of_another_dim_leaves_table_and_vectors():
    # With the table of one layer and the vectors of another, keys would read each other's rows.
    layer, other = trained(list(range(50))), trained(list(range(50, 60)), embedding_vec_size=6)
    before = vectors(layer, list(range(50)))
    refused(layer, other.state_dict(), "weight", "[any, 5]", "[300, 6]")
    assert torch.equal(vectors(layer, list(range(50))), before)


def with_row(state, key, row):
    """Return the state with another row for a key."""
    state = {name: value.clone() for name, value in state.items()}
    buckets = state["table.buckets"]
    rows = buckets.view(torch.int32)[:, 10:15]
    rows[(buckets[:, :5] == key) & (rows >= 0)] = row
    return state


def without(state, *names):
    return {name: value for name, value in state.items() if name not in names}


def with_one_more(state, key, row):
    """Return the state with a new key that has a row."""
    state = {name: value.clone() for name, value in state.items()}
    rows = state["table.buckets"].view(torch.int32)[:, 10:15]
    bucket, slot = (rows < 0).nonzero()[0].tolist()
    rows[bucket, slot] = row
    state["table.buckets"][bucket, slot] = key
    return state


DAMAGE = {
    "one more key": (lambda s: with_one_more(s, 99, 3), "do not have one key each"),
    "two keys on one row": (lambda s: with_row(s, 17, 3), "do not have one key each"),
    "a row that is not in use": (lambda s: with_row(s, 17, 10), "row 10, but 10 rows"),
    "a row far beyond": (lambda s: with_row(s, 17, 2**31 - 1), f"row {2**31 - 1}"),
    "a row without a key": (lambda s: with_row(s, 17, -1), "do not have one key each"),
    "a key that is another": (
        lambda s: s | {"table.buckets": s["table.buckets"].where(s["table.buckets"] != 17, 18)},
        "a key has two rows",
    ),
    "size 0": (lambda s: s | {"table.size": torch.tensor([0])}, "but 0 rows are in use"),
    "size 11": (lambda s: s | {"table.size": torch.tensor([11])}, "one key each"),
    "size -1": (lambda s: s | {"table.size": torch.tensor([-1])}, "-1 rows"),
    "size 2^62": (lambda s: s | {"table.size": torch.tensor([2**62])}, str(2**62)),
    "two sizes": (lambda s: s | {"table.size": torch.tensor([10, 10])}, "size", "[2]"),
    "fewer vectors": (lambda s: s | {"weight": s["weight"][:9]}, "weight has 9"),
    "one vector too long": (lambda s: s | {"weight": s["weight"][0]}, "[any, 5]", "[5]"),
    "float": (lambda s: {n: v.float() for n, v in s.items()}, "must be int64, got torch.float32"),
    "int weight": (lambda s: s | {"weight": s["weight"].int()}, "weight", "got torch.int32"),
    "int32 buckets": (
        lambda s: s | {"table.buckets": s["table.buckets"].int()},
        "buckets",
        "got torch.int32",
    ),
    "narrow buckets": (
        lambda s: s | {"table.buckets": s["table.buckets"][:, :7]},
        "buckets",
        "[any, 8]",
    ),
    "no hash seed": (lambda s: without(s, "table.hash_seed"), "has no hash_seed"),
    "no buckets": (lambda s: without(s, "table.buckets"), "has no buckets"),
    "no table": (lambda s: without(s, "table.buckets", "table.size"), "has no buckets"),
    "only the weight": (lambda s: {"weight": s["weight"]}, "has no seed, only weight"),
    "no weight": (lambda s: without(s, "weight"), "has no weight"),
    "a list": (lambda s: s | {"table.size": [10]}, "size", "must be a tensor, got [10]"),
    "no values": (lambda s: s | {"weight": s["weight"].to("meta")}, "weight", "on meta"),
    "two seeds": (lambda s: s | {"seed": torch.tensor([1, 2])}, "seed", "[2]"),
    "another rank": (lambda s: s | {"shard": torch.tensor([1, 2])}, "rank 1 of 2"),
    "no rank": (lambda s: s | {"shard": torch.tensor(0)}, "shard", "[2]"),
}


@pytest.mark.parametrize("how", [{}, {"assign": True}, {"strict": False}], ids=str)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused(damage, how):
    change, *parts = DAMAGE[damage]
    layer = trained([17, 4, 5])
    state = change(state_of(trained()))
    refused(layer, state, "layer:", *parts, **how)
    # Other layers of the model still load.
    model = torch.nn.ModuleDict({"a": layer, "b": trained([1])})
    states = {"a": state, "b": trained([2, 3]).state_dict()}
    inside = {
        f"{at}.{name}": value for at, state in states.items() for name, value in state.items()
    }
    with pytest.raises(RuntimeError, match="layer:"):
        model.load_state_dict(inside, **how)
    assert layer.table.keys().tolist() == [17, 4, 5]
    assert model["b"].table.keys().tolist() == [2, 3]


TABLE_DAMAGE = ["two keys on one row", "a key that is another", "size 0", "float", "no buckets"]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("damage", TABLE_DAMAGE)
def test_a_damaged_table_is_refused(damage, assign):
    change, *parts = DAMAGE[damage]
    table = HashTable(20, name="users")
    table.find_or_insert(torch.tensor([5, 6]))
    state = change(state_of(trained()))
    of_table = {n[6:]: value for n, value in state.items() if n.startswith("table.")}
    refused(table, of_table, "users:", *parts, assign=assign)


@pytest.mark.parametrize("assign", [False, True])
def test_a_table_takes_the_keys_of_another_capacity(assign):
    saved, table = HashTable(1000, load_factor=1), HashTable(7)
    saved.find_or_insert(torch.arange(7) * 10**15)
    table.find_or_insert(torch.tensor([5, 6]))
    table.load_state_dict(saved.state_dict(), assign=assign)
    assert torch.equal(table.keys(), saved.keys())
    with pytest.raises(sparsekit.TableFullError):
        table.find_or_insert(torch.tensor([1]))
    saved.find_or_insert(torch.tensor([1]))
    refused(table, saved.state_dict(), "8 rows", "7", assign=assign)


@pytest.mark.parametrize("assign", [False, True])
def test_a_table_within_a_model_takes_the_keys_of_another_capacity(assign):
    saved, model = (torch.nn.ModuleDict({"users": HashTable(n)}) for n in (1000, 7))
    saved["users"].find_or_insert(torch.arange(7) * 10**15)
    model.load_state_dict(saved.state_dict(), assign=assign)
    assert torch.equal(model["users"].keys(), saved["users"].keys())
    assert model["users"].capacity == 7


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("key", [2**31, -(2**31) - 1])
def test_keys_that_an_int32_layer_cannot_be_asked_for(key, assign):
    fits = [2**31 - 1, -(2**31), 7]
    layer = single(key_dtype=torch.int32)
    layer.load_state_dict(state_of(trained(fits)), assign=assign)
    assert layer.table.keys().tolist() == fits
    why = f"layer: key {key} of row 3 is no int32, which the layer takes; make it with key_dtype"
    refused(layer, state_of(trained([*fits, key, 8])), why, assign=assign)


def test_counts_of_spilled_keys_are_not_taken_over():
    saved = trained()
    state = state_of(saved)
    state["table.buckets"].view(torch.int32)[:, 15] = 2**31 - 1
    layer = single()
    layer.load_state_dict(state)
    assert same_state(layer.state_dict(), saved.state_dict())


def test_a_state_saved_and_loaded_is_the_same_to_the_bit():
    saved = trained(list(range(0, 3000, 10)))
    layer = trained([1, 2, 3])
    layer.load_state_dict(saved.state_dict())
    assert same_state(layer.state_dict(), saved.state_dict())


def test_a_layer_that_a_state_does_not_have_keeps_its_own():
    layer = trained()
    before = state_of(layer)
    model = torch.nn.ModuleDict({"layer": layer, "dense": torch.nn.Linear(2, 2)})
    state = {f"dense.{n}": v for n, v in torch.nn.Linear(2, 2).state_dict().items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) == {f"layer.{name}" for name in before}
    assert unexpected == []
    assert same_state(layer.state_dict(), before)


def test_row_numbers_and_hash_tables_do_not_load_each_other():
    rows = single(use_hashtable=False, name="rows")
    refused(rows, trained().state_dict(), "rows: the state has a hash table")
    refused(trained(), rows.state_dict(), "layer: the state has no buckets")
    other = single(use_hashtable=False, max_vocabulary_size_per_gpu=301)
    refused(rows, other.state_dict(), "rows: weight", "[300, 5]", "[301, 5]")


@pytest.mark.parametrize("frozen", [False, True])
def test_an_assigned_weight_is_as_frozen_as_the_one_before(frozen):
    layer, state = single().requires_grad_(not frozen), state_of(trained())
    layer.load_state_dict(state, assign=True)
    assert layer.weight.requires_grad != frozen
    assert layer.weight.data_ptr() == state["weight"].data_ptr()
    assert sparsekit.split_embedding_variable_from_others(layer)[0] == [layer.weight]


def test_an_assigned_weight_is_contiguous():
    layer, expected = single(), trained()
    state = state_of(expected)
    state["weight"] = state["weight"].T.contiguous().T
    layer.load_state_dict(state, assign=True)
    assert layer.weight.is_contiguous()
    keys = expected.table.keys()
    assert torch.equal(layer.vectors(keys), expected.vectors(keys))


@pytest.mark.parametrize("assign", [False, True])
def test_rows_that_a_loaded_table_does_not_use_are_zeros(assign):
    layer, other = trained([1, 2, 3, 4]), trained([2])
    layer.table.load_state_dict(other.table.state_dict(), assign=assign)
    assert not layer.weight[1:].any()
    layer((torch.tensor([9]), torch.tensor([0, 1])))  # no row may count as written by hand


@pytest.mark.parametrize("assign", [False, True])
def test_an_interrupted_load_leaves_the_old_state_or_the_new_one(assign):
    old, new = trained([17, 4, 5]), trained(max_vocabulary_size_per_gpu=200)
    loaded = copy.deepcopy(old)
    loaded.load_state_dict(new.state_dict())
    state, outcomes = new.state_dict(), []
    layer = copy.deepcopy(old)
    # Every second moment: those of odd numbers without `assign`, the others with it.
    while not interrupt(
        functools.partial(layer.load_state_dict, state, assign=assign),
        2 * len(outcomes) + 1 + assign,
    ):
        is_old = same_state(layer.state_dict(), old.state_dict())
        assert is_old or same_state(layer.state_dict(), loaded.state_dict())
        outcomes.append(is_old)
        layer = copy.deepcopy(old)
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0]
    assert not outcomes[-1]


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_that_swaps_tensors(assign):
    layer, saved = single(), trained()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(saved.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert sparsekit.split_embedding_variable_from_others(layer)[0] == [layer.weight]
    assert same_state(layer.state_dict(), saved.state_dict())
