"""sparsekit.ops.unsorted_segment_sum equals the reference."""

from functools import partial

import pytest
import torch
from conftest import (
    KEY_DTYPES,
    ROW_DTYPES,
    assert_close,
    assert_same_bits_for_any_threads,
    deterministic,
    generator,
    misaligned,
    randn,
    same_bits,
    whole_numbers,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

from sparsekit import ops

# The CPU engine sums 1024 entries at a time; these sizes lie around its multiples.
CHUNK_SIZES = [1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097]
ID_PATTERNS = ("one", "two halves", "half on one", "sorted", "random", "dropped", "all dropped")


def ids_of(pattern, n, num_segments):
    random = torch.randint(0, num_segments, (n,), generator=generator(n + 1))
    odd = torch.arange(n) % 2 == 1
    return {
        "one": torch.full((n,), num_segments - 1),
        "two halves": (torch.arange(n) >= n // 2).long() * (num_segments - 1),
        "half on one": torch.where(odd, num_segments // 2, random),
        "sorted": random.sort().values,
        "random": random,
        "dropped": torch.where(odd, -random - 1, random),
        "all dropped": -random - 1,
    }[pattern]


def check_exact(data, ids, num_segments, device):
    """Check sums of whole numbers: they never round, so any order gives the reference's bits."""
    expected = reference.unsorted_segment_sum(data.cpu(), ids.cpu(), num_segments)
    for in_order in (False, True):
        with deterministic(in_order):
            result = ops.unsorted_segment_sum(data.to(device), ids.to(device), num_segments)
        assert result.dtype == data.dtype
        assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 3, 16, 64, 100, 128, 1024])
def test_equals_the_reference(device, dim, dtype):
    for n, pattern in ((1, "one"), (7, "random"), (33, "dropped"), (500, "half on one")):
        ids = ids_of(pattern, n, 13)
        check_exact(whole_numbers(n, dim, dtype=dtype), ids, 13, device)
        data = randn(n, dim, dtype=dtype)
        for in_order in (False, True):
            with deterministic(in_order):
                result = ops.unsorted_segment_sum(data.to(device), ids.to(device), 13)
            assert_close(result.cpu(), reference.unsorted_segment_sum(data, ids, 13))


@pytest.mark.parametrize("pattern", ID_PATTERNS)
@pytest.mark.parametrize("n", CHUNK_SIZES)
def test_segments_across_chunks(device, n, pattern):
    for num_segments, dim in ((1, 1), (3, 17), (4, 5), (2000, 3)):
        ids = ids_of(pattern, n, num_segments)
        check_exact(whole_numbers(n, dim, seed=n), ids, num_segments, device)


@pytest.mark.parametrize("before", [0, 1, 1023, 1024, 1025])
@pytest.mark.parametrize("hot", [1, 1023, 1024, 1025, 2048, 3071, 5000])
def test_a_hot_segment_between_two_others(device, before, hot):
    # Segments begin and end inside a chunk, at its bounds and beyond them.
    sizes = torch.tensor([before, hot, 700])
    ids = torch.repeat_interleave(torch.arange(3), sizes)
    ids = ids[torch.randperm(len(ids), generator=generator(hot))]
    check_exact(whole_numbers(len(ids), 5, seed=before), ids, 3, device)


@given(
    n=st.integers(0, 3000),
    num_segments=st.integers(1, 40),
    dim=st.integers(1, 70),
    lowest=st.integers(-5, 0),
    seed=st.integers(0, 1000),
)
def test_any_ids(device, n, num_segments, dim, lowest, seed):
    ids = torch.randint(lowest, num_segments, (n,), generator=generator(seed))
    check_exact(whole_numbers(n, dim, seed=seed), ids, num_segments, device)


@pytest.mark.parametrize("num_segments", [0, 1, 5000])
def test_without_entries(device, num_segments):
    for ids in ([], [-1, -(2**63)]):
        ids = torch.tensor(ids, dtype=torch.int64, device=device)
        data = torch.ones(len(ids), 4, device=device)
        result = ops.unsorted_segment_sum(data, ids, num_segments)
        assert result.device == data.device
        assert torch.equal(result.cpu(), torch.zeros(num_segments, 4))


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_id_dtypes_and_non_contiguous_arguments(device, dtype):
    # Make the views on the device: copying them to it would make them contiguous.
    ids = ids_of("dropped", 900, 9).to(device, dtype)[::3]
    assert not ids.is_contiguous()
    for data in (
        whole_numbers(8, 300).to(device).t(),
        whole_numbers(600, 9).to(device)[::2, 1:6],
        whole_numbers(1, 6).to(device).expand(300, 6),
    ):
        assert not data.is_contiguous()
        check_exact(data, ids, 9, device)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_that_are_not_aligned(device, dim, dtype):
    data = misaligned(whole_numbers(40, dim, dtype=dtype).to(device))
    ids = ids_of("half on one", 40, 5).to(device)
    check_exact(data, ids, 5, device)
    for in_order in (False, True):
        with deterministic(in_order):
            aligned = ops.unsorted_segment_sum(data.clone(), ids, 5)
            assert same_bits(ops.unsorted_segment_sum(data, ids, 5), aligned)


def test_bfloat16_is_added_in_float32(device):
    # In bfloat16, 256 + 1 is 256, so a sum kept in bfloat16 would stop there.
    data = torch.ones(1000, 3, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(1000, dtype=torch.int64, device=device)
    assert ops.unsorted_segment_sum(data, ids, 1).tolist() == [[1000.0] * 3]


def test_infinite_values_stay_in_their_segment(device):
    data = torch.tensor([[float("inf")], [1.0], [float("nan")], [2.0]], device=device)
    ids = torch.tensor([0, 1, -1, 1], device=device)
    assert ops.unsorted_segment_sum(data, ids, 3).tolist() == [[float("inf")], [3.0], [0.0]]


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("pattern", ["one", "half on one", "random", "dropped"])
def test_bits_do_not_depend_on_threads(device, pattern, dtype):
    # On the CPU, threads divide the columns and, if these are few, also runs of entries.
    for n, dim in ((10_000, 19), (50_000, 3)) if device.type == "cpu" else ((10_000, 19),):
        data = randn(n, dim, dtype=dtype).to(device)
        ids = ids_of(pattern, n, 300).to(device)
        compute = partial(ops.unsorted_segment_sum, data, ids, 300)
        assert_same_bits_for_any_threads(lambda compute=compute: [compute()])


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_long_segments_on_both_sides_of_a_bound_between_threads(threads):
    # Each thread gets at least 4096 segments; a segment of more than 1024 entries has several runs.
    ids = torch.tensor([4095, 4096, 6143, 6144, 8191, 8192]).repeat(2100)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_exact(whole_numbers(len(ids), 3), ids, 12_288, torch.device("cpu"))
    finally:
        torch.set_num_threads(before)


def test_a_long_sum_is_accurate(device):
    # A sequential sum of these numbers in float32 would be off by about 1e-4.
    n = 1_000_000 if device.type == "cpu" else 50_000
    data = torch.rand(n, 1, generator=generator(0))
    with deterministic():
        ids = torch.zeros(n, dtype=torch.int64, device=device)
        result = ops.unsorted_segment_sum(data.to(device), ids, 1)
    exact = data.double().sum()
    assert abs(result.item() - exact) <= 1e-6 * exact


def test_twenty_runs_give_the_same_bits(device):
    data = randn(6000, 33).to(device)
    ids = ids_of("half on one", 6000, 50).to(device)
    with deterministic():
        first = ops.unsorted_segment_sum(data, ids, 50)
        for _ in range(20):
            assert same_bits(ops.unsorted_segment_sum(data, ids, 50), first)


def test_gradient(device):
    data = randn(7, 3, dtype=torch.float64).to(device).requires_grad_()
    ids = torch.tensor([1, -1, 3, 1, 0, -5, 1], device=device)
    arguments = (data, ids, 5)
    assert torch.autograd.gradcheck(ops.unsorted_segment_sum, arguments)
    assert torch.autograd.gradgradcheck(ops.unsorted_segment_sum, arguments)


@pytest.mark.parametrize("position", [0, 3, 4999])
def test_the_first_bad_id_is_named(device, position):
    ids = torch.zeros(5000, dtype=torch.int64, device=device)
    ids[position:] = torch.arange(len(ids) - position, device=device) + 7
    with pytest.raises(IndexError, match=rf"segment_ids\[{position}\] is 7, but num_segments is 7"):
        ops.unsorted_segment_sum(torch.ones(5000, 2, device=device), ids, 7)


@pytest.mark.parametrize(
    ("data", "ids", "num_segments", "error", "message"),
    [
        (torch.ones(2), torch.tensor([0, 0]), 1, ValueError, r"data must have 2 dimension\(s\)"),
        (torch.ones(2, 2), torch.tensor([[0]]), 1, ValueError, "segment_ids must have 1 dim"),
        (torch.ones(2, 2), torch.tensor([0]), 1, ValueError, "segment_ids must have size 2"),
        (torch.ones(2, 2), torch.tensor([0, 0]), -1, ValueError, "num_segments .*, got -1"),
        (torch.ones(2, 2), torch.tensor([0, 0]), 3.0, TypeError, "num_segments .*, got 3.0"),
        (torch.ones(2, 2), torch.ones(2), 1, TypeError, "segment_ids must be int64 or int32"),
        (torch.ones(2, 2).int(), torch.tensor([0, 0]), 1, TypeError, "data must be float32"),
        (torch.ones(1, 2), torch.tensor([0]), 0, IndexError, r"\[0\] is 0, but num_segments is 0"),
        (torch.ones(1, 2), torch.tensor([0]).to("meta"), 1, ValueError, "segment_ids on meta"),
    ],
)
def test_what_is_refused(data, ids, num_segments, error, message):
    with pytest.raises(error, match=f"unsorted_segment_sum: .*{message}"):
        ops.unsorted_segment_sum(data, ids, num_segments)
