"""sparsekit.ops.bucketize against the reference."""

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

from sparsekit import ops, reference

WORLD_SIZES = (1, 2, 3, 7, 8, 64, 1000, 2048)


def check(keys, world_size, device):
    results = ops.bucketize(keys.to(device), world_size)
    for result, expected in zip(results, reference.bucketize(keys, world_size), strict=True):
        assert result.dtype == expected.dtype
        assert result.tolist() == expected.tolist()
    by_owner, counts, permutation = results
    assert torch.equal(by_owner.cpu(), keys[permutation.cpu()])
    assert counts.sum() == len(keys)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 255, 257, 1000, 4097])
def test_equals_the_reference(device, n, pattern, dtype):
    for world_size in WORLD_SIZES:
        check(key_pattern(pattern, n, dtype), world_size, device)


@given(keys=st.lists(KEYS, max_size=200), world_size=st.integers(1, 2048))
def test_any_keys(device, keys, world_size):
    check(torch.tensor(keys, dtype=torch.int64), world_size, device)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200), st.integers(1, 2048))
def test_any_int32_keys(device, keys, world_size):
    check(torch.tensor(keys, dtype=torch.int32), world_size, device)


def test_every_world_size(device):
    # Where quotients change, and at both ends, a remainder by multiplication may be one off.
    ends = [*KEY_EXTREMES, INT64_MIN + 1, INT64_MAX - 1, 1, 2]
    for world_size in range(1, 2049):
        edges = [world_size * q + r for q in (1, 2**32, 2**52 - 1) for r in (-1, 0, 1)]
        below_2_64 = 2**64 // world_size * world_size
        edges += [below_2_64 + r for r in (-1, 0, 1)]
        keys = [(edge + 2**63) % 2**64 - 2**63 for edge in edges]
        check(torch.tensor(ends + keys), world_size, device)


@pytest.mark.parametrize("world_size", [1, 5, 8, 2048])
def test_all_keys_on_one_owner(device, world_size):
    check(torch.arange(40_000) * world_size + world_size - 1, world_size, device)


def test_order_is_that_of_the_input(device):
    keys = torch.tensor([9, -4, 9, 0, 3, 7, 9], device=device)
    by_owner, counts, permutation = ops.bucketize(keys, 4)
    assert by_owner.tolist() == [-4, 0, 9, 9, 9, 3, 7]
    assert counts.tolist() == [2, 3, 0, 2]
    assert permutation.tolist() == [1, 3, 0, 2, 6, 4, 5]


def test_an_int32_key_has_the_owner_of_the_same_int64_key(device):
    keys = torch.arange(-500, 500, dtype=torch.int32, device=device)
    for world_size in WORLD_SIZES:
        narrow = ops.bucketize(keys, world_size)
        wide = ops.bucketize(keys.long(), world_size)
        for one, other in zip(narrow, wide, strict=True):
            assert one.tolist() == other.tolist()


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_non_contiguous_keys(device, dtype):
    keys = key_pattern("few", 600, dtype).to(device)
    for view in (keys[::3], keys.view(20, 30)[:, 7], keys[:1].expand(50)):
        assert not view.is_contiguous()
        check(view.cpu(), 3, device)
        assert torch.equal(ops.bucketize(view, 3)[2], ops.bucketize(view.contiguous(), 3)[2])


def test_input_is_not_changed(device):
    keys = key_pattern("few", 100).to(device)
    before = keys.clone()
    ops.bucketize(keys, 3)
    assert torch.equal(keys, before)


@pytest.mark.parametrize("world_size", [3, 2048])
def test_bits_do_not_depend_on_threads(device, world_size):
    keys = key_pattern("half on one", 100_000).to(device)
    assert_same_bits_for_any_threads(lambda: ops.bucketize(keys, world_size))


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
