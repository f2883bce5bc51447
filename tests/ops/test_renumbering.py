"""hash_table_renumber_ moves and removes keys like a dict, and leaves a sound table."""

import random

import numpy as np
import pytest
import torch
from conftest import KEY_EXTREMES, assert_same_bits_for_any_threads, generator

from sparsekit import HashTable, ops

from .test_colliding_keys import colliding
from .test_hash_table import BUCKET, home_bucket, keys_of_bucket, snapshot


def lines_of(table):
    return table.buckets.cpu().numpy().view(BUCKET).reshape(-1)


def assert_used_slots_come_first(table):
    buckets = lines_of(table)
    used = buckets["rows"] >= 0
    assert (used[:, :-1] >= used[:, 1:]).all()
    assert (buckets["rows"][~used] == -1).all()
    assert (buckets["keys"][~used] == 0).all()


def assert_counts(table):
    """Check that each bucket counts the keys of the table that have passed it."""
    buckets = lines_of(table)
    spilled = np.zeros(len(buckets), dtype=np.int32)
    for b, slot in np.argwhere(buckets["rows"] >= 0):
        passed = home_bucket(int(buckets["keys"][b, slot]), len(buckets), int(table.hash_seed))
        while passed != b:
            spilled[passed] += 1
            passed = (passed + 1) % len(buckets)
    assert (buckets["spilled"] == spilled).all()


def renumber(table, new_rows):
    new_rows = torch.tensor(new_rows, dtype=torch.int32, device=table.buckets.device)
    ops.hash_table_renumber_(table.buckets, table.hash_seed, new_rows)
    table.size.fill_(int((new_rows >= 0).sum()))


def sweep_of(n, removed):
    """Return new rows after `removed` have gone: the last kept rows move into freed rows."""
    kept = n - len(removed)
    freed = iter(sorted(row for row in removed if row < kept))
    return [-1 if row in removed else row if row < kept else next(freed) for row in range(n)]


def shuffled(n, removed, draw):
    """Return new rows in a random order."""
    rows = iter(draw.sample(range(n - len(removed)), n - len(removed)))
    return [-1 if row in removed else next(rows) for row in range(n)]


class Churn:
    """A hash table and a dict that get the same keys and lose the same keys."""

    def __init__(self, table, keys, seed):
        self.table, self.keys, self.expected = table, keys, {}
        self.draw = random.Random(seed)

    def insert(self, keys):
        for key in keys:
            self.expected.setdefault(key, len(self.expected))
        asked = torch.tensor(keys, dtype=torch.int64, device=self.table.buckets.device)
        rows = self.table.find_or_insert(asked)
        assert rows.tolist() == [self.expected[key] for key in keys]

    def remove(self, removed, in_order=True):
        n = len(self.expected)
        new_rows = sweep_of(n, removed) if in_order else shuffled(n, removed, self.draw)
        renumber(self.table, new_rows)
        now = {key: new_rows[row] for key, row in self.expected.items() if new_rows[row] >= 0}
        self.expected = now

    def check(self):
        """Check the keys of all rows, which also checks that the table is sound."""
        in_row = {row: key for key, row in self.expected.items()}
        assert self.table.keys().tolist() == [in_row[row] for row in range(len(in_row))]
        asked = torch.tensor(self.keys, device=self.table.buckets.device)
        wanted = [self.expected.get(key, -1) for key in self.keys]
        assert self.table.find(asked).tolist() == wanted

    def round(self):
        absent = [key for key in self.keys if key not in self.expected]
        room = self.table.capacity - len(self.expected)
        new = self.draw.sample(absent, min(len(absent), self.draw.randint(0, room)))
        known = self.draw.sample(list(self.expected), min(len(self.expected), 3))
        self.insert(self.draw.sample(new + known, len(new + known)))
        self.check()
        n = len(self.expected)
        self.remove(set(self.draw.sample(range(n), self.draw.randint(0, n))), n % 3 != 0)
        self.check()
        if self.draw.random() < 0.05:
            self.empty()

    def empty(self):
        self.remove(set(range(len(self.expected))))
        clear = self.table.buckets.clone()
        ops.hash_table_clear_(clear)
        assert torch.equal(self.table.buckets, clear)


