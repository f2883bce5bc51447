"""A hash table grows bit by bit, or at once; its keys and their rows are those of a large one."""

import copy
import pickle
import random

import pytest
import torch

import sparsekit
from sparsekit import HashTable, TableFullError
from sparsekit.tables import growth


@pytest.fixture(params=[1, 3, 1024], ids=lambda n: f"{n} buckets a lookup")
def in_steps(request, monkeypatch):
    """Let tables of any size grow bit by bit."""
    monkeypatch.setattr(growth, "_STEPWISE", 2)
    monkeypatch.setattr(growth, "_LEAST_BUCKETS", request.param)


def layer_of(rows, **options):
    return sparsekit.Embedding(rows, 2, name="t", on_full="grow", **options)


def looked_up(layer, keys):
    layer(torch.tensor(keys))
    return layer.table


def test_rows_are_those_of_a_large_table(in_steps, backend):
    draw = random.Random(3)
    layer, large = layer_of(2, max_capacity=1500), HashTable(1500)
    sizes = set()
    while len(large) < 1450:
        keys = [draw.randrange(-(2**63), 2**63) for _ in range(draw.choice([1, 2, 7, 40]))]
        looked_up(layer, keys)
        large.find_or_insert(torch.tensor(keys))
        sizes.add(layer.table.capacity)
        assert torch.equal(layer.table.find(large.keys()), torch.arange(len(large)))
    assert torch.equal(layer.table.keys(), large.keys())
    assert len(sizes) >= 8
    assert max(sizes) == 1500 == layer.table.max_capacity
    assert [len(layer.table.buckets), *layer.weight.shape] == [len(large.buckets), 1500, 2]


def test_a_larger_index_is_ready_before_it_is_needed(in_steps):
    layer = layer_of(64, max_capacity=1 << 12)
    at = {}
    for key in range(3000):
        capacity = looked_up(layer, [key]).capacity
        at.setdefault(capacity, key + 1)
    del at[64]
    for capacity, size in at.items():
        assert 0.35 * capacity < size < capacity / 2  # never by a lookup that found it full


def test_small_tables_grow_at_once():
    table = looked_up(layer_of(4), range(5))
    assert table.capacity == 8
    assert table._growth is None
    table = looked_up(layer_of(4), range(100))
    assert table.capacity == 100


def test_a_step_of_a_large_table_takes_a_bit():
    layer, rows = layer_of(1 << 17), 92_000
    capacity, before = layer.table.capacity, layer.table.buckets
    looked_up(layer, range(rows))
    assert layer.table._growth is not None
    assert not layer.table._growth.takes_keys
    steps = 0
    while layer.table.capacity == capacity:
        assert layer.table.buckets is before
        begin = rows + 100 * steps
        looked_up(layer, range(begin, begin + 100))
        steps += 1
    assert steps > 40
    assert torch.equal(layer.table.keys(), torch.arange(rows + 100 * steps))


def half_grown(in_keys=True):
    """Return a layer whose larger index takes new keys, or is not cleared yet."""
    layer = layer_of(100)
    key = 50
    looked_up(layer, range(50))
    while layer.table._growth is None or layer.table._growth.takes_keys != in_keys:
        looked_up(layer, [key])
        key += 1
    assert layer.table.capacity == 100
    return layer


def all_there(layer, keys):
    """Check that the layer has just these keys, also after it has grown further."""
    assert layer.table.keys().tolist() == keys
    more = list(range(10**6, 10**6 + 300))
    for key in more:
        looked_up(layer, [key])
    assert layer.table.keys().tolist() == keys + more
    assert layer.table.capacity >= 300


@pytest.fixture(params=[True, False], ids=["copying", "clearing"])
def layer(request, monkeypatch):
    monkeypatch.setattr(growth, "_STEPWISE", 2)
    monkeypatch.setattr(growth, "_LEAST_BUCKETS", 2)
    monkeypatch.setattr(growth, "_BUCKETS_PER_KEY", 1)
    return half_grown(request.param)


def test_keys_that_are_inserted_directly(layer):
    keys = [*layer.table.keys().tolist(), -5, -6]
    layer.table.find_or_insert(torch.tensor([-5, -6]))
    all_there(layer, keys)


def test_keys_that_are_inserted_by_ops(layer):
    keys = [*layer.table.keys().tolist(), -5]
    sparsekit.ops.hash_table_find_or_insert_(*layer.table.tensors(), torch.tensor([-5]), 100)
    all_there(layer, keys)


