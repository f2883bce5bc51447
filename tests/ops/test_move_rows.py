"""sparsekit.ops.move_rows_ equals the reference."""

import random

import pytest
import torch
from conftest import assert_same_bits_for_any_threads, randn, same_bits
from reference import ops as reference

from sparsekit import ops

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
]


def moves(n, left, seed):
    """Return random new rows: some of the last rows go to places before `left`."""
    draw = random.Random(seed)
    moved = draw.randint(0, min(left, n - left))
    new_rows = torch.full((n,), 2**31 - 1, dtype=torch.int32)  # rows before left are not read
    new_rows[left:] = -1
    for row, place in zip(
        draw.sample(range(left, n), moved), draw.sample(range(left), moved), strict=True
    ):
        new_rows[row] = place
    return new_rows


def check(tensors, new_rows, left, device):
    initial = [torch.tensor(3, dtype=tensor.dtype) for tensor in tensors]
    expected = [tensor.clone() for tensor in tensors]
    reference.move_rows_(expected, new_rows, left, initial)
    ours = [tensor.to(device) for tensor in tensors]
    versions = [tensor._version for tensor in ours]
    ops.move_rows_(ours, new_rows.to(device), left, initial)
    assert all(map(same_bits, ours, expected))
    assert all(ours[i]._version > versions[i] for i in range(len(ours)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (16,), (2, 5), (100,)])
def test_equals_the_reference(device, shape, dtype):
    for n, left in ((0, 0), (1, 0), (1, 1), (70, 40), (70, 65), (70, 0)):
        tensor = (randn(n + 2, *shape) * 9).to(dtype)
        check([tensor], moves(n, left, n + left), left, device)


def test_several_tensors(device):
    tensors = [randn(80, 16), randn(90, 3).double(), torch.arange(80), randn(80, 2, 4).half()]
    check(tensors, moves(80, 50, 0), 50, device)
    check([], moves(80, 50, 0), 50, device)


@pytest.mark.parametrize("dim", [1, 3, 16])
def test_interleaved_states(device, dim):
    """The states of an optimizer may lie between one another's rows."""
    for dtype in (torch.float32, torch.float64):
        whole = randn(60, 2, dim).to(dtype)
        new_rows, initial = moves(60, 37, dim), torch.tensor(0.5, dtype=dtype)
        expected = whole.clone()
        reference.move_rows_([expected[:, 0]], new_rows, 37, [initial])
        reference.move_rows_([expected[:, 1]], new_rows, 37, [initial * 2])
        ours = whole.to(device)
        states = [ours[:, 0], ours[:, 1]]
        ops.move_rows_(states, new_rows.to(device), 37, [initial, initial * 2])
        assert same_bits(ours, expected)


def test_gaps_between_rows_stay(device):
    whole = torch.full((50, 8), 7.0)
    whole[:, 1:4] = randn(50, 3)
    ours = whole.to(device)
    new_rows = moves(50, 30, 1)
    ops.move_rows_([ours[:, 1:4]], new_rows.to(device), 30, [torch.tensor(0.0)])
    assert (ours[:, 0] == 7).all()
    assert (ours[:, 4:] == 7).all()
    assert (ours[30:, 1:4] == 0).all()


def test_bits_do_not_depend_on_threads(device, backend):
    n = 2000 if backend == "simt" else 40_000
    new_rows, tensor = moves(n, n // 2, 0).to(device), randn(n, 5)

    def compute():
        ours = tensor.to(device, copy=True)
        ops.move_rows_([ours], new_rows, n // 2, [torch.tensor(1.0)])
        return ours

    assert_same_bits_for_any_threads(compute)


@pytest.mark.parametrize("value", [-2, 5, 2**31 - 1, -(2**31)])
def test_a_new_row_out_of_range(device, backend, value):
    """The CPU changes nothing; on a device the row stays as it was."""
    ours = randn(8, 3).to(device)
    before = ours.clone()
    new_rows = torch.tensor([0] * 5 + [1, value, 2], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=rf"^move_rows_: new_rows\[6\] is {value}, but must be in"):
        ops.move_rows_([ours], new_rows, 5, [torch.tensor(0.0)])
    rows = slice(None) if backend == "cpu" else 6
    assert same_bits(ours[rows], before[rows])


def refused(device, **changed):
    given = {
        "tensors": [randn(8, 3).to(device)],
        "new_rows": torch.full((8,), -1, dtype=torch.int32, device=device),
        "left": 5,
        "initial": [torch.tensor(0.0)],
    }
    ops.move_rows_(**given | changed)


def test_what_is_refused(device):
    wide = randn(8, 6).to(device)
    for changed, message in (
        ({"left": 9}, r"left is 9, but must be in \[0, 8\]"),
        ({"left": -1}, "left is -1"),
        ({"tensors": [wide[:7]]}, r"tensors\[0\] must have at least 8 rows"),
        ({"tensors": [wide[0, 0]]}, r"tensors\[0\] must have at least 1 dim"),
        ({"tensors": [wide[:, ::2]]}, r"rows of tensors\[0\] must be contiguous"),
        ({"tensors": [wide[:1].expand(8, 6)]}, r"rows of tensors\[0\] must not overlap"),
        ({"tensors": [wide, wide[:, 1:]], "initial": [torch.tensor(0.0)] * 2}, "overlap"),
        ({"initial": []}, r"initial must have 1 element\(s\), got 0"),
        ({"initial": [torch.tensor(0)]}, r"initial\[0\] must have dtype Float, got Long"),
        ({"initial": [torch.zeros(2)]}, r"initial\[0\] must have 0 dim"),
    ):
        with pytest.raises(ValueError, match=f"^move_rows_: .*{message}"):
            refused(device, **changed)
    with pytest.raises(TypeError, match=r"^move_rows_: new_rows must be int32, got torch\.int64"):
        refused(device, new_rows=torch.zeros(8, dtype=torch.int64, device=device))
