"""Weights whose rows have gaps between them, as those of records in a file, give the same bits."""

import pytest
import torch
from conftest import ROW_DTYPES, generator, same_bits

from sparsekit import ops

ROWS = 50
# Elements from row to row, beyond those of a row: aligned accesses stay possible, or do not.
GAPS = pytest.mark.parametrize("gap", [1, 3, 8])
DIMS = pytest.mark.parametrize("dim", [1, 4, 7, 64, 130])
DTYPES = pytest.mark.parametrize("dtype", ROW_DTYPES)


def with_gaps(tensor, gap):
    """Return a copy with `gap` elements between the rows, and the memory that it lies in."""
    shape = tensor.shape if tensor.dim() == 2 else (len(tensor), 1)
    memory = torch.full((shape[0], shape[1] + gap), -777, dtype=tensor.dtype, device=tensor.device)
    memory[:, : shape[1]] = tensor.view(shape)
    return (memory[:, : shape[1]] if tensor.dim() == 2 else memory[:, 0]), memory


def check(found, memory, expected):
    """Compare rows, and check that nothing has been written between them."""
    width = expected.shape[1] if expected.dim() == 2 else 1
    assert same_bits(found.cpu(), expected.cpu())
    assert (memory[:, width:] == -777).all()


def weights(dim, dtype, device):
    return torch.randn(ROWS, dim, generator=generator(dim)).to(device, dtype)


@pytest.mark.pairs
@GAPS
@DIMS
@DTYPES
def test_gather_rows(device, gap, dim, dtype):
    table = weights(dim, dtype, device)
    rows = torch.tensor([3, 49, -1, 0, 3], device=device)
    assert same_bits(
        ops.gather_rows(with_gaps(table, gap)[0], rows).cpu(), ops.gather_rows(table, rows).cpu()
    )


@pytest.mark.pairs
@GAPS
@DIMS
@DTYPES
@pytest.mark.parametrize("distribution", ["constant", "uniform", "normal"])
def test_init_rows(device, gap, dim, dtype, distribution):
    expected = weights(dim, dtype, device)
    found, memory = with_gaps(expected, gap)
    keys, rows = torch.arange(9, device=device) * 7, torch.arange(9, device=device) * 5
    for out in (expected, found):
        ops.init_rows_(out, keys, rows, distribution=distribution, a=0.25, b=0.5, seed=3)
    check(found, memory, expected)


@pytest.mark.pairs
@GAPS
@DIMS
@DTYPES
@pytest.mark.parametrize(
    ("rule", "settings", "states"),
    [
        ("sgd", [0.1, 0.0, 0.01, 0.0], []),
        ("adam", [0.1, 0.9, 0.99, 1e-8, 0.01, 1.0], [2, 2]),
        ("row_wise_adagrad", [0.1, 0.0, 1e-8, 0.0, 0.0], [1]),
        ("lamb", [0.1, 0.9, 0.99, 1e-8, 0.01], [2, 2]),
    ],
)
def test_update_rows(device, gap, dim, dtype, rule, settings, states):
    of_states = torch.float64 if dtype == torch.float64 else torch.float32
    expected = [weights(dim, dtype, device)]
    for dims in states:
        shape = (ROWS, dim) if dims == 2 else (ROWS,)
        expected.append(torch.zeros(shape, dtype=of_states, device=device))
    pairs = [with_gaps(tensor, gap) for tensor in expected]
    rows = torch.tensor([1, 7, 8, 49], device=device)
    grad = torch.randn(4, dim, generator=generator(1)).to(device, dtype)
    for weight, *own in (expected, [found for found, _ in pairs]):
        step = torch.zeros((), dtype=torch.int64, device=device)
        lists = [weight], own, [], [rows], [grad], [step]
        for _ in range(2):
            torch.ops.sparsekit.update_rows_(*lists, rule, settings, False, None, True, None, None)
    for (found, memory), tensor in zip(pairs, expected, strict=True):
        check(found, memory, tensor)


@pytest.mark.pairs
@GAPS
@DIMS
@DTYPES
def test_group_find_or_insert(device, gap, dim, dtype):
    expected = weights(dim, dtype, device)
    found, memory = with_gaps(expected, gap)
    keys = torch.arange(30, device=device) * 11
    for weight in (expected, found):
        buckets = torch.empty(20, 8, dtype=torch.int64, device=device)
        ops.hash_table_clear_(buckets)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        rows = ops.group_find_or_insert_(
            *([buckets], [one + 5], [one], [weight], [one + 9]),
            torch.tensor([[0, ROWS, 1]]),
            torch.tensor([[1.0, -0.5, 0.5]], dtype=torch.float64),
            *([keys], [torch.arange(31, device=device)]),
            torch.tensor([[0, 0, 0, 30, 0, 2**62, 0, 0, dim]]),
        )[0]
        assert rows.tolist() == list(range(30))
    check(found, memory, expected)


def test_rows_must_not_overlap(device):
    memory = torch.zeros(100, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)
    grad = torch.zeros(10, 8, device=device)
    for strides, told in (((4, 1), "must not overlap"), ((16, 2), "must be contiguous")):
        weight = torch.zeros(200, device=device).as_strided((10, 8), strides)
        lists = [weight], [], [], [], [grad], [step]
        with pytest.raises((RuntimeError, ValueError), match=f"rows of weight {told}"):
            torch.ops.sparsekit.update_rows_(
                *lists, "sgd", [0.1, 0.0, 0.0, 0.0], False, None, True, None, None
            )
        with pytest.raises((RuntimeError, ValueError), match=f"rows of out {told}"):
            ops.init_rows_(weight, torch.arange(10, device=device))
    assert not memory.any()