@pytest.mark.parametrize("load_factor", [0.6, 1.0])
@pytest.mark.parametrize("capacity", [4, 15, 60])
def test_churn_like_a_dict(device, backend, capacity, load_factor):
    table = HashTable(capacity, device=device, load_factor=load_factor)
    candidates = torch.randint(-(2**63), 2**63 - 1, (2 * capacity,), generator=generator(capacity))
    churn = Churn(table, [*KEY_EXTREMES, 1, *candidates.tolist()], capacity)
    for i in range(500 if backend == "cpu" else 150):
        churn.round()
        if i % 50 == 0:
            assert_used_slots_come_first(table)
            assert_counts(table)
    churn.empty()


@pytest.mark.parametrize("bucket", [0, 5, 9])
def test_churn_of_keys_with_the_same_home(device, backend, bucket):
    table = HashTable(50, device=device, load_factor=1.0)
    churn = Churn(table, keys_of_bucket(table, bucket, 80).tolist(), bucket)
    for i in range(300 if backend == "cpu" else 100):
        churn.round()
        if i % 20 == 0:
            assert_counts(table)
    churn.empty()


@pytest.mark.parametrize("n", [300, 3000])
def test_churn_of_colliding_keys(device, n):
    table = HashTable(n, device=device)
    keys = colliding(n).tolist()
    churn = Churn(table, keys, n)
    churn.insert(keys)
    churn.check()
    for _ in range(8):
        churn.round()
    assert_counts(table)
    churn.empty()


def test_a_key_behind_a_hole_is_found_and_not_inserted_again(device):
    """Key 0 matches empty slots, which must not end its search."""
    for seed in range(20):
        table = HashTable(10, device=device, load_factor=1.0)
        table.hash_seed.fill_(seed << 40)
        home = home_bucket(0, 2, seed << 40)
        others = keys_of_bucket(table, home, 7)
        first = others[others != 0][:5].to(device)
        table.find_or_insert(first)
        zero = torch.tensor([0], device=device)
        assert table.find_or_insert(zero).tolist() == [5]
        renumber(table, [-1, 0, -1, 1, 2, 3])
        assert table.find(zero).tolist() == [3]
        assert table.find_or_insert(zero).tolist() == [3]
        assert table.find_or_insert(first[:1]).tolist() == [4]
        assert table.keys().tolist() == [*first[[1, 3, 4]].tolist(), 0, int(first[0])]
        assert_counts(table)


def test_a_refused_insertion_into_holes_is_undone(device):
    table = HashTable(50, device=device, load_factor=1.0)
    keys = keys_of_bucket(table, 3, 60)
    table.find_or_insert(keys[:40].to(device))
    renumber(table, sweep_of(40, set(range(0, 40, 3))))
    before = snapshot(table)
    size = len(table)
    rows, status = ops.hash_table_find_or_insert_(
        table.buckets, table.hash_seed, table.size, keys.to(device), size + 5
    )
    assert status.tolist() == [size, 60 - size]
    assert torch.equal(table.size, before[1])
    assert torch.equal(table.buckets, before[0])
    assert int((rows < 0).sum()) == 60 - size


