"""sparsekit.ops.bucketize equals the reference."""

import pytest
import torch
from conftest import (
    INT64_MAX,
    INT64_MIN,
    KEY_DTYPES,
    KEY_EXTREMES,
    KEY_PATTERNS,
    KEYS,
    assert_same_bits_for_any_threads,
    key_pattern,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

import sparsekit
from sparsekit import ops

WORLD_SIZES = (1, 2, 3, 7, 8, 64, 1000, 2048)


def even_map(world_size):
    return (torch.arange(65536) * world_size >> 16).to(torch.int16)


def random_map(world_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, world_size, (65536,), dtype=torch.int16, generator=generator)


def check(keys, world_size, device, owners=None):
    there = None if owners is None else owners.to(device)
    results = ops.bucketize(keys.to(device), world_size, there)
    wanted = reference.bucketize(keys, world_size, owners)
    for result, expected in zip(results, wanted, strict=True):
        assert result.dtype == expected.dtype
        assert result.tolist() == expected.tolist()
    by_owner, counts, permutation = results
    assert torch.equal(by_owner.cpu(), keys[permutation.cpu()])
    assert counts.sum() == len(keys)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 255, 257, 1000, 4097])
def test_equals_the_reference(device, n, pattern, dtype):
    for world_size in WORLD_SIZES:
        check(key_pattern(pattern, n, dtype), world_size, device)
        check(key_pattern(pattern, n, dtype), world_size, device, random_map(world_size))


@given(keys=st.lists(KEYS, max_size=200), world_size=st.integers(1, 2048))
def test_any_keys(device, keys, world_size):
    check(torch.tensor(keys, dtype=torch.int64), world_size, device)
    check(torch.tensor(keys, dtype=torch.int64), world_size, device, random_map(world_size))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200), st.integers(1, 2048))
def test_any_int32_keys(device, keys, world_size):
    check(torch.tensor(keys, dtype=torch.int32), world_size, device)


def test_every_world_size(device, backend):
    # A remainder computed by multiplication may be off by one where the quotient changes and at
    # both ends of the range.
    ends = [*KEY_EXTREMES, INT64_MIN + 1, INT64_MAX - 1, 1, 2]
    for world_size in range(1, 2049) if backend == "cpu" else [1, 2, *range(3, 2049, 5)]:
        edges = [world_size * q + r for q in (1, 2**32, 2**52 - 1) for r in (-1, 0, 1)]
        below_2_64 = 2**64 // world_size * world_size
        edges += [below_2_64 + r for r in (-1, 0, 1)]
        keys = [(edge + 2**63) % 2**64 - 2**63 for edge in edges]
        check(torch.tensor(ends + keys), world_size, device)


@pytest.mark.parametrize("world_size", [1, 5, 8, 2048])
def test_all_keys_on_one_owner(device, backend, world_size):
    n = 40_000 if backend == "cpu" else 10_000
    check(torch.arange(n) * world_size + world_size - 1, world_size, device)
    last = torch.full((65536,), world_size - 1, dtype=torch.int16)
    check(torch.arange(n), world_size, device, last)


def test_order_is_that_of_the_input(device):
    keys = torch.tensor([9, -4, 9, 0, 3, 7, 9], device=device)
    by_owner, counts, permutation = ops.bucketize(keys, 4)
    assert by_owner.tolist() == [-4, 0, 9, 9, 9, 3, 7]
    assert counts.tolist() == [2, 3, 0, 2]
    assert permutation.tolist() == [1, 3, 0, 2, 6, 4, 5]


def test_an_int32_key_has_the_owner_of_the_same_int64_key(device):
    keys = torch.arange(-500, 500, dtype=torch.int32, device=device)
    for world_size in WORLD_SIZES:
        for owners in (None, random_map(world_size).to(device)):
            narrow = ops.bucketize(keys, world_size, owners)
            wide = ops.bucketize(keys.long(), world_size, owners)
            for one, other in zip(narrow, wide, strict=True):
                assert one.tolist() == other.tolist()


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_non_contiguous_keys(device, dtype):
    keys = key_pattern("few", 600, dtype).to(device)
    for view in (keys[::3], keys.view(20, 30)[:, 7], keys[:1].expand(50)):
        assert not view.is_contiguous()
        check(view.cpu(), 3, device)
        assert torch.equal(ops.bucketize(view, 3)[2], ops.bucketize(view.contiguous(), 3)[2])


def test_a_map_that_is_not_contiguous(device):
    keys, owners = key_pattern("few", 600), random_map(7)
    for view in (owners.repeat_interleave(2)[::2], owners.expand(2, -1).t()[:, 1], owners[:1]):
        view = view.expand(65536)
        check(keys, 7, device, view)


def test_input_is_not_changed(device):
    keys, owners = key_pattern("few", 100).to(device), even_map(3).to(device)
    before = keys.clone()
    ops.bucketize(keys, 3)
    ops.bucketize(keys, 3, owners)
    assert torch.equal(keys, before)
    assert torch.equal(owners.cpu(), even_map(3))


@pytest.mark.parametrize("world_size", [3, 2048])
def test_bits_do_not_depend_on_threads(device, backend, world_size):
    keys = key_pattern("half on one", 100_000 if backend == "cpu" else 30_000).to(device)
    owners = random_map(world_size).to(device)
    assert_same_bits_for_any_threads(lambda: ops.bucketize(keys, world_size))
    assert_same_bits_for_any_threads(lambda: ops.bucketize(keys, world_size, owners))


