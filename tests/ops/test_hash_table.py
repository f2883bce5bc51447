"""The hash table's ops and sparsekit.HashTable act like a dict and have the right layout."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    KEY_DTYPES,
    KEY_EXTREMES,
    KEY_PATTERNS,
    KEYS,
    assert_same_bits_for_any_threads,
    generator,
    key_pattern,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

import sparsekit
from sparsekit import HashTable, TableFullError, ops

SLOTS = 5
BUCKET = np.dtype([("keys", "<i8", SLOTS), ("rows", "<i4", SLOTS), ("spilled", "<i4")])


def home_bucket(key, num_buckets, seed):
    """Return the home bucket of a key, as csrc/core/include/sparsekit/hash_table.h defines it."""
    x = (key ^ seed) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return ((x ^ (x >> 31)) * num_buckets) >> 64


def keys_of_bucket(table, bucket, n):
    """Return n keys that all have the same home bucket."""
    num_buckets, seed = len(table.buckets), int(table.hash_seed)
    candidates = range(n * num_buckets * 3)
    found = [key for key in candidates if home_bucket(key, num_buckets, seed) == bucket]
    assert len(found) >= n
    return torch.tensor(found[:n])


def snapshot(table):
    return table.buckets.clone(), table.size.clone()


def assert_unchanged(table, before):
    for now, then in zip((table.buckets, table.size), before, strict=True):
        assert torch.equal(now, then)


def check_layout(table):
    """Check that places fill in order, empty places are zero, and `spilled` counts moved keys."""
    buckets = table.buckets.cpu().numpy().view(BUCKET).reshape(-1)
    used = buckets["rows"] >= 0
    assert (used[:, :-1] >= used[:, 1:]).all()
    assert (buckets["rows"][~used] == -1).all()
    assert (buckets["keys"][~used] == 0).all()
    assert sorted(buckets["rows"][used]) == list(range(len(table)))
    spilled = np.zeros(len(buckets), dtype=np.int32)
    for b, slot in np.argwhere(used):
        passed = home_bucket(int(buckets["keys"][b, slot]), len(buckets), int(table.hash_seed))
        while passed != b:
            assert used[passed].all()
            spilled[passed] += 1
            passed = (passed + 1) % len(buckets)
    assert (buckets["spilled"] == spilled).all()


def insert(table, keys, capacity, size=None):
    size = table.size if size is None else size
    return ops.hash_table_find_or_insert_(table.buckets, table.hash_seed, size, keys, capacity)


def check_against_dict(table, batches):
    """Insert batch after batch; every result and every refusal must match a dict."""
    expected = reference.HashTable(table.capacity)
    for keys in batches:
        before = snapshot(table)
        on_device = keys.to(table.buckets.device)
        assert table.find(on_device).tolist() == expected.find(keys).tolist()
        rows, status = insert(table, on_device, table.capacity)
        expected_rows, expected_status = expected.find_or_insert(keys)
        assert rows.tolist() == expected_rows.tolist()
        assert status.tolist() == expected_status.tolist()
        if status[1] != 0:
            assert_unchanged(table, before)
        assert len(table) == len(expected)
        assert table.keys().tolist() == expected.keys().tolist()
        check_layout(table)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 500, 2049])
def test_equals_a_dict(device, n, pattern, dtype):
    keys = key_pattern(pattern, n, dtype)
    table = HashTable(max(n, 1), device=device)
    check_against_dict(table, [keys[: n // 3], keys, keys.flip(0)])


@given(
    capacity=st.integers(1, 60),
    load_factor=st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    batches=st.lists(st.lists(KEYS, max_size=40), max_size=6),
)
def test_any_batches(device, capacity, load_factor, batches):
    table = HashTable(capacity, device=device, load_factor=load_factor)
    check_against_dict(table, [torch.tensor(batch, dtype=torch.int64) for batch in batches])


def test_extreme_keys(device):
    table = HashTable(len(KEY_EXTREMES), device=device, load_factor=1.0)
    keys = torch.tensor(KEY_EXTREMES, device=device)
    for key in keys:
        assert table.find(key.reshape(1)).tolist() == [-1]
    check_against_dict(table, [torch.tensor(KEY_EXTREMES)])
    assert table.find(keys).tolist() == [0, 1, 2, 3]


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("load_factor", [0.6, 1.0])
@pytest.mark.parametrize("capacity", [1, 2, 4, 5, 6, 25, 999, 2000])
def test_takes_exactly_its_capacity(device, capacity, load_factor):
    table = HashTable(capacity, device=device, load_factor=load_factor, name="items")
    absent = min(2 * capacity, 200)  # each search visits all buckets of the full table
    keys = torch.randperm(capacity + absent, generator=generator(capacity)).to(device)
    inside, outside = keys[:capacity], keys[capacity:]
    assert table.find_or_insert(inside).tolist() == list(range(capacity))
    check_layout(table)

    before = snapshot(table)
    for refused in (outside[:1], outside, torch.cat([inside, outside[:1], inside])):
        with pytest.raises(TableFullError) as caught:
            table.find_or_insert(refused)
        assert_unchanged(table, before)
        error = caught.value
        assert (error.layer, error.size, error.capacity) == ("items", capacity, capacity)
        assert error.refused == len(set(refused.tolist()) - set(inside.tolist()))
    assert table.find(keys).tolist() == [*range(capacity), *[-1] * len(outside)]
    assert table.find_or_insert(inside.flip(0)).tolist() == list(range(capacity))[::-1]


@given(
    capacity=st.integers(1, 300),
    load_factor=st.floats(0.05, 1.0),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    seed=st.integers(0, 1000),
)
def test_any_capacity_is_exact(device, capacity, load_factor, cuts, seed):
    table = HashTable(capacity, device=device, load_factor=load_factor)
    keys = torch.randint(-(2**63), 2**63 - 1, (capacity + 1,), generator=generator(seed))
    batches = keys[:-1].tensor_split(sorted(cut % capacity for cut in cuts))
    check_against_dict(table, [*batches, keys[-1:], keys])
    assert len(table) == capacity


@pytest.mark.parametrize("load_factor", [0.6, 1.0])
def test_a_refused_call_with_repeats_is_undone(device, load_factor):
    table = HashTable(20, device=device, load_factor=load_factor)
    old = torch.arange(100, 113)
    new = torch.arange(8).repeat(3) - 4  # 8 distinct keys, but a capacity of 7
    fits = torch.arange(7).repeat(3)
    mixed = torch.stack([new[:13], old]).t().reshape(-1)
    check_against_dict(table, [old, new, mixed, torch.cat([old, new]), fits, new, old])
    assert len(table) == 20


@pytest.mark.parametrize("bucket", [0, 3, 9])
@pytest.mark.parametrize("n", [6, 11, 30, 50])
def test_keys_that_spill_over_many_buckets(device, bucket, n):
    # 10 buckets of 5 places; the probe continues from bucket 9 at bucket 0.
    table = HashTable(50, device=device, load_factor=1.0)
    keys = keys_of_bucket(table, bucket, n + 20)
    others = torch.arange(-50, 0)
    check_against_dict(table, [keys[: n // 2], keys[:n], keys, others, others[: 50 - n], keys[:n]])
    spilled = table.buckets.cpu().numpy().view(BUCKET)["spilled"].reshape(-1)
    assert spilled[bucket] >= n - SLOTS


def test_a_refusal_takes_back_what_spilled(device):
    table = HashTable(12, device=device, load_factor=0.2)
    keys = keys_of_bucket(table, 5, 30)
    check_against_dict(table, [keys[:4], keys, keys[:11], keys[10:14], keys[:12]])


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_non_contiguous_keys_of_any_shape(device, dtype):
    table = HashTable(600, device=device)
    keys = key_pattern("distinct", 600, dtype).to(device).view(20, 30)
    rows = table.find_or_insert(keys.t())
    assert rows.shape == (30, 20)
    assert rows.flatten().tolist() == list(range(600))
    assert torch.equal(table.find(keys), rows.t())
    assert torch.equal(table.find(keys[::2, ::3]), rows.t()[::2, ::3])
    assert table.find(keys[0, 0]).shape == ()
    assert table.keys().tolist() == keys.t().flatten().tolist()


def test_int32_and_int64_keys_are_the_same_keys(device):
    table = HashTable(100, device=device)
    narrow = key_pattern("extremes", 50, torch.int32).to(device)
    rows = table.find_or_insert(narrow)
    assert torch.equal(table.find_or_insert(narrow.long()), rows)
    assert torch.equal(table.find(narrow), rows)


def test_find_changes_nothing(device):
    table = HashTable(10, device=device)
    table.find_or_insert(torch.arange(5, device=device))
    before = snapshot(table)
    table.find(torch.arange(-100, 100, device=device))
    table.keys()
    assert_unchanged(table, before)


def test_autograd_learns_of_an_insertion(device):
    table = HashTable(8, device=device)
    before = table.buckets._version, table.size._version
    table.find_or_insert(torch.tensor([3], device=device))
    assert table.buckets._version > before[0]
    assert table.size._version > before[1]


def test_clear(device):
    table = HashTable(100, device=device)
    empty = table.buckets.clone()
    table.find_or_insert(torch.arange(100, device=device))
    ops.hash_table_clear_(table.buckets)
    assert torch.equal(table.buckets, empty)
    assert (table.find(torch.arange(100, device=device)) == -1).all()


def test_bits_do_not_depend_on_threads(device, backend):
    n = 30_000 if backend == "cpu" else 9_000
    keys = torch.randint(0, n * 2 // 3, (2 * n,), generator=generator(0)).to(device)

    def compute():
        table = HashTable(n, device=device)
        table.hash_seed.fill_(7)
        first = table.find_or_insert(keys[:n])
        again = table.find_or_insert(keys)
        # On a device, timing decides which keys of a bucket take which place or spill over,
        # but not how many do.
        lines = table.buckets.cpu().numpy().view(BUCKET).reshape(-1)
        used = torch.from_numpy((lines["rows"] >= 0).sum(1)), torch.from_numpy(lines["spilled"] + 0)
        return [first, table.find(keys), again, *used, table.keys()]

    assert_same_bits_for_any_threads(compute)


@pytest.mark.parametrize("size", [21, 22, 2**31, 2**62, -1, -(2**63)])
def test_a_size_that_the_buckets_cannot_have(device, backend, size):
    """The CPU raises; on a device, where kernels read the size, the status is negative."""
    table = HashTable(20, load_factor=1.0, device=device)
    table.find_or_insert(torch.tensor([7], device=device))
    table.size.fill_(size)
    before = snapshot(table)
    keys = torch.tensor([7, 8], device=device)
    arguments = (table.buckets, table.hash_seed, table.size, keys, 20)
    if backend == "cpu":
        with pytest.raises(ValueError, match=f"size is {size}, but the buckets have 20 slots"):
            ops.hash_table_find_or_insert_(*arguments)
    else:
        rows, status = ops.hash_table_find_or_insert_(*arguments)
        assert rows.tolist() == [0, -1]
        assert status.tolist() == [size, -1]
    assert_unchanged(table, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t, k: ops.hash_table_find(t.buckets[:, :7], t.hash_seed, k),
            "buckets must have size 8 in dim",
        ),
        (
            lambda t, k: ops.hash_table_find(t.buckets.t().contiguous().t(), t.hash_seed, k),
            "must be contiguous",
        ),
        (
            lambda t, k: ops.hash_table_find(t.buckets[:0], t.hash_seed, k),
            "buckets must not be empty",
        ),
        (
            lambda t, k: ops.hash_table_find(t.buckets, t.hash_seed, k.view(1, -1)),
            r"keys must have 1 dimension\(s\)",
        ),
        (lambda t, k: insert(t, k, 0), r"capacity is 0.*\[1, 20\]"),
        (lambda t, k: insert(t, k, 21), "capacity is 21"),
        (lambda t, k: insert(t, k, 20, t.size - 1), "size is -1"),
        (lambda t, k: insert(t, k, 20, t.size + 21), "the buckets have 20"),
        (
            lambda t, k: ops.hash_table_keys(t.buckets, t.hash_seed, t.size + 1),
            "damaged: its 1 rows",
        ),
    ],
)
def test_what_is_refused(call, message):
    table = HashTable(20, load_factor=1.0)
    before = snapshot(table)
    with pytest.raises(ValueError, match=f"hash_table_.*: .*{message}"):
        call(table, torch.tensor([1, 2]))
    assert_unchanged(table, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, k: ops.hash_table_clear_(None), "buckets must be a tensor, got NoneType"),
        (
            lambda t, k: ops.hash_table_find(t.buckets.double(), t.hash_seed, k),
            "buckets must be int64",
        ),
        (
            lambda t, k: ops.hash_table_find(t.buckets, t.hash_seed, k.double()),
            "keys must be int64 or int32",
        ),
        (lambda t, k: insert(t, k, 20, t.size.int()), "size must be int64"),
        (
            lambda t, k: ops.hash_table_keys(t.buckets, t.hash_seed, t.size.int()),
            "size must be int64",
        ),
    ],
)
def test_what_is_of_a_wrong_type(call, message):
    table = HashTable(20, load_factor=1.0)
    before = snapshot(table)
    with pytest.raises(TypeError, match=f"hash_table_.*: {message}"):
        call(table, torch.tensor([1, 2]))
    assert_unchanged(table, before)


# Tests of damaged tables run in another process. A table lies between two pages that must not be
# touched, and a call that hangs is killed at its time limit.

DAMAGED = """
import ctypes, mmap, random, signal, sys
import torch
from sparsekit import ops

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
for guard in (address, address + 2 * page):
    assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
