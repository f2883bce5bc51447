"""sparsekit.ops.lowest_rows equals the reference."""

import random

import pytest
import torch
from conftest import assert_same_bits_for_any_threads, generator
from reference import ops as reference

from sparsekit import HashTable, ops
from sparsekit.ops.group_touch import ScorePolicy


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def table_of(n, device):
    """Return a hash table with n random keys."""
    table = HashTable(max(1, n), device=device, load_factor=0.9)
    table.find_or_insert(
        torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator(n)).to(device)
    )
    return table


def check(table, scores, size, kind, halve_every, now, pinned, count):
    device = table.buckets.device
    arguments = size, int(kind), halve_every, now
    found = ops.lowest_rows(scores.to(device), table.buckets, *arguments, pinned.to(device), count)
    buckets = table.buckets.cpu()
    expected = reference.lowest_rows(scores.cpu(), buckets, *arguments, pinned.cpu(), count)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert all(each.dtype == torch.int64 for each in found)


def check_random(table, seed):
    """Check random scores, from all alike to all distinct, and random pinned rows."""
    draw, n = random.Random(seed), len(table)
    made = generator(seed)

    def numbers(most, count=n):
        return torch.randint(0, most, (count,), generator=made)

    kind = draw.choice((ScorePolicy.lru, ScorePolicy.lfu))
    now = draw.choice((0, 5, 3000, 2**32 - 1))
    if kind == ScorePolicy.lru:
        scores = numbers(draw.choice((1, 2, 3000, 2**62))) - draw.choice((0, 0, 2**61))
    else:
        scores = numbers(draw.choice((2, 50, 2**31))) << 32 | numbers(now + 2).clamp(max=2**32 - 1)
    size = draw.choice((n, n, draw.randint(0, n)))
    pinned = numbers(n + 9, draw.choice((0, n // 3, 3 * n))) - 4
    count = draw.choice((0, 1, n // 20, n // 2, max(0, n - 1), n + 5))
    check(table, scores, size, kind, draw.choice((0, 7, 1000)), now, pinned, count)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 300, 2000])
def test_equals_the_reference(device, n):
    table = table_of(n, device)
    for seed in range(12):
        check_random(table, seed)


@pytest.mark.parametrize("taken", [1, 31, 32, 99])
def test_ties_go_by_the_hash_of_the_key_as_an_unsigned_number(device, taken):
    table = table_of(100, device)
    scores = torch.full((100,), 7)
    check(table, scores, 100, ScorePolicy.lru, 0, 0, int64(3, 99), taken)
    keys = table.keys().cpu()
    hashes = reference.mixed(keys)
    assert min(hashes) < 2**63 < max(hashes)  # both signs, so that the comparison matters


def test_orders_of_all_64_bits(device):
    table = table_of(6, device)
    scores = int64(-(2**63), 2**63 - 1, 0, -1, 1, 2**53)
    for count in range(7):
        check(table, scores, 6, ScorePolicy.lru, 0, 0, int64(), count)


def test_many_rows_of_few_orders(device, backend):
    n = 3000 if backend == "simt" else 70_000
    table = table_of(n, device)
    scores = torch.arange(n) % 3
    for count in (1, n // 100, n // 10, n // 3 + 5, n // 2):
        check(table, scores, n, ScorePolicy.lru, 0, 0, torch.arange(0, n, 5), count)


@pytest.mark.parametrize("taken", [1, 5, 20])
def test_ties_of_a_damaged_table(device, taken):
    """Rows without a key are compared as if they had key 0, also among many ties."""
    table = table_of(2000, device)
    table.buckets[::50] = 0
    table.buckets[::50].view(torch.int32)[:, 10:15] = -1
    scores = torch.full((2000,), 7)
    rows = table.buckets.cpu().view(torch.int32)[:, 10:15]
    assert taken < 2000 - int((rows >= 0).sum()) < 100
    check(table, scores, 2000, ScorePolicy.lru, 0, 0, int64(), taken)


def test_a_table_without_keys_of_its_rows(device):
    """Only a damaged table has rows without a key; they get key 0."""
    table = table_of(40, device)
    ops.hash_table_clear_(table.buckets)
    _, _, keys = ops.lowest_rows(
        torch.arange(40, device=device), table.buckets, 40, 1, 0, 0, table.size[:0], 5
    )
    assert keys.tolist() == [0] * 5


def test_bits_do_not_depend_on_threads(device, backend):
    n = 2000 if backend == "simt" else 200_000
    table = table_of(n, device)
    scores = torch.randint(0, 50, (n,), generator=generator(1)).to(device)
    pinned = torch.randint(0, n, (n // 2,), generator=generator(2)).to(device)

    def compute():
        return ops.lowest_rows(scores, table.buckets, n, 1, 0, 0, pinned, n // 7)

    assert_same_bits_for_any_threads(compute)


def test_arguments_of_any_layout(device):
    table = table_of(50, device)
    wide = torch.arange(300, device=device).flip(0)
    scores, pinned = wide[::5], wide[250::7]
    found = ops.lowest_rows(scores, table.buckets, 50, 1, 0, 0, pinned, 9)
    packed = ops.lowest_rows(
        scores.contiguous(), table.buckets, 50, 1, 0, 0, pinned.contiguous(), 9
    )
    assert [each.tolist() for each in found] == [each.tolist() for each in packed]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 51}, "size is 51, but must be at most 50"),
        ({"size": -1}, "size is -1"),
        ({"kind": 0}, "kind must be 1 .lru. or 2 .lfu., got 0"),
        ({"kind": 3}, "kind must be"),
        ({"halve_every": -1}, "halve_every must be >= 0, got -1"),
        ({"count": -1}, "count must be >= 0, got -1"),
        ({"scores": torch.zeros(5, 10, dtype=torch.int64)}, "scores must have 1 dim"),
        ({"pinned": torch.zeros(1, 1, dtype=torch.int64)}, "pinned must have 1 dim"),
    ],
)
def test_what_is_refused(device, changed, message):
    table = table_of(50, device)
    arguments = {
        **{"scores": torch.zeros(50, dtype=torch.int64, device=device), "buckets": table.buckets},
        **{"size": 50, "kind": 1, "halve_every": 0, "now": 0, "pinned": table.size[:0], "count": 1},
    }
    for name, value in changed.items():
        arguments[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    with pytest.raises(ValueError, match=f"^lowest_rows: {message}"):
        ops.lowest_rows(**arguments)


@pytest.mark.parametrize("name", ["scores", "buckets", "pinned"])
def test_a_wrong_dtype(device, name):
    table = table_of(50, device)
    tensors = {"scores": table.keys(), "buckets": table.buckets, "pinned": table.size[:0]}
    tensors[name] = tensors[name].int()
    with pytest.raises(TypeError, match=rf"^lowest_rows: {name} must be int64, got torch\.int32"):
        ops.lowest_rows(**tensors, size=50, kind=1, halve_every=0, now=0, count=1)
