"""sparsekit.ops.lazy_adam_step_ against the reference and torch.optim.SparseAdam."""

import pytest
import torch
from conftest import (
    ROW_DTYPES,
    TOLERANCE,
    assert_close,
    assert_same_bits_for_any_threads,
    generator,
    misaligned,
    randn,
    same_bits,
)
from hypothesis import given
from hypothesis import strategies as st

from sparsekit import ops, reference

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}


def state_of(num_rows, dim, dtype, device=None):
    """A weight and its moments, as they are after some steps."""
    moments = torch.float32 if dtype == torch.bfloat16 else dtype
    state = [
        randn(num_rows, dim, dtype=dtype, seed=1),
        randn(num_rows, dim, dtype=moments, seed=2),
        randn(num_rows, dim, dtype=moments, seed=3).square(),
    ]
    return [tensor.to(device) for tensor in state]


def distinct_rows(n, num_rows, seed=0):
    return torch.randperm(num_rows, generator=generator(seed))[:n]


def check_steps(num_rows, dim, touched, dtype, device, steps=1, **settings):
    """Take steps on both sides; rows without a gradient must keep their bits."""
    settings = {**SETTINGS, **settings}
    state, expected = state_of(num_rows, dim, dtype, device), state_of(num_rows, dim, dtype)
    for step in range(1, steps + 1):
        rows = distinct_rows(touched, num_rows, seed=step)
        grad = randn(touched, dim, dtype=dtype, seed=step)
        count = torch.tensor([step])
        before = [tensor.clone() for tensor in state]
        ops.lazy_adam_step_(*state, rows.to(device), grad.to(device), count.to(device), **settings)
        reference.lazy_adam_step_(*expected, rows, grad, count, **settings)
        untouched = torch.ones(num_rows, dtype=torch.bool)
        untouched[rows] = False
        for now, then, wanted in zip(state, before, expected, strict=True):
            assert same_bits(now.cpu()[untouched], then.cpu()[untouched])
            assert_close(now.cpu(), wanted)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 3, 16, 64, 100, 128, 1024])
def test_equals_the_reference(device, dim, dtype):
    for touched in (0, 1, 7, 8, 9, 50):
        check_steps(50, dim, touched, dtype, device)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_fifty_steps(device, dtype):
    check_steps(40, 9, 13, dtype, device, steps=50)


