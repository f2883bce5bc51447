"""sparsekit.ops.compact_rows equals the reference."""

import random

import pytest
import torch
from conftest import assert_same_bits_for_any_threads
from reference import ops as reference

from sparsekit import ops


def some_rows(size, k, seed):
    return torch.tensor(sorted(random.Random(seed).sample(range(size), k)), dtype=torch.int64)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 300, 3000])
def test_equals_the_reference(device, size):
    for k in {0, min(1, size), size // 3, size - size // 5, size}:
        first, last = torch.arange(k), torch.arange(size - k, size)
        for gone in (some_rows(size, k, k), first, last):
            new_rows = ops.compact_rows(gone.to(device), size)
            assert new_rows.dtype == torch.int32
            assert new_rows.tolist() == reference.compact_rows(gone, size).tolist()


def test_rows_that_stay_are_the_first_ones(device):
    """Rows below the new size keep their numbers, so that only the last ones move."""
    gone = some_rows(500, 180, 0)
    new_rows = ops.compact_rows(gone.to(device), 500).tolist()
    assert sorted(row for row in new_rows if row >= 0) == [*range(320)]
    assert [row for row in range(500) if new_rows[row] < 0] == gone.tolist()
    assert all(new_rows[row] in (-1, row) for row in range(320))


def test_bits_do_not_depend_on_threads(device, backend):
    size = 3000 if backend == "simt" else 300_000
    gone = some_rows(size, size // 7, 1).to(device)
    assert_same_bits_for_any_threads(lambda: [ops.compact_rows(gone, size)])


@pytest.mark.parametrize(
    ("gone", "at"),
    [
        ([-1, 3], 0),
        ([3, 8], 1),
        ([8], 0),
        ([2, 5, 4], 2),
        ([2, 2], 1),
        ([7, 6, 5, 4, 3, 2, 1, 0], 1),
        ([2**63 - 1, -(2**63)], 0),
        ([-(2**63), 5], 0),
    ],
)
def test_rows_out_of_range_or_order(device, gone, at):
    message = rf"^compact_rows: gone\[{at}\] is {gone[at]}, but must be in \[0, 8\) and above"
    with pytest.raises(ValueError, match=message):
        ops.compact_rows(torch.tensor(gone, device=device), 8)


def test_what_is_refused(device):
    gone = torch.tensor([1, 2], device=device)
    for size in (1, -1, 2**31):
        with pytest.raises(ValueError, match=rf"size is {size}, but must be in \[2, 2147483647\]"):
            ops.compact_rows(gone, size)
    with pytest.raises(TypeError, match="gone must be int64"):
        ops.compact_rows(gone.int(), 3)
    with pytest.raises(ValueError, match="gone must have 1 dimension"):
        ops.compact_rows(gone[None], 3)
