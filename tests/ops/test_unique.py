"""sparsekit.ops.unique equals the reference."""

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

from sparsekit import ops


def check(keys, device):
    results = ops.unique(keys.to(device))
    for result, expected in zip(results, reference.unique(keys), strict=True):
        assert result.dtype == expected.dtype
        assert result.tolist() == expected.tolist()
    unique, inverse, counts = results
    assert torch.equal(unique[inverse].cpu(), keys)
    assert counts.sum() == len(keys)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 1000, 4097])
def test_equals_the_reference(device, n, pattern, dtype):
    check(key_pattern(pattern, n, dtype), device)


@given(st.lists(KEYS, max_size=200))
def test_any_keys(device, keys):
    check(torch.tensor(keys, dtype=torch.int64), device)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=200))
def test_any_int32_keys(device, keys):
    check(torch.tensor(keys, dtype=torch.int32), device)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_extremes_in_every_small_table(device, n):
    # The scratch table begins at one bucket. Its empty places hold 0, which is also a key.
    for shift in range(len(KEY_EXTREMES)):
        keys = KEY_EXTREMES[shift:] + KEY_EXTREMES[:shift] + (5, 6, 7)
        check(torch.tensor(keys[:n]), device)


def test_keys_with_low_bits_alike(device):
    # A hash of the low bits only would map all multiples of 2^32 to the same value.
    check(torch.arange(3000) << 32, device)
    check(torch.arange(3000) << 51, device)


def check_with_numpy(keys):
    """Compare with numpy, which is fast enough for many keys."""
    unique, inverse, counts = ops.unique(keys)
    distinct, first, expected_counts = np.unique(keys, return_index=True, return_counts=True)
    order = np.argsort(first)
    assert np.array_equal(unique, distinct[order])
    assert np.array_equal(counts, expected_counts[order])
    assert torch.equal(unique[inverse], keys)


# On the CPU, threads take pieces of at least 8192 keys. For 2^16 or more keys the op takes a
# sample. If keys seldom repeat, the op splits them into parts: always for more than 2^21 keys,
# and with more than 4 threads for 2^17 or more.
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", KEY_DTYPES)
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
@pytest.mark.parametrize("n", [8191, 8192, 65_535, 65_536, 2**17 - 1, 2**17, 300_001])
def test_many_keys(n, pattern, dtype):
    check_with_numpy(key_pattern(pattern, n, dtype))


@pytest.mark.parametrize("n", [2**21, 2**21 + 1])
@pytest.mark.parametrize("pattern", ["equal", "distinct", "half on one"])
def test_millions_of_keys(n, pattern):
    check_with_numpy(key_pattern(pattern, n))


@pytest.mark.parametrize("distinct", [30, 10_000, 60_000, 200_000])
def test_keys_that_a_sample_may_misjudge(distinct):
    # The sample is every 128th key; here the sampled keys are all equal, or all different.
    n = 2**18
    keys = torch.randint(0, distinct, (n,), generator=generator(0))
    for sampled in (torch.tensor(-1), torch.arange(n // 128) << 40):
        keys[::128] = sampled
        check_with_numpy(keys)


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3, 5, 40], indirect=True)
@pytest.mark.parametrize("shared", [0, 1, 4000, 8000])
def test_keys_of_several_pieces(threads, shared):
    # A row has 8192 keys: `shared` ones come from earlier rows, and the others are new.
    rows = torch.arange(40 * 8192).view(40, 8192)
    draws = torch.randint(0, 2**40, (40, shared), generator=generator(shared))
    for row in range(1, 40):
        rows[row, :shared] = rows.flatten()[draws[row] % (8192 * row)]
        rows[row] = rows[row, torch.randperm(8192, generator=generator(row))]
    for dtype in KEY_DTYPES:
        check_with_numpy(rows.flatten().to(dtype))


@pytest.mark.pairs
@pytest.mark.parametrize("threads", [2, 4, 5, 40], indirect=True)
@pytest.mark.parametrize("pattern", ["distinct", "half on one", "few"])
@pytest.mark.parametrize("n", [2**16, 2**17])
def test_any_number_of_threads(threads, pattern, n):
    check_with_numpy(key_pattern(pattern, n))


def test_many_keys_of_one_part():
    # Keys whose hashes agree in the high bits all go to the same part.
    n = 2**17
    x = torch.arange(2**22)
    x = (x ^ (x >> 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    part = ((x ^ ((x >> 31) & (2**33 - 1))) >> 59) & 31
    keys = (part == 7).nonzero().flatten()[: n - 1]
    assert len(keys) > 100_000
    check_with_numpy(torch.cat([torch.tensor([-5]), keys, keys.flip(0)]))
    # These are enough keys to be split into parts with any number of threads.
    check_with_numpy(torch.cat([keys.flip(0)] + 22 * [keys]))


def test_order_is_that_of_first_occurrence(device):
    unique, inverse, counts = ops.unique(torch.tensor([9, -4, 9, 0, -4, 9], device=device))
    assert unique.tolist() == [9, -4, 0]
    assert inverse.tolist() == [0, 1, 0, 2, 1, 0]
    assert counts.tolist() == [3, 2, 1]


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_non_contiguous_keys(device, dtype):
    keys = key_pattern("few", 600, dtype).to(device)
    for view in (keys[::3], keys.view(20, 30)[:, 7], keys[:1].expand(50)):
        assert not view.is_contiguous()
        check(view.cpu(), device)
        assert torch.equal(ops.unique(view)[1], ops.unique(view.contiguous())[1])


def test_input_is_not_changed(device):
    keys = key_pattern("few", 100).to(device)
    before = keys.clone()
    ops.unique(keys)
    assert torch.equal(keys, before)


def test_few_distinct_keys_do_not_keep_a_large_buffer(device):
    unique, _, counts = ops.unique(torch.zeros(100_000, dtype=torch.int64, device=device))
    for result in (unique, counts):
        assert result.untyped_storage().nbytes() <= 1024
    unique, _, counts = ops.unique(torch.arange(400_000, device=device) // 4)
    # Results that fill less than half of their buffers are copied, so that no large buffer is kept.
    for result in (unique, counts):
        assert result.tolist() == (list(range(100_000)) if result is unique else [4] * 100_000)
        assert result.untyped_storage().nbytes() == 800_000


def test_bits_do_not_depend_on_threads(device):
    keys = key_pattern("half on one", 50_000).to(device)
    assert_same_bits_for_any_threads(lambda: ops.unique(keys))


@pytest.mark.parametrize("pattern", ["distinct", "half on one", "few"])
def test_bits_of_many_keys_do_not_depend_on_threads(pattern):
    keys = key_pattern(pattern, 2**17 + 5)
    assert_same_bits_for_any_threads(lambda: ops.unique(keys))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ([1, 2], TypeError, "unique: keys must be a tensor, got list"),
        (torch.ones(2), TypeError, "unique: keys must be int64 or int32, got torch.float32"),
        (torch.tensor([True]), TypeError, "keys must be int64 or int32, got torch.bool"),
        (torch.ones(2, 3, dtype=torch.int64), ValueError, r"1 dimension\(s\), got shape \(2, 3\)"),
        (torch.tensor(3), ValueError, r"unique: keys must have 1 dimension\(s\), got shape \(\)"),
    ],
)
def test_what_is_refused(keys, error, message):
    with pytest.raises(error, match=message):
        ops.unique(keys)
