"""Tests of the basics of a device, which take seconds: `gpu_check.sh` runs them first.

Two shortcuts past torch's dispatcher, which save time on the CPU, must also work here:
aoti_torch_empty_strided makes outputs and workspace, and ops that need no gradient are called below
autograd.
"""

import gc

import pytest
import torch
from conftest import KEY_DTYPES, ROW_DTYPES

from sparsekit import ops

gpu = pytest.mark.cuda
# No rows, one row, and a size beyond the pool of small blocks in torch's allocator.
SIZES = ((0, 4), (1, 1), (3, 5), (5, 0), (20_000, 64))


def assert_own(out, like, dtype, *sizes):
    """Check that `out` is a new, contiguous, aligned torch tensor on the device of `like`."""
    assert out.device == like.device
    assert out.dtype == dtype
    assert tuple(out.shape) == sizes
    assert out.is_contiguous()
    assert out.data_ptr() % 16 == 0
    assert out.untyped_storage().nbytes() >= out.nbytes
    assert out.untyped_storage().data_ptr() != like.untyped_storage().data_ptr() or out.numel() == 0


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_outputs_of_rows(device, rows, dim, dtype):
    table = torch.ones(7, dim, dtype=dtype, device=device)
    places = torch.arange(rows, device=device) % 7
    out = ops.gather_rows(table, places)
    assert_own(out, table, dtype, rows, dim)
    assert bool((out == 1).all())
    out.fill_(3)  # the caller may change the output
    assert bool((table == 1).all())


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_outputs_of_keys(device, dtype):
    keys = torch.tensor([7, 9, 7, 7], dtype=dtype, device=device)
    unique, inverse, counts = ops.unique(keys)
    assert_own(unique, keys, dtype, 2)
    assert_own(inverse, keys, torch.int64, 4)
    assert_own(counts, keys, torch.int64, 2)
    assert inverse.tolist() == [0, 1, 0, 0]


@gpu
def test_outputs_come_from_torchs_allocator_and_go_back_to_it():
    # The result is a multiple of 2 MiB, torch's unit of allocation, so nothing is rounded up.
    table = torch.ones(1000, 256, device="cuda")
    rows = torch.arange(1 << 17, device="cuda") % 1000
    data = torch.ones(1 << 17, 64, device="cuda")
    ops.gather_rows(table, rows[:1])  # the first call allocates a few words that it keeps
    gc.collect()  # tensors of earlier tests would otherwise be freed now or later
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    out = ops.gather_rows(table, rows)
    assert torch.cuda.memory_allocated() - before == out.nbytes
    address = out.data_ptr()
    del out
    assert torch.cuda.memory_allocated() == before
    assert ops.gather_rows(table, rows).data_ptr() == address
    ids = rows % 10
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.unsorted_segment_sum(data, ids, 10)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before > 1 << 20  # the peak includes workspace


@gpu
def test_outputs_belong_to_the_current_stream():
    table, rows = torch.ones(64, 1024, device="cuda"), torch.arange(64, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        address = ops.gather_rows(table, rows).data_ptr()
        # The freed block is available immediately, but only to this stream.
        assert torch.empty_like(table).data_ptr() == address
    assert torch.empty_like(table).data_ptr() != address
    torch.cuda.synchronize()


@gpu
def test_an_output_that_does_not_fit():
    table = torch.ones(1, 1 << 16, device="cuda")
    rows = torch.zeros(1 << 24, dtype=torch.int64, device="cuda")  # the result would take 4 TiB
    with pytest.raises(RuntimeError, match="out of memory"):
        ops.gather_rows(table, rows)
    assert ops.gather_rows(table, rows[:3]).shape == (3, 1 << 16)


GRADIENT_MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("mode", GRADIENT_MODES)
def test_ops_below_autograd(device, mode, wanted):
    weight = torch.arange(12.0, device=device).view(4, 3).requires_grad_(wanted)
    rows, offsets = (torch.tensor(x, device=device) for x in ([3, 0, 3], [0, 1, 3]))
    with GRADIENT_MODES[mode]():
        outputs = [
            ops.gather_rows(weight, rows),
            ops.embedding_bag(weight, rows, offsets),
            ops.unsorted_segment_sum(weight, rows.new_tensor([1, 0, 1, -1]), 2),
        ]
    tracked = wanted and mode == "grad"
    for out in outputs:
        assert out.device == weight.device
        assert out.requires_grad == tracked
        assert (out.grad_fn is not None) == tracked
        assert out.is_inference() == (mode == "inference")
    assert [out.tolist() for out in outputs] == [
        [[9, 10, 11], [0, 1, 2], [9, 10, 11]],
        [[9, 10, 11], [9, 11, 13]],
        [[3, 4, 5], [6, 8, 10]],
    ]
    if tracked:
        sum(out.sum() for out in outputs).backward()
        # Row 3 is gathered twice and pooled twice, row 0 once each; rows 0 to 2 are summed.
        assert weight.grad[:, 0].tolist() == [3, 1, 1, 4]


def test_below_and_above_autograd_are_one_kernel(device):
    weight, rows = torch.randn(50, 8, device=device), torch.arange(49, -1, -1, device=device)
    assert torch.equal(ops.gather_rows(weight, rows), weight.flip(0))
    tracked = ops.gather_rows(weight.clone().requires_grad_(), rows)
    assert tracked.grad_fn is not None
    assert torch.equal(tracked, weight.flip(0))


@gpu
def test_such_ops_are_captured_in_a_graph():
    table = torch.randn(100, 16, device="cuda")
    rows = torch.zeros(300, dtype=torch.int64, device="cuda")

    def chain():
        _, inverse, _, number = torch.ops.sparsekit.unique_padded(rows)
        return ops.unsorted_segment_sum(ops.gather_rows(table, rows), inverse, 300), number

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        sums, number = chain()
    for distinct in (3, 100):
        rows.copy_(torch.arange(300, device="cuda") % distinct)
        graph.replay()
        assert number.item() == distinct
        expected = torch.zeros_like(sums).index_add_(0, rows, table[rows])
        torch.testing.assert_close(sums, expected)