@pytest.mark.parametrize(
    ("keys", "world_size", "error", "message"),
    [
        ([1, 2], 2, TypeError, "bucketize: keys must be a tensor, got list"),
        (torch.ones(2), 2, TypeError, "bucketize: keys must be int64 or int32, got torch.float32"),
        (torch.tensor(3), 2, ValueError, r"bucketize: keys must have 1 dimension\(s\), got shape"),
        (torch.tensor([3]), 2.0, TypeError, "bucketize: world_size must be an int, got 2.0"),
        (torch.tensor([3]), "2", TypeError, "bucketize: world_size must be an int, got '2'"),
        *(
            (torch.tensor([3]), size, ValueError, rf"world_size must be in \[1, 2048\], got {size}")
            for size in (0, -1, 2049, 2**62)
        ),
    ],
)
def test_what_is_refused(keys, world_size, error, message):
    with pytest.raises(error, match=message):
        ops.bucketize(keys, world_size)


# The hash must never change: saved tables depend on it. The values are from fmix64 in Appleby's
# MurmurHash3.cpp, shifted right by 48.
SHARDS = {
    0: 0x0000,
    1: 0xB456,
    2: 0x3ABF,
    -1: 0x64B5,
    2**22: 0xFE3E,
    10**12: 0xF618,
    -(10**12): 0x18A2,
    INT64_MAX: 0xABB9,
    INT64_MIN: 0x8F78,
    0x123456789ABCDEF: 0x87CB,
}


def test_the_hash_of_a_key_never_changes(device):
    # Use the two bytes of the shard as owners, first the upper one, then the lower one.
    shards = torch.arange(65536)
    keys = torch.tensor(list(SHARDS), device=device)
    found = torch.zeros(len(keys), dtype=torch.int64, device=device)
    for digit, factor in ((shards >> 8, 256), (shards & 255, 1)):
        _, counts, permutation = ops.bucketize(keys, 256, digit.to(device, torch.int16))
        owner = torch.arange(256, device=device).repeat_interleave(counts)
        found[permutation] += owner * factor
    assert found.tolist() == list(SHARDS.values())
    assert [reference.virtual_shard(key) for key in SHARDS] == list(SHARDS.values())


def ids_of(kind, n, world_size):
    ids = torch.arange(n)
    if kind == "sequential":
        return ids
    if kind == "random":
        return torch.randint(INT64_MIN, INT64_MAX, (n,), generator=torch.Generator().manual_seed(1))
    return ids * (2**22 if kind == "snowflake" else world_size)


@pytest.mark.parametrize("kind", ["sequential", "random", "snowflake", "multiples"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 64, 1024])
def test_ranks_own_equally_many_keys(world_size, kind):
    keys = ids_of(kind, 10_000 * world_size, world_size)
    counts = ops.bucketize(keys, world_size, even_map(world_size))[1]
    assert counts.max() <= 1.1 * 10_000
    if kind in ("snowflake", "multiples") and world_size in (2, 4, 64, 1024):
        # Without a map, bucketize assigns keys by modulo, and one rank gets them all.
        assert ops.bucketize(keys, world_size)[1].tolist()[0] == len(keys)


@pytest.mark.parametrize("kind", ["sequential", "random", "snowflake"])
@pytest.mark.parametrize("hash_seed", [0, -0x123456789ABCDEF])
def test_keys_of_one_rank_fill_the_buckets_evenly(hash_seed, kind):
    keys = ids_of(kind, 160_000, 8)
    counts = ops.bucketize(keys, 8, even_map(8))[1].tolist()
    of_ranks = [*ops.bucketize(keys, 8, even_map(8))[0].split(counts)[::3], keys[:20_000]]
    spilled = []
    for own in of_ranks:
        table = sparsekit.HashTable(len(own))
        table.hash_seed.fill_(hash_seed)
        table.find_or_insert(own)
        # The last word of each bucket counts the keys that found it full.
        spilled.append(int(table.buckets.view(torch.int32)[:, 15].sum()) / len(own))
    assert max(spilled) < 1.2 * spilled[-1]


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        ([0] * 65536, TypeError, "bucketize: owners must be a tensor, got list"),
        (even_map(2).int(), TypeError, "bucketize: owners must be int16, got torch.int32"),
        (even_map(2)[None], ValueError, r"bucketize: owners must have 1 dimension\(s\), got shape"),
        (even_map(2)[1:], ValueError, "bucketize: owners must have 65536 elements, got 65535"),
        (even_map(2).to("meta"), ValueError, "bucketize: all tensors must be on one device"),
    ],
)
def test_maps_that_are_refused(engine, owners, error, message):
    with pytest.raises(error, match=message):
        ops.bucketize(torch.tensor([3]), 2, owners)


@pytest.mark.parametrize("rank", [-1, 3, 4, 2**15 - 1, -(2**15)])
def test_an_owner_that_is_no_rank(device, rank):
    keys = torch.arange(3000, device=device)
    shards = sorted({reference.virtual_shard(key) for key in range(3000)})
    owners = random_map(3).to(device)
    owners[shards[7]] = owners[shards[8]] = rank
    message = rf"bucketize: owners\[{shards[7]}\] is {rank}, but must be a rank, in \[0, 3\)"
    with pytest.raises(ValueError, match=message):
        ops.bucketize(keys, 3, owners)
    # Map elements that no key uses are not checked.
    unused = (torch.bincount(torch.tensor(shards), minlength=65536) == 0).nonzero()[0]
    owners = random_map(3)
    owners[unused] = rank
    check(keys.cpu(), 3, device, owners)