def test_keys_that_are_erased(layer):
    keys = layer.table.keys().tolist()
    layer.erase(torch.tensor([3, 7]))
    looked_up(layer, [-3, -7])  # as many as before
    kept = [key for key in keys if key not in (3, 7)]
    assert sorted(layer.table.keys().tolist()) == sorted([*kept, -3, -7])
    all_there(layer, layer.table.keys().tolist())


def test_keys_that_are_assigned(layer):
    keys = layer.table.keys().tolist()
    layer.assign(torch.tensor([-3, -7]), torch.ones(2, 2))
    all_there(layer, [*keys, -3, -7])


def test_a_state_that_is_loaded(layer):
    other = layer_of(100)
    looked_up(other, range(200, 200 + len(layer.table)))
    layer.load_state_dict(other.state_dict())
    all_there(layer, list(range(200, 200 + len(other.table))))


def test_a_table_that_is_cleared(layer):
    looked = len(layer.table)
    layer.clear()
    looked_up(layer, range(300, 300 + looked))
    all_there(layer, list(range(300, 300 + looked)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_grow_by_themselves(layer, copied):
    other = copied(layer)
    keys = layer.table.keys().tolist()
    all_there(layer, keys)
    all_there(other, keys)


def test_a_lookup_that_does_not_fit_finishes_at_once(layer):
    keys = layer.table.keys().tolist()
    looked_up(layer, range(1000, 1060))
    assert layer.table.capacity == 200
    all_there(layer, [*keys, *range(1000, 1060)])


def test_reserve():
    table = HashTable(10, max_capacity=1000)
    table.find_or_insert(torch.arange(10))
    for rows, capacity in (
        (3, 10),
        (10, 10),
        (11, 20),
        (19, 20),
        (300, 300),
        (599, 600),
        (601, 1000),
    ):
        table.reserve(rows)
        assert table.capacity == capacity
    assert table.keys().tolist() == list(range(10))
    with pytest.raises(TableFullError, match="10 of 1000 rows are in use and the call brought 991"):
        table.reserve(1001)


def test_no_memory_for_a_larger_index(monkeypatch):
    layer = layer_of(10)
    looked_up(layer, range(10))
    state = {name: value.clone() for name, value in layer.state_dict().items()}

    def no_memory(*args, **keywords):
        raise RuntimeError("[enforce fail] can't allocate memory")

    with monkeypatch.context() as now:
        now.setattr(growth, "new_buckets", no_memory)
        with pytest.raises(TableFullError, match=r"^t: the table on rank 0 is full: 10 of") as info:
            layer(torch.tensor([1, 2, 99]))
        assert "can't allocate" in str(info.value.__cause__)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, state[name])
    all_there(layer, list(range(10)))


def test_growing_ahead_of_need_does_not_need_memory(in_steps, monkeypatch):
    layer = layer_of(64)

    def no_memory(*args, **keywords):
        raise RuntimeError("[enforce fail] can't allocate memory")

    monkeypatch.setattr(growth, "new_buckets", no_memory)
    looked_up(layer, range(64))
    assert layer.table.capacity == 64


def test_an_interrupt_in_a_step(monkeypatch):
    """After a step that is interrupted, the larger index is made anew."""
    monkeypatch.setattr(growth, "_STEPWISE", 2)
    monkeypatch.setattr(growth, "_LEAST_BUCKETS", 2)
    layer, draw = layer_of(8), random.Random(0)
    clear, copied = sparsekit.ops.hash_table_clear_, sparsekit.ops.hash_table_copy_

    def sometimes(op):
        def called(*args):
            if (when := draw.random()) < 0.1:
                raise KeyboardInterrupt
            op(*args)
            if when < 0.2:
                raise KeyboardInterrupt

        return called

    monkeypatch.setattr(sparsekit.ops, "hash_table_clear_", sometimes(clear))
    monkeypatch.setattr(sparsekit.ops, "hash_table_copy_", sometimes(copied))
    interrupts = 0
    for key in range(600):
        while True:
            try:
                looked_up(layer, [key])
                break
            except KeyboardInterrupt:
                interrupts += 1
        assert layer.table.find(torch.arange(key + 1)).tolist() == list(range(key + 1))
    assert interrupts > 20
    assert layer.table.keys().tolist() == list(range(600))
