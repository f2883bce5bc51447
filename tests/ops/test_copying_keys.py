"""hash_table_copy_ gives keys to a larger table, and so does `larger` of group_find_or_insert_."""

import pytest
import torch
from conftest import KEY_EXTREMES, generator

from sparsekit import HashTable, ops

from .groups import Group, Source
from .test_colliding_keys import colliding
from .test_renumbering import assert_counts, assert_used_slots_come_first


def table_of(keys, capacity=None, device="cpu", seed=None, load_factor=0.6):
    table = HashTable(capacity or len(keys), device=device, load_factor=load_factor)
    if seed is not None:
        table.hash_seed.copy_(seed)
    table.find_or_insert(keys.to(device))
    return table


def copied(table, capacity, rows, parts=1):
    """Return a larger table, with keys from some parts of the buckets, one after another."""
    larger = HashTable(capacity, device=table.buckets.device)
    larger.hash_seed.copy_(table.hash_seed)
    for part in table.buckets.tensor_split(min(parts, len(table.buckets))):
        ops.hash_table_copy_(larger.buckets, part, table.hash_seed, rows)
    larger.size.fill_(rows)
    return larger


@pytest.mark.parametrize("load_factor", [0.6, 1.0])
@pytest.mark.parametrize("n", [0, 1, 5, 63, 700])
@pytest.mark.parametrize("parts", [1, 3])
def test_all_keys_keep_their_rows(device, backend, n, parts, load_factor):
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator(n))
    keys = torch.cat([torch.tensor(KEY_EXTREMES), keys]).unique()
    keys = keys[torch.randperm(len(keys), generator=generator(n))]
    table = table_of(keys, device=device, load_factor=load_factor)
    larger = copied(table, 2 * len(keys) + 3, len(keys), parts)
    assert torch.equal(larger.keys().cpu(), keys)
    assert_used_slots_come_first(larger)
    assert_counts(larger)


def test_keys_of_later_rows_are_left_out(device, backend):
    keys = torch.arange(100)
    larger = copied(table_of(keys, device=device), 300, 40)
    assert torch.equal(larger.keys().cpu(), keys[:40])
    assert larger.find(keys[40:].to(device)).tolist() == [-1] * 60


def test_keys_that_collide(device, backend):
    keys = colliding(60)
    table = table_of(keys, device=device, seed=torch.zeros(1, dtype=torch.int64))
    larger = copied(table, 200, len(keys))
    assert torch.equal(larger.keys().cpu(), keys)
    assert_counts(larger)


def test_a_table_without_room_is_an_error(device, backend):
    table = table_of(torch.arange(40), device=device)
    small = HashTable(5, device=device)
    with pytest.raises(ValueError, match=r"^hash_table_copy_: rows is 40, but `to` has 10 slots"):
        ops.hash_table_copy_(small.buckets, table.buckets, table.hash_seed, 40)
    small.find_or_insert(torch.arange(100, 105, device=device))
    with pytest.raises(ValueError, match=r"^hash_table_copy_: `to` has no slot for some of the"):
        ops.hash_table_copy_(small.buckets, table.buckets, table.hash_seed, 10)


def test_tables_that_share_memory_are_refused(device, backend):
    table = HashTable(40, device=device)
    with pytest.raises(ValueError, match=r"^hash_table_copy_: buckets overlaps to"):
        ops.hash_table_copy_(table.buckets, table.buckets[3:], table.hash_seed, 1)


@pytest.mark.parametrize("which", [[0], [1], [0, 1], []])
def test_new_keys_go_into_the_larger_table_too(device, backend, which):
    group = Group(torch.float32, [3, 4], [50, 50], [True, True], [1, 1], device)
    known = torch.arange(10, device=device)
    for table in group.hash_tables:
        table.find_or_insert(known)
    larger = []
    for h, table in enumerate(group.hash_tables):
        larger.append(HashTable(90, device=device) if h in which else None)
        if h in which:
            larger[h].hash_seed.copy_(table.hash_seed)
    none = torch.empty(0, 8, dtype=torch.int64, device=device)
    keys = torch.tensor([3, 77, -5, 77, 2**40, 9, -5], device=device)
    nothing = torch.empty(0)
    group.sources = [
        Source(keys, nothing.long(), nothing),
        Source(keys[:3], nothing.long(), nothing),
    ]
    group.ask(0, 0, 0, 7, "sum")
    group.ask(1, 1, 0, 3, "sum")
    group.find_or_insert([none if t is None else t.buckets for t in larger])
    for table, other, new in zip(
        group.hash_tables, larger, ([77, -5, 2**40], [77, -5]), strict=True
    ):
        assert table.keys().tolist() == [*range(10), *new]
        if other is not None:
            assert other.find(torch.tensor(new, device=device)).tolist() == [10, 11, 12][: len(new)]
            assert other.find(known).tolist() == [-1] * 10
            other.size.fill_(10 + len(new))
            ops.hash_table_copy_(other.buckets, table.buckets, table.hash_seed, 10)
            assert torch.equal(other.keys(), table.keys())
