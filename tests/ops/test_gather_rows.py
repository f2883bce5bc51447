"""sparsekit.ops.gather_rows equals the reference."""

import pytest
import torch
from conftest import (
    KEY_DTYPES,
    ROW_DTYPES,
    assert_same_bits_for_any_threads,
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

DIMS = [0, 1, 3, 16, 64, 100, 128, 1024]


def check(table, rows, device):
    result = ops.gather_rows(table.to(device), rows.to(device))
    assert same_bits(result, reference.gather_rows(table.cpu(), rows.cpu()))


def some_rows(n, num_rows, dtype=torch.int64):
    return torch.randint(-1, num_rows, (n,), generator=generator(n), dtype=dtype)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_equals_the_reference(device, dim, dtype):
    table = randn(57, dim, dtype=dtype)
    for n in (0, 1, 15, 16, 17, 300):
        check(table, some_rows(n, 57), device)


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_row_dtypes(device, dtype):
    check(randn(9, 5), some_rows(100, 9, dtype), device)


@given(
    num_rows=st.integers(0, 20),
    dim=st.integers(0, 40),
    rows=st.lists(st.integers(-3, 19), max_size=60),
)
def test_any_rows(device, num_rows, dim, rows):
    rows = torch.tensor([min(row, num_rows - 1) for row in rows], dtype=torch.int64)
    check(randn(num_rows, dim), rows, device)


def test_every_negative_row_reads_zeros(device):
    rows = torch.tensor([-1, -2, -(2**63), -(2**31)], device=device)
    for num_rows in (0, 4):
        assert not ops.gather_rows(torch.ones(num_rows, 7, device=device), rows).any()


def test_bits_are_copied_as_they_are(device):
    table = torch.tensor([[-0.0, float("nan")], [float("-inf"), 1e-45]])
    check(table, torch.tensor([1, 0, -1]), device)


def test_one_row_many_times(device):
    check(randn(3, 64), torch.full((1000,), 2), device)


def test_non_contiguous_arguments(device):
    # Make the views on the device: copying them to it would make them contiguous.
    rows = some_rows(120, 7).to(device)[::3]
    assert not rows.is_contiguous()
    for table in (
        randn(10, 7).to(device).t(),
        randn(14, 20).to(device)[::2, 3:8],
        randn(1, 6).to(device).expand(7, 6),
    ):
        assert not table.is_contiguous()
        check(table, rows, device)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_that_are_not_aligned(device, dim, dtype):
    table, rows = misaligned(randn(5, dim, dtype=dtype).to(device)), some_rows(40, 5).to(device)
    check(table, rows, device)
    assert same_bits(ops.gather_rows(table, rows), ops.gather_rows(table.clone(), rows))
    # The gradient sums rows in any order; sums of whole numbers are exact.
    upstream = whole_numbers(40, dim, dtype=dtype).to(device)
    grads = []
    for grad in (upstream, misaligned(upstream)):
        leaf = table.detach().requires_grad_()
        grads += torch.autograd.grad(ops.gather_rows(leaf, rows), leaf, grad)
    assert same_bits(*grads)


def test_bits_do_not_depend_on_threads(device):
    table, rows = randn(1000, 33).to(device), some_rows(20_000, 1000).to(device)
    assert_same_bits_for_any_threads(lambda: [ops.gather_rows(table, rows)])


def test_gradient(device):
    table = randn(6, 3, dtype=torch.float64).to(device).requires_grad_()
    for rows in ([5, 0, -1, 5, 2, 5], [], [-1, -1]):
        rows = torch.tensor(rows, dtype=torch.int64, device=device)
        assert torch.autograd.gradcheck(ops.gather_rows, (table, rows))
        assert torch.autograd.gradgradcheck(ops.gather_rows, (table, rows))


def test_gradient_of_an_expanded_output(device):
    # The gradient of sum() is one number expanded to the whole shape.
    table = torch.ones(4, 3, device=device, requires_grad=True)
    ops.gather_rows(table, torch.tensor([1, 1, -1, 3], device=device)).sum().backward()
    assert table.grad.tolist() == [[0] * 3, [2] * 3, [0] * 3, [1] * 3]


@pytest.mark.parametrize("position", [0, 99, 4567])
def test_the_first_bad_row_is_named(device, position):
    rows = torch.zeros(5000, dtype=torch.int64, device=device)
    rows[position:] = torch.arange(len(rows) - position, device=device) + 10
    with pytest.raises(IndexError, match=rf"rows\[{position}\] is 10, but table has 10 rows"):
        ops.gather_rows(torch.ones(10, 4, device=device), rows)


@pytest.mark.parametrize(
    ("table", "rows", "error", "message"),
    [
        (torch.ones(2), torch.tensor([0]), ValueError, r"table must have 2 dimension\(s\)"),
        (torch.ones(2, 2), torch.tensor(0), ValueError, r"rows must have 1 dimension\(s\)"),
        (torch.ones(2, 2), torch.ones(1), TypeError, "rows must be int64 or int32"),
        (torch.ones(2, 2).half(), torch.tensor([0]), TypeError, "table must be float32 or"),
        (torch.ones(0, 2), torch.tensor([-1, 0]), IndexError, r"rows\[1\] is 0, but table has 0"),
        (torch.ones(2, 2), torch.ones(1).long().to("meta"), ValueError, "rows on meta"),
    ],
)
def test_what_is_refused(table, rows, error, message):
    with pytest.raises(error, match=f"gather_rows: .*{message}"):
        ops.gather_rows(table, rows)