def test_bits_do_not_depend_on_threads(device, backend):
    n = 3_000 if backend == "simt" else 60_000
    keys = torch.randint(0, 2**62, (n,), generator=generator(0)).to(device)
    gone = set(torch.randperm(n, generator=generator(1))[: n // 2].tolist())
    new_rows = torch.tensor(sweep_of(n, gone), dtype=torch.int32, device=device)

    def compute():
        table = HashTable(n, device=device, load_factor=0.9)
        table.hash_seed.fill_(7)
        table.find_or_insert(keys)
        ops.hash_table_renumber_(table.buckets, table.hash_seed, new_rows)
        table.size.fill_(n - len(gone))
        assert len(table.keys()) == n - len(gone)
        if backend != "cpu":  # timing decides which slot of a bucket a key got
            return [table.find(keys), table.keys()]
        return [table.buckets, table.find(keys), table.keys()]

    assert_same_bits_for_any_threads(compute)


@pytest.mark.parametrize("value", [-2, 6, 2**31 - 1, -(2**31)])
def test_a_new_row_out_of_range(device, backend, value):
    """The CPU changes nothing; on a device the key is removed."""
    table = HashTable(20, device=device)
    keys = torch.arange(6, device=device)
    table.find_or_insert(keys)
    before = snapshot(table)
    new_rows = torch.tensor([0, 1, value, 2, value, 3], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=rf"^hash_table_renumber_: new_rows\[2\] is {value}, but"):
        ops.hash_table_renumber_(table.buckets, table.hash_seed, new_rows)
    if backend == "cpu":
        assert torch.equal(table.buckets, before[0])
    else:
        assert table.find(keys).tolist() == [0, 1, -1, 2, -1, 3]


def test_rows_beyond_new_rows_stay(device):
    """Only a damaged table has such rows; they index nothing."""
    table = HashTable(20, device=device)
    keys = torch.arange(9, device=device)
    table.find_or_insert(keys)
    lines = torch.from_numpy(lines_of(table).copy().view(np.int64).reshape(-1, 8))
    lines.view(torch.int32)[:, 10:15][lines.view(torch.int32)[:, 10:15] == 8] = 2**31 - 1
    table.buckets.copy_(lines)
    renumber(table, [3, -1, 2, 1, 0])
    assert table.find(keys).tolist() == [3, -1, 2, 1, 0, 5, 6, 7, 2**31 - 1]
    ops.hash_table_renumber_(table.buckets, table.hash_seed, keys[:0].int())
    assert table.find(keys).tolist() == [3, -1, 2, 1, 0, 5, 6, 7, 2**31 - 1]


def test_new_rows_of_any_layout_and_version(device):
    table = HashTable(20, device=device)
    table.find_or_insert(torch.arange(4, device=device))
    version = table.buckets._version
    every_other = torch.tensor([3, 9, 2, 9, 1, 9, 0], dtype=torch.int32, device=device)[::2]
    ops.hash_table_renumber_(table.buckets, table.hash_seed, every_other)
    assert table.keys().tolist() == [3, 2, 1, 0]
    assert table.buckets._version > version


@pytest.mark.parametrize("seed", range(8))
def test_random_bytes_stay_in_bounds(device, seed):
    """A table of random bytes keeps its size; sanitizers see accesses out of bounds."""
    buckets = torch.randint(-(2**63), 2**63 - 1, (40, 8), generator=generator(seed)).to(device)
    if seed % 2 == 0:  # rows that new_rows has, and some that it does not have
        rows = torch.randint(-2, 12, (40, 6), generator=generator(seed), dtype=torch.int32)
        buckets.view(torch.int32)[:, 10:] = rows.to(device)
    new_rows = torch.arange(10, dtype=torch.int32, device=device).flip(0)
    new_rows[::3] = -1
    hash_seed = torch.tensor([seed], device=device)
    before = buckets.view(torch.int32)[:, 10:15].cpu().clone()
    ops.hash_table_renumber_(buckets, hash_seed, new_rows)
    after = buckets.view(torch.int32)[:, 10:15].cpu()
    expected = torch.where(
        (before >= 0) & (before < 10), new_rows.cpu()[before.clamp(0, 9).long()], before
    )
    assert after[after >= 0].tolist() == expected[expected >= 0].tolist()
