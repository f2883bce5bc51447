"""HashTable acts like a dict, and raises the correct error when the table is full."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsekit
from sparsekit import HashTable, TableFullError

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
EXTREMES = [0, -1, INT64_MIN, INT64_MAX, 1]
KEYS = st.one_of(st.sampled_from(EXTREMES), st.integers(-20, 20), st.integers(INT64_MIN, INT64_MAX))
LOAD_FACTORS = [1.0, 1, 0.6, 0.01]


def random_keys(n, seed=0):
    keys = torch.empty(n, dtype=torch.int64)
    keys.random_(INT64_MIN, None, generator=torch.Generator().manual_seed(seed))
    keys[: len(EXTREMES)] = torch.tensor(EXTREMES)[:n]
    assert len(keys.unique()) == n
    return keys[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]


def all_bytes(*modules_or_optimizers):
    """Return the bytes of every tensor of modules and optimizers."""
    tensors = []
    for item in modules_or_optimizers:
        if isinstance(item, torch.nn.Module):
            tensors += item.state_dict().values()
        else:
            tensors += [value for moments in item.state.values() for value in moments.values()]
    assert tensors
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@given(
    calls=st.lists(st.lists(KEYS, max_size=30), max_size=5),
    load_factor=st.sampled_from(LOAD_FACTORS),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_equals_a_dictionary(calls, load_factor, dtype):
    table, rows = HashTable(150, load_factor=load_factor), {}
    for call in calls:
        if dtype == torch.int32:
            call = [key % 2**32 - 2**31 for key in call]
        keys = torch.tensor(call, dtype=dtype)
        assert table.find(keys).tolist() == [rows.get(key, -1) for key in call]
        for key in call:
            rows.setdefault(key, len(rows))
        assert table.find_or_insert(keys).tolist() == [rows[key] for key in call]
        assert table.find(keys).tolist() == [rows[key] for key in call]
        assert len(table) == len(rows)
        assert table.keys().tolist() == list(rows)


@pytest.mark.parametrize("load_factor", LOAD_FACTORS)
@pytest.mark.parametrize("capacity", [1, 2, 5, 7, 1000, 4999])
@pytest.mark.parametrize("at_a_time", [1, 64, 10**6])
def test_takes_exactly_its_capacity(capacity, load_factor, at_a_time):
    if at_a_time == 1 and capacity > 100:
        capacity //= 10
    table = HashTable(capacity, load_factor=load_factor)
    keys = random_keys(capacity + 1)
    for batch in keys[:-1].split(at_a_time):
        table.find_or_insert(batch)
    assert len(table) == capacity
    assert torch.equal(table.keys(), keys[:-1])
    assert torch.equal(table.find(keys[:-1]), torch.arange(capacity))
    # The search for an absent key ends, although no empty place stops it.
    assert table.find(keys[-1:]) == -1
    before = all_bytes(table)
    with pytest.raises(TableFullError):
        table.find_or_insert(keys[-1:])
    with pytest.raises(TableFullError):
        table.find_or_insert(keys)
    assert all_bytes(table) == before
    # Known keys are still found.
    assert torch.equal(table.find_or_insert(keys[:-1].flip(0)), torch.arange(capacity).flip(0))
    assert all_bytes(table) == before


def test_full_error_says_what_happened_and_leaves_the_table():
    table = HashTable(4, name="users")
    table.find_or_insert(torch.tensor([10, 11, 12]))
    before = all_bytes(table)
    with pytest.raises(TableFullError) as caught:
        table.find_or_insert(torch.tensor([[11, 20, 21], [20, 20, -1]]))
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.layer, error.rank, error.size, error.capacity) == ("users", 0, 3, 4)
    assert error.refused == 3  # distinct new keys
    for part in (
        "users:",
        "rank 0",
        "3 of 4 rows",
        "3 new keys for 1 free rows",
        "none was inserted",
    ):
        assert part in str(error)
    assert all_bytes(table) == before
    # A key that was refused before may be inserted now.
    assert table.find_or_insert(torch.tensor([20])).tolist() == [3]


@pytest.mark.parametrize("load_factor", [1.0, 0.6])
def test_refused_call_leaves_no_trace(load_factor):
    """After a refused call, a table acts as if the call had not been made."""
    keys = random_keys(900)
    table, twin = (HashTable(600, load_factor=load_factor) for _ in range(2))
    twin.hash_seed.copy_(table.hash_seed)
    for part in keys[:500].split(50):
        table.find_or_insert(part)
        twin.find_or_insert(part)
        with pytest.raises(TableFullError):
            table.find_or_insert(random_keys(700, seed=1))
    assert all_bytes(table) == all_bytes(twin)
    assert torch.equal(table.find_or_insert(keys[400:600]), twin.find_or_insert(keys[400:600]))
    assert all_bytes(table) == all_bytes(twin)


@pytest.mark.parametrize("kind", ["pooled", "dense"])
def test_full_layer_leaves_weight_and_optimizer(kind):
    if kind == "pooled":
        layer = sparsekit.DistributedEmbedding("mean", 3, 4, 1, 5, name="items")
    else:
        layer = sparsekit.All2AllDenseEmbedding(3, 4, 1, 5, name="items")
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.1)
    layer(torch.tensor([[[7, 8, 7, 8, 7]]])).sum().backward()
    optimizer.step()
    before = all_bytes(layer, optimizer)
    grad = layer.weight.grad.clone()
    with pytest.raises(TableFullError) as caught:
        layer(torch.tensor([[[8, 1, 2, 1, 2]]]))
    error = caught.value
    assert (error.layer, error.size, error.capacity, error.refused) == ("items", 2, 3, 2)
    assert all_bytes(layer, optimizer) == before
    assert torch.equal(layer.weight.grad.to_dense(), grad.to_dense())
    layer(torch.tensor([[[8, 1, 7, 1, 7]]])).sum().backward()  # one more key fits
    assert len(layer.table) == 3
    # With a full table, unknown keys can still be evaluated.
    assert layer.eval()(torch.tensor([[[100, 101, 102, 103, 104]]])).isfinite().all()


def test_full_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(TableFullError("users", 3, 9, 10, 4)))
    assert type(error) is TableFullError
    assert vars(error) == {"layer": "users", "rank": 3, "size": 9, "capacity": 10, "refused": 4}
    assert str(error) == str(TableFullError("users", 3, 9, 10, 4))


@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3), (1, 2, 3), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_any_shape(shape, dtype):
    table = HashTable(100)
    keys = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype) * 7 - 3
    for call in (table.find_or_insert, table.find):
        rows = call(keys)
        assert rows.dtype == torch.int64
        assert rows.shape == shape
        assert rows.reshape(-1).tolist() == list(range(keys.numel()))


def test_keys_that_are_not_contiguous():
    table = HashTable(100)
    keys = torch.arange(12).view(3, 4).T[::2]
    rows = table.find_or_insert(keys)
    assert table.keys().tolist() == keys.reshape(-1).tolist()
    assert torch.equal(table.find(keys), rows)
    assert (
        table.find(torch.tensor(5).expand(2, 3)).tolist() == [[table.find(torch.tensor(5))] * 3] * 2
    )


def test_int32_and_int64_keys_are_the_same():
    table = HashTable(10)
    table.find_or_insert(torch.tensor([-1, 2**31 - 1], dtype=torch.int32))
    assert table.find(torch.tensor([2**31 - 1, -1, 2**32 - 1])).tolist() == [1, 0, -1]
    assert table.keys().dtype == torch.int64


def test_empty_table():
    table = HashTable(3)
    assert len(table) == 0
    assert bool(table)
    assert table.keys().tolist() == []
    assert table.find(torch.tensor(EXTREMES)).tolist() == [-1] * 5
    assert "size=0, capacity=3" in repr(table)


def through_an_assigned_state(table):
    other = HashTable(table.capacity)
    before = other.buckets
    other.load_state_dict(table.state_dict(), assign=True)
    assert other.buckets is not before
    return other


def through_state_dict(table):
    file = io.BytesIO()
    torch.save(table.state_dict(), file)
    file.seek(0)
    other = HashTable(table.capacity)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda table: pickle.loads(pickle.dumps(table)),
    "state_dict": through_state_dict,
    "assigned state_dict": through_an_assigned_state,
}


@pytest.mark.parametrize("way", COPIES)
def test_copies(way):
    table = HashTable(2000)
    keys = random_keys(1500)
    table.find_or_insert(keys[:1000])
    twin = COPIES[way](table)
    assert torch.equal(twin.find(keys), table.find(keys))
    assert torch.equal(twin.find_or_insert(keys), torch.arange(1500))
    assert len(table) == 1000
    assert torch.equal(table.keys(), keys[:1000])


def test_a_table_on_meta_refuses_a_state():
    with torch.device("meta"):
        table = HashTable(8, name="keys")
    with pytest.raises(RuntimeError, match=r"keys: .* meta"):
        table.load_state_dict(HashTable(8).state_dict())


def test_state_is_tensors():
    table = HashTable(12, load_factor=0.6)
    state = table.state_dict()
    assert {name: (value.dtype, tuple(value.shape)) for name, value in state.items()} == {
        "buckets": (torch.int64, (4, 8)),
        "hash_seed": (torch.int64, (1,)),
        "size": (torch.int64, (1,)),
    }
    assert list(table.parameters()) == []
    table.double()
    assert table.buckets.dtype == torch.int64


BAD = {
    "capacity 0": (lambda: HashTable(0), ValueError, ["capacity", "got 0"]),
    "capacity -1": (lambda: HashTable(-1), ValueError, ["capacity", "got -1"]),
    "capacity 2^31": (lambda: HashTable(2**31), ValueError, ["capacity", str(2**31)]),
    "capacity float": (lambda: HashTable(2.0), TypeError, ["capacity", "2.0"]),
    "capacity bool": (lambda: HashTable(True), TypeError, ["capacity", "True"]),
    "capacity str": (lambda: HashTable("9"), TypeError, ["capacity", "'9'"]),
    "load_factor 0": (lambda: HashTable(9, load_factor=0), ValueError, ["load_factor", "got 0"]),
    "load_factor 1.1": (lambda: HashTable(9, load_factor=1.1), ValueError, ["load_factor", "1.1"]),
    "load_factor nan": (
        lambda: HashTable(9, load_factor=math.nan),
        ValueError,
        ["load_factor", "nan"],
    ),
    "load_factor str": (lambda: HashTable(9, load_factor="1"), TypeError, ["load_factor", "'1'"]),
    "list": (lambda: HashTable(9).find([1]), TypeError, ["keys", "list"]),
    "list in": (lambda: HashTable(9).find_or_insert([1]), TypeError, ["keys", "list"]),
    "float": (lambda: HashTable(9).find(torch.ones(2)), TypeError, ["keys", "torch.float32"]),
    "bool": (
        lambda: HashTable(9).find_or_insert(torch.ones(2, dtype=torch.bool)),
        TypeError,
        ["keys", "torch.bool"],
    ),
    "device": (
        lambda: HashTable(9).find(torch.ones(2, dtype=torch.int64, device="meta")),
        ValueError,
        ["keys", "meta", "cpu"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, error, parts = BAD[case]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).startswith("HashTable: ")
    assert [part for part in parts if part not in str(caught.value)] == []


def test_numpy_capacity():
    assert type(HashTable(np.int32(9)).capacity) is int