lines = torch.frombuffer(memory, dtype=torch.int64, offset=page, count=page // 8).view(-1, 8)
keys = torch.cat([torch.arange(-300, 300), torch.tensor([0, -1, 2**63 - 1, -(2**63)])])


def use(fill, seed):
    hash_seed = torch.tensor([seed << 40])
    for buckets in (lines, lines[:1], lines[-1:], lines[:5], lines[-7:]):
        slots = 5 * len(buckets)
        for size in {0, 1, slots // 2, slots}:
            content = torch.frombuffer(bytearray(fill(buckets.nbytes)), dtype=torch.int64)
            buckets.copy_(content.view(-1, 8))
            count = torch.tensor([size])
            assert (ops.hash_table_find(buckets, hash_seed, keys) < 2**31).all()
            try:
                assert len(ops.hash_table_keys(buckets, hash_seed, count)) == size
            except ValueError as error:
                assert "damaged" in str(error)
            for capacity in (slots // 2 + 1, slots):
                try:
                    ops.hash_table_find_or_insert_(
                        buckets, hash_seed, count, keys[seed::7], capacity
                    )
                except ValueError as error:
                    assert "damaged" in str(error)
                assert 0 <= count <= slots


signal.setitimer(signal.ITIMER_VIRTUAL, 20)  # seconds of processor time, however busy it is
"""


def run_damaged(body):
    path = [str(Path(sparsekit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", DAMAGED + body],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != -signal.SIGVTALRM, "a call did not return"
    assert done.returncode != -signal.SIGSEGV, "a call left the table's memory"
    assert done.returncode == 0, done.stderr


def test_random_bytes_in_the_buckets_and_some_that_leave_no_free_slot():
    run_damaged(
        "for seed in range(7): use(random.Random(seed).randbytes, seed)\n"
        "for byte in 0x00, 0x01, 0x7F: use(lambda n: bytes([byte]) * n, 0)"
    )


def test_a_call_that_finds_no_free_slot_changes_nothing():
    """This holds on the CPU only: on a device, the damaged table is unusable afterwards."""
    table = HashTable(20, load_factor=1.0)
    table.find_or_insert(torch.arange(20))
    table.size.fill_(10)  # the size claims free places, but all are used
    before = snapshot(table)
    with pytest.raises(ValueError, match="damaged: no slot is free for row 10"):
        table.find_or_insert(torch.tensor([3, 20, 21]))
    assert_unchanged(table, before)


def test_two_keys_of_one_row_are_damage(device):
    table = HashTable(10, device=device, load_factor=1.0)
    table.find_or_insert(torch.tensor([5, 6, 7], device=device))
    buckets = table.buckets.cpu().numpy().view(BUCKET)
    buckets["rows"][buckets["rows"] == 1] = 0
    table.buckets.copy_(torch.from_numpy(buckets.view(np.int64).reshape(-1, 8)))
    with pytest.raises(ValueError, match="damaged"):
        table.keys()


def test_another_seed_is_damage(device):
    table = HashTable(100, device=device)
    keys = torch.arange(100, device=device)
    table.find_or_insert(keys)
    table.hash_seed.bitwise_xor_(1 << 40)
    assert table.find(keys).max() < 100
    with pytest.raises(ValueError, match="damaged"):
        table.keys()


def with_counts(table, counts):
    """Replace the table's counts of spilled keys."""
    table.buckets.view(torch.int32)[:, 15] = counts
    return table


def balanced(counts):
    """Change two counts of zero to 1 and -1, so that the total is unchanged."""
    none = (counts == 0).nonzero().squeeze(1)
    return counts.index_put((none[:2],), counts.new_tensor([1, -1]))


@pytest.mark.parametrize(
    "change",
    [
        lambda counts: counts + 1,
        lambda counts: counts * 2,
        lambda counts: -counts,
        lambda counts: counts.where(counts != counts.max(), counts + 1),
        lambda counts: counts.where(counts != 1, 2),
        balanced,
    ],
)
def test_wrong_counts_of_spilled_keys_are_damage(device, change):
    table = HashTable(400, device=device, load_factor=0.9)
    keys = torch.arange(400, device=device)
    table.find_or_insert(keys)
    counts = table.buckets.view(torch.int32)[:, 15].clone()
    assert counts.max() > 1
    assert torch.equal(with_counts(table, counts).keys(), keys)
    with pytest.raises(ValueError, match="damaged"):
        with_counts(table, change(counts)).keys()


def test_searches_end_whatever_the_counts(device):
    table = HashTable(300, device=device)
    keys = torch.randint(-(2**63), 2**63 - 1, (400,), generator=generator(0)).to(device)
    table.find_or_insert(keys[:300])
    counts = table.buckets.view(torch.int32)[:, 15].clone()
    random = torch.randint(-(2**31), 2**31 - 1, counts.shape, generator=generator(1)).to(device)
    for damaged in (counts + 1, counts.fill_(2**31 - 1), random.abs().int(), random.int()):
        with_counts(table, damaged)
        rows = table.find(keys).cpu()
        assert (rows[300:] == -1).all()
        if (damaged > 0).all():  # a search goes past all buckets and misses nothing
            assert torch.equal(rows[:300], torch.arange(300))
        else:
            assert set(rows[:300].tolist()) <= {-1, *range(300)}


def test_wrong_counts_are_found_before_any_search():
    """Each of these searches would go past all buckets: the test would exceed its time limit."""
    n = 1_000_000
    table = HashTable(n)
    table.find_or_insert(torch.arange(n))
    with_counts(table, 1).hash_seed.bitwise_xor_(1 << 40)
    with pytest.raises(ValueError, match="damaged"):
        table.keys()


def test_seeds_are_random_and_not_drawn_from_torch():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    seeds = {int(HashTable(1).hash_seed) for _ in range(8)}
    assert torch.rand(1) == expected
    assert len(seeds) == 8