@given(
    num_rows=st.integers(1, 30),
    dim=st.integers(1, 40),
    touched=st.integers(0, 30),
    lr=st.floats(0, 1),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0, 0.9999),
    eps=st.floats(1e-10, 1e-2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_settings(device, num_rows, dim, touched, lr, beta1, beta2, eps, dtype):
    touched = min(touched, num_rows)
    settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps}
    check_steps(num_rows, dim, touched, dtype, device, steps=2, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_sparse_adam(device, dtype):
    ours = [randn(30, 5, dtype=dtype).to(device)] + [
        torch.zeros(30, 5, dtype=dtype, device=device) for _ in range(2)
    ]
    theirs = torch.nn.Parameter(ours[0].clone())
    optimizer = torch.optim.SparseAdam([theirs], **SETTINGS)
    for step in range(1, 51):
        rows = distinct_rows(11, 30, seed=step).to(device)
        grad = randn(11, 5, dtype=dtype, seed=step).to(device)
        ops.lazy_adam_step_(*ours, rows, grad, torch.tensor([step], device=device), **SETTINGS)
        theirs.grad = torch.sparse_coo_tensor(
            rows[None], grad, theirs.shape, check_invariants=False
        )
        optimizer.step()
    assert_close(ours[0], theirs.detach())


def test_first_step_by_hand(device):
    # m = 0.1 g and v = 0.001 g^2 are corrected to g and g^2, so the step is lr in g's direction.
    state = [torch.zeros(2, 2, dtype=torch.float64, device=device) for _ in range(3)]
    grad = torch.tensor([[4.0, -0.25]], dtype=torch.float64, device=device)
    row, step = torch.tensor([1], device=device), torch.tensor([1], device=device)
    ops.lazy_adam_step_(*state, row, grad, step, **{**SETTINGS, "eps": 0.0})
    weight, exp_avg, exp_avg_sq = (tensor.tolist() for tensor in state)
    assert weight == [[0, 0], pytest.approx([-0.01, 0.01], rel=1e-12)]
    assert exp_avg == [[0, 0], pytest.approx([0.4, -0.025], rel=1e-12)]
    assert exp_avg_sq == [[0, 0], pytest.approx([0.016, 0.0000625], rel=1e-12)]


def test_late_steps(device):
    # The corrections approach 1 and must not overflow on the way.
    for step in (10**3, 10**9, 2**62):
        state, expected = state_of(4, 3, torch.float64, device), state_of(4, 3, torch.float64)
        rows, grad = torch.tensor([2]), randn(1, 3, dtype=torch.float64)
        count = torch.tensor([step])
        ops.lazy_adam_step_(*state, rows.to(device), grad.to(device), count.to(device), **SETTINGS)
        reference.lazy_adam_step_(*expected, rows, grad, count, **SETTINGS)
        for now, wanted in zip(state, expected, strict=True):
            assert_close(now.cpu(), wanted)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_without_rows_every_row_moves(device, dtype):
    grad = randn(20, 6, dtype=dtype).to(device)
    step = torch.tensor(3, device=device)
    whole, by_row = state_of(20, 6, dtype, device), state_of(20, 6, dtype, device)
    ops.lazy_adam_step_(*whole, None, grad, step, **SETTINGS)
    ops.lazy_adam_step_(*by_row, torch.arange(20, device=device), grad, step, **SETTINGS)
    for one, other in zip(whole, by_row, strict=True):
        assert same_bits(one, other)
    assert (whole[1] != state_of(20, 6, dtype, device)[1]).all()


def test_moments_of_bfloat16_rows_keep_float32(device):
    # A hundredth of a bfloat16 step at a time: the moments must see it.
    state = [torch.ones(1, 1, dtype=torch.bfloat16, device=device)]
    state += [torch.zeros(1, 1, device=device) for _ in range(2)]
    grad = torch.full((1, 1), 1.0, dtype=torch.bfloat16, device=device)
    for step in range(1, 11):
        count = torch.tensor([step], device=device)
        ops.lazy_adam_step_(*state, None, grad, count, **{**SETTINGS, "lr": 0.0})
    assert state[0].item() == 1
    assert state[1].item() == pytest.approx(1 - 0.9**10, rel=1e-5)
    assert state[2].item() == pytest.approx(1 - 0.999**10, rel=TOLERANCE[torch.float32] * 10)


def test_non_contiguous_gradient_and_rows(device):
    state, expected = state_of(10, 4, torch.float32, device), state_of(10, 4, torch.float32)
    # Views are made on the device: a copy to another device would be contiguous.
    rows, grad = torch.arange(10, device=device)[::3], randn(4, 4).to(device).t()
    assert not rows.is_contiguous()
    assert not grad.is_contiguous()
    step = torch.tensor([1])
    ops.lazy_adam_step_(*state, rows, grad, step.to(device), **SETTINGS)
    reference.lazy_adam_step_(*expected, rows.cpu(), grad.cpu(), step, **SETTINGS)
    for now, wanted in zip(state, expected, strict=True):
        assert_close(now.cpu(), wanted)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_that_are_not_aligned(device, dim, dtype):
    aligned = [*state_of(5, dim, dtype, device), randn(3, dim, dtype=dtype, seed=4).to(device)]
    rows, step = torch.tensor([4, 0, 3], device=device), torch.tensor([7], device=device)

    def compute(copies):
        *state, grad = (copy(tensor) for copy, tensor in zip(copies, aligned, strict=True))
        ops.lazy_adam_step_(*state, rows, grad, step, **SETTINGS)
        return state

    expected = compute([torch.clone] * 4)
    alone = [[misaligned if i == j else torch.clone for j in range(4)] for i in range(4)]
    for copies in (*alone, [misaligned] * 4):
        for now, then, wanted in zip(compute(copies), aligned[:3], expected, strict=True):
            assert_close(now, wanted)
            assert same_bits(now[1:3], then[1:3])


def test_bits_do_not_depend_on_threads(device):
    rows, grad = distinct_rows(3000, 5000).to(device), randn(3000, 17).to(device)

    def compute():
        state = state_of(5000, 17, torch.float32, device)
        ops.lazy_adam_step_(*state, rows, grad, torch.tensor([5], device=device), **SETTINGS)
        return state

    assert_same_bits_for_any_threads(compute)


def test_a_backward_that_needs_the_old_weight_notices(device):
    state = state_of(3, 2, torch.float32, device)
    state[0].requires_grad_()
    loss = (state[0] ** 2).sum()
    step = torch.tensor([1], device=device)
    with torch.no_grad():
        ops.lazy_adam_step_(*state, None, torch.ones(3, 2, device=device), step, **SETTINGS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_a_bad_row_is_named_and_left_out(device, backend, bad):
    state, before = state_of(5, 3, torch.float32, device), state_of(5, 3, torch.float32, device)
    rows = torch.tensor([0, 3, bad, 1], device=device)
    step = torch.tensor([1], device=device)
    with pytest.raises(IndexError, match=rf"rows\[2\] is {bad}, but weight has 5 rows"):
        ops.lazy_adam_step_(*state, rows, torch.ones(4, 3, device=device), step, **SETTINGS)
    # The CPU looks at all rows first. A device cannot, short of a pass more over them.
    untouched = slice(None) if backend == "cpu" else [2, 4]
    for now, then in zip(state, before, strict=True):
        assert same_bits(now[untouched], then[untouched])


ZEROS = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("position", "argument", "error", "message"),
    [
        (0, torch.zeros(4), ValueError, r"weight must have 2 dimension\(s\)"),
        (0, ZEROS.half(), TypeError, "weight must be float32 or"),
        (0, torch.zeros(3, 4).t(), ValueError, "weight must be contiguous"),
        (1, ZEROS[:2], ValueError, "exp_avg must have size 4 in dimension 0, got 2"),
        (2, ZEROS[:, :2], ValueError, "exp_avg_sq must have size 3 in dimension 1, got 2"),
        (1, ZEROS.double(), ValueError, "exp_avg must have dtype Float, got Double"),
        (2, torch.zeros(3, 4).t(), ValueError, "exp_avg_sq must be contiguous"),
        (3, torch.tensor([0]), ValueError, "rows must have size 2"),
        (3, torch.tensor([0, 1]).int(), ValueError, "rows must have dtype Long, got Int"),
        (3, None, ValueError, "grad must have size 4"),
        (4, torch.zeros(2, 2), ValueError, "grad must have size 3 in dimension 1, got 2"),
        (4, torch.zeros(2, 3).bfloat16(), ValueError, "grad must have dtype Float"),
        (5, torch.tensor([0]), ValueError, "step must be one number >= 1"),
        (5, torch.tensor([1, 1]), ValueError, "step must be one number >= 1"),
        (5, torch.tensor([1.0]), ValueError, "step must have dtype Long"),
        (2, ZEROS.to("meta"), ValueError, "exp_avg_sq on meta"),
        (3, torch.tensor([0, 1]).to("meta"), ValueError, "rows on meta"),
        (5, torch.tensor([1]).to("meta"), ValueError, "step on meta"),
    ],
)
def test_what_is_refused(position, argument, error, message):
    moments = [torch.zeros(4, 3), torch.zeros(4, 3)]
    arguments = [torch.zeros(4, 3), *moments, torch.tensor([0, 1]), ZEROS[:2], torch.tensor([1])]
    arguments[position] = argument
    with pytest.raises(error, match=f"lazy_adam_step_: .*{message}"):
        ops.lazy_adam_step_(*arguments, **SETTINGS)
