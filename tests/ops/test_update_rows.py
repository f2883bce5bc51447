"""Every rule of sparsekit.ops.update_rows_ equals the reference, and bad arguments raise."""

import re

import numpy as np
import pytest
import torch
from conftest import (
    ROW_DTYPES,
    assert_close,
    assert_same_bits_for_any_threads,
    misaligned,
    randn,
    same_bits,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

from sparsekit import ops

from .optimizer_rules import CASES, PER_ROW, copied, distinct_rows, flat, table_of


def check_steps(case, num_rows, dim, touched, dtype, device, steps=1, together=True, **keywords):
    """Compare steps with the reference; rows without a gradient must keep their bits."""
    rule, settings, _ = CASES[case]
    expected = table_of(case, num_rows, dim, dtype)
    table = copied(expected, device, together)
    own = [torch.arange(num_rows, dtype=torch.int32) for _ in range(2)]
    own[0] = own[0].to(device)
    for step in range(1, steps + 1):
        rows = distinct_rows(touched, num_rows, seed=step)
        grad = randn(touched, dim, dtype=dtype, seed=step)
        count = torch.tensor([step])
        before = copied(table, "cpu")
        ops.update_rows_(
            *table, own[0], rows.to(device), grad.to(device), count.to(device), rule, settings,
            **keywords,
        )  # fmt: skip
        reference.update_rows_(*expected, own[1], rows, grad, count, rule, settings, **keywords)
        untouched = torch.ones(num_rows, dtype=torch.bool)
        untouched[rows] = False
        for now, then, wanted in zip(*map(flat, (table, before, expected)), strict=True):
            assert same_bits(now.cpu()[untouched], then[untouched])
            assert_close(now.cpu(), wanted)
        assert torch.equal(own[0].cpu(), own[1])


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(device, case, dtype):
    for dim in (0, 1, 3, 16, 100, 128, 300):
        for touched in (0, 1, 9, 50):
            check_steps(case, 50, dim, touched, dtype, device)


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps(device, case):
    check_steps(case, 40, 9, 13, torch.float64, device, steps=50)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dim", [9, 64, 300])
@pytest.mark.parametrize("case", [case for case, (rule, *_) in CASES.items() if rule in PER_ROW])
def test_rows_that_count_their_own_steps(device, case, dim):
    check_steps(case, 40, dim, 13, torch.float64, device, steps=50, per_row=True)


@pytest.mark.parametrize("case", CASES)
def test_states_that_lie_apart(device, case):
    for dim in (3, 64, 160):
        check_steps(case, 30, dim, 11, torch.float32, device, together=False)


@given(
    case=st.sampled_from(list(CASES)),
    num_rows=st.integers(1, 30),
    dim=st.integers(1, 40),
    touched=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    per_row=st.booleans(),
)
def test_any_shape(device, case, num_rows, dim, touched, dtype, per_row):
    touched, per_row = min(touched, num_rows), per_row and CASES[case][0] in PER_ROW
    check_steps(case, num_rows, dim, touched, dtype, device, steps=2, per_row=per_row)


def test_first_step_of_adam_by_hand(device):
    # m = 0.1 g and v = 0.001 g^2 are corrected to g and g^2, so the step is lr in g's direction.
    weight, m, v = (torch.zeros(2, 2, dtype=torch.float64, device=device) for _ in range(3))
    grad = torch.tensor([[4.0, -0.25]], dtype=torch.float64, device=device)
    row, step = torch.tensor([1], device=device), torch.tensor([1], device=device)
    ops.update_rows_(weight, [m, v], None, row, grad, step, "adam", [0.01, 0.9, 0.999, 0, 0, 0])
    assert weight.tolist() == [[0, 0], pytest.approx([-0.01, 0.01], rel=1e-12)]
    assert m.tolist() == [[0, 0], pytest.approx([0.4, -0.025], rel=1e-12)]
    assert v.tolist() == [[0, 0], pytest.approx([0.016, 0.0000625], rel=1e-12)]


def test_row_wise_adagrad_by_hand(device):
    weight = torch.zeros(2, 2, dtype=torch.float64, device=device)
    total = torch.tensor([[5.0], [12.5]], dtype=torch.float64, device=device)
    grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64, device=device)
    row, step = torch.tensor([1], device=device), torch.tensor([1], device=device)
    ops.update_rows_(weight, [total], None, row, grad, step, "row_wise_adagrad", [1.0] + [0] * 4)
    assert total.tolist() == [[5], [25]]  # the sum is 12.5 + (9 + 16) / 2
    assert weight.tolist() == [[0, 0], pytest.approx([-0.6, -0.8], rel=1e-12)]


def test_late_steps(device):
    # The bias corrections approach 1 and must not overflow on the way.
    for step in (10**3, 10**9, 2**62):
        for case in ("lazy adam", "exact adam", "adagrad"):
            rule, settings, _ = CASES[case]
            expected = table_of(case, 4, 3, torch.float64)
            table = copied(expected, device)
            rows, grad = torch.tensor([2]), randn(1, 3, dtype=torch.float64)
            count = torch.tensor([step])
            moved = rows.to(device), grad.to(device), count.to(device)
            ops.update_rows_(*table, None, *moved, rule, settings)
            reference.update_rows_(*expected, None, rows, grad, count, rule, settings)
            for now, wanted in zip(flat(table), flat(expected), strict=True):
                assert_close(now.cpu(), wanted)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_without_rows_every_row_moves(device, case, dtype):
    rule, settings, _ = CASES[case]
    grad = randn(20, 6, dtype=dtype).to(device)
    step = torch.tensor(3, device=device)
    start = table_of(case, 20, 6, dtype)
    whole, by_row = copied(start, device), copied(start, device)
    ops.update_rows_(*whole, None, None, grad, step, rule, settings)
    every = torch.arange(20, device=device)
    ops.update_rows_(*by_row, None, every, grad, step, rule, settings)
    for one, other in zip(flat(whole), flat(by_row), strict=True):
        assert same_bits(one, other)
    assert (whole[0].cpu() != start[0]).any(1).all()


def test_states_of_bfloat16_rows_keep_float32(device):
    # Each step is a hundredth of the bfloat16 spacing; the moments must still change.
    weight = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    moments = [torch.zeros(1, 1, device=device) for _ in range(2)]
    grad = torch.full((1, 1), 1.0, dtype=torch.bfloat16, device=device)
    for step in range(1, 11):
        count = torch.tensor([step], device=device)
        settings = [0.0, 0.9, 0.999, 1e-8, 0.0, 0]
        ops.update_rows_(weight, moments, None, None, grad, count, "adam", settings)
    assert weight.item() == 1
    assert moments[0].item() == pytest.approx(1 - 0.9**10, rel=1e-5)
    assert moments[1].item() == pytest.approx(1 - 0.999**10, rel=1e-4)


@pytest.mark.parametrize("num_rows", [0, 30])
@pytest.mark.parametrize("dim", [1, 8, 11, 64])
def test_stochastic_rounding_is_that_of_the_reference(device, dim, num_rows):
    for seed, step in ((0, 1), (2**63 + 5, 2**40 + 3)):
        start = torch.linspace(-3, 3, num_rows * dim).view(num_rows, dim).bfloat16()
        grad = randn(num_rows, dim, dtype=torch.bfloat16)
        results = []
        for ours in (True, False):
            weight, update = start.clone(), (ops if ours else reference).update_rows_
            place = device if ours else "cpu"
            weight = weight.to(place)
            arguments = (None, grad.to(place), torch.tensor(step, device=place))
            update(weight, [], None, *arguments, "sgd", [1e-3, 0, 0, 0], rounding_seed=seed)
            results.append(weight.cpu())
        assert same_bits(*results)


def test_stochastic_rounding_is_right_on_average(device):
    # A step is an eighth of the distance between two bfloat16 numbers: if rounded to nearest, the
    # weight would never move.
    nearest = torch.ones(1, 4000, dtype=torch.bfloat16, device=device)
    at_random = nearest.clone()
    grad, step_size = torch.ones_like(nearest), 2.0**-7 / 8
    for step in range(1, 9):
        count = torch.tensor(step, device=device)
        arguments = (None, None, grad, count, "sgd", [-step_size, 0, 0, 0])
        ops.update_rows_(nearest, [], *arguments)
        ops.update_rows_(at_random, [], *arguments, rounding_seed=1)
    assert (nearest == 1).all()
    assert at_random.float().mean().item() == pytest.approx(1 + 2.0**-7, rel=4e-4)
    special = torch.tensor([[float("inf"), float("-inf"), float("nan"), 3.38e38]]).bfloat16()
    special = special.to(device)
    count = torch.tensor(1, device=device)
    zeros = torch.zeros_like(special)
    ops.update_rows_(special, [], None, None, zeros, count, "sgd", [1, 0, 0, 0], rounding_seed=3)
    assert special[0, :2].tolist() == [float("inf"), float("-inf")]
    assert special[0, 2].isnan()


def test_other_dtypes_are_not_rounded_at_random(device):
    for dtype in (torch.float32, torch.float64):
        results = []
        for seed in (None, 5):
            weight = randn(4, 9, dtype=dtype).to(device)
            grad, step = randn(4, 9, dtype=dtype, seed=1).to(device), torch.tensor(1, device=device)
            settings = [0.1, 0, 0, 0]
            ops.update_rows_(
                weight, [], None, None, grad, step, "sgd", settings, rounding_seed=seed
            )
            results.append(weight)
        assert same_bits(*results)


def test_a_nan_stays(device):
    for case in CASES:
        rule, settings, _ = CASES[case]
        table = copied(table_of(case, 2, 8, torch.float32), device)
        grad = torch.full((2, 8), float("nan"), device=device)
        step = torch.tensor(1, device=device)
        ops.update_rows_(*table, None, None, grad, step, rule, settings)
        for now in flat(table):
            assert now.isnan().all(), case


def test_non_contiguous_gradient_and_rows(device):
    rule, settings, _ = CASES["lazy adam"]
    expected = table_of("lazy adam", 10, 4, torch.float32)
    table = copied(expected, device)
    # Make the views on the device: copying them to it would make them contiguous.
    rows, grad = torch.arange(10, device=device)[::3], randn(4, 4).to(device).t()
    assert not rows.is_contiguous()
    assert not grad.is_contiguous()
    step = torch.tensor([1])
    ops.update_rows_(*table, None, rows, grad, step.to(device), rule, settings)
    reference.update_rows_(*expected, None, rows.cpu(), grad.cpu(), step, rule, settings)
    for now, wanted in zip(flat(table), flat(expected), strict=True):
        assert_close(now.cpu(), wanted)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_that_are_not_aligned(device, dim, dtype):
    rule, settings, _ = CASES["lazy adam"]
    weight, states = copied(table_of("lazy adam", 5, dim, dtype), device, together=False)
    aligned = [weight, *states, randn(3, dim, dtype=dtype, seed=4).to(device)]
    rows, step = torch.tensor([4, 0, 3], device=device), torch.tensor([7], device=device)

    def compute(copies):
        weight, m, v, grad = (copy(tensor) for copy, tensor in zip(copies, aligned, strict=True))
        ops.update_rows_(weight, [m, v], None, rows, grad, step, rule, settings)
        return weight, m, v

    expected = compute([torch.clone] * 4)
    alone = [[misaligned if i == j else torch.clone for j in range(4)] for i in range(4)]
    for copies in (*alone, [misaligned] * 4):
        for now, then, wanted in zip(compute(copies), aligned[:3], expected, strict=True):
            assert_close(now, wanted)
            assert same_bits(now[1:3], then[1:3])


def test_states_with_a_gap_that_breaks_alignment(device):
    rule, settings, _ = CASES["lazy adam"]
    start = table_of("lazy adam", 6, 16, torch.float32)
    plain, odd = copied(start, device), copied(start, device)
    space = torch.full((6, 37), 7.0, device=device)
    spaced = [space[:, :16], space[:, 18:34]]
    for view, state in zip(spaced, odd[1], strict=True):
        view.copy_(state)
    rows, grad = torch.tensor([5, 1], device=device), randn(2, 16).to(device)
    step = torch.tensor(2, device=device)
    ops.update_rows_(*plain, None, rows, grad, step, rule, settings)
    ops.update_rows_(odd[0], spaced, None, rows, grad, step, rule, settings)
    for one, other in zip(flat(plain), [odd[0], *spaced], strict=True):
        assert same_bits(one, other)
    assert (space[:, 16:18] == 7).all()
    assert (space[:, 34:] == 7).all()


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_threads(device, backend, case):
    rule, settings, _ = CASES[case]
    n = 3000 if backend == "cpu" else 600
    rows, grad = distinct_rows(n, 5000).to(device), randn(n, 17).to(device)
    start = table_of(case, 5000, 17, torch.float32)

    def compute():
        table = copied(start, device)
        step = torch.tensor([5], device=device)
        ops.update_rows_(*table, None, rows, grad, step, rule, settings)
        return flat(table)

    assert_same_bits_for_any_threads(compute)


def test_a_backward_that_needs_the_old_weight_notices(device):
    weight = randn(3, 2).to(device).requires_grad_()
    loss = (weight**2).sum()
    step = torch.tensor([1], device=device)
    with torch.no_grad():
        grad = torch.ones(3, 2, device=device)
        ops.update_rows_(weight, [], None, None, grad, step, "sgd", [0.1, 0, 0, 0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
def test_a_row_out_of_range(device, backend, bad):
    rule, settings, _ = CASES["lazy adam"]
    table = copied(table_of("lazy adam", 4, 3, torch.float32), device)
    before = copied(table, "cpu")
    rows = torch.tensor([1, bad, 0], device=device)
    grad, step = torch.ones(3, 3, device=device), torch.tensor([1], device=device)
    with pytest.raises(IndexError, match=rf"rows\[1\] is {bad}, but weight has 4 rows"):
        ops.update_rows_(*table, None, rows, grad, step, rule, settings)
    kept = slice(None) if backend == "cpu" else slice(2, None)
    for now, then in zip(flat(table), flat(before), strict=True):
        assert same_bits(now.cpu()[kept], then[kept])


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("case", ["momentum", "amsgrad", "ftrl"])
def test_states_whose_rows_are_not_aligned(device, case, dtype):
    """Rows with an odd stride get narrow accesses: a GPU and sanitizers fault on wide ones."""
    rule, settings, _ = CASES[case]
    rows = distinct_rows(11, 30).to(device)
    grad, step = randn(11, 16, dtype=dtype).to(device), torch.tensor([3], device=device)
    results = []
    for distance in (16, 17):
        weight, states = copied(table_of(case, 30, 16, dtype), device)
        spaces = [state.new_zeros(30, distance) for state in states]
        apart = [space[:, :16].copy_(s) for space, s in zip(spaces, states, strict=True)]
        ops.update_rows_(weight, apart, None, rows, grad, step, rule, settings)
        assert all((space[:, 16:] == 0).all() for space in spaces)
        results.append([weight, *apart])
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


MOST = 2**31 - 1


@pytest.mark.parametrize("step", [MOST - 1, MOST, MOST + 1, 2**32 + 5, 2**62])
def test_steps_beyond_what_row_step_can_have(device, step):
    """A step number beyond the range of row_step is clamped, in the kernels and the reference."""
    rule, settings, _ = CASES["lazy adam"]
    for per_row in (False, True):
        expected = table_of("lazy adam", 4, 3, torch.float64)
        table = copied(expected, device)
        own = [torch.tensor([0, MOST - 1, MOST, 7], dtype=torch.int32) for _ in range(2)]
        own[0] = own[0].to(device)
        rows, grad = torch.tensor([1, 2, 0]), randn(3, 3, dtype=torch.float64)
        count = torch.tensor([step])
        moved = rows.to(device), grad.to(device), count.to(device)
        ops.update_rows_(*table, own[0], *moved, rule, settings, per_row=per_row)
        reference.update_rows_(
            *expected, own[1], rows, grad, count, rule, settings, per_row=per_row
        )
        last = min(step, MOST)
        wanted = [1, MOST, MOST, 7] if per_row else [last, last, last, 7]
        assert own[0].tolist() == own[1].tolist() == wanted
        for now, then in zip(flat(table), flat(expected), strict=True):
            assert now.isfinite().all()
            assert_close(now.cpu(), then)


@pytest.mark.parametrize("lr_power", [0.0, -0.0, -0.5, -1.0, -2.0])
def test_ftrl_as_numpy_has_it(device, lr_power):
    """ftrl follows the formulas in its docstring; lr_power = 0 means a constant rate."""
    lr, l1, l2 = 0.25, 0.5, 0.125
    weight, n, z = (randn(6, 5, dtype=torch.float64, seed=k) for k in range(3))
    n.square_()
    n[0] = 0  # as before the first step with initial_accumulator_value=0
    table = [t.clone().to(device) for t in (weight, n, z)]
    w, n, z = (t.numpy().copy() for t in (weight, n, z))
    for step in range(1, 5):
        g = randn(6, 5, dtype=torch.float64, seed=10 + step)
        ops.update_rows_(
            table[0], table[1:], None, None, g.to(device), torch.tensor([step], device=device),
            "ftrl", [lr, l1, l2, lr_power],
        )  # fmt: skip
        more = n + g.numpy() ** 2
        z = z + g.numpy() - (more**-lr_power - n**-lr_power) / lr * w
        n = more
        divisor = n**-lr_power / lr + 2 * l2
        w = np.where(np.abs(z) <= l1, 0, (np.sign(z) * l1 - z) / divisor)
        for now, wanted in zip(table, (w, n, z), strict=True):
            np.testing.assert_allclose(now.cpu().numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert (w == 0).any()
    assert (w != 0).any()


ZEROS = torch.zeros(4, 3)
GOOD = {
    "weight": ZEROS,
    "states": [ZEROS, ZEROS],
    "row_step": None,
    "rows": torch.tensor([0, 1]),
    "grad": ZEROS[:2],
    "step": torch.tensor([1]),
    "rule": "adam",
    "settings": [0.1, 0.9, 0.99, 1e-8, 0, 0],
}
STEPS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": torch.zeros(4, 3).half()}, TypeError, "weight must be float32 or float64"),
        ({"weight": torch.zeros(4)}, ValueError, "weight must have 2 dimension"),
        ({"weight": torch.zeros(3, 4).t()}, ValueError, "weight must be contiguous"),
        ({"states": [ZEROS, torch.zeros(3, 3)]}, ValueError, r"states\[1\] must have size 4"),
        ({"states": [ZEROS, torch.zeros(4, 1)]}, ValueError, r"states\[1\] must have size 3"),
        ({"states": [ZEROS, ZEROS.double()]}, ValueError, r"states\[1\] must have dtype Float"),
        (
            {"states": [torch.zeros(3, 4).t(), ZEROS]},
            ValueError,
            r"states\[0\] must be cont",
        ),
        ({"states": [ZEROS[:1].expand(4, 3), ZEROS]}, ValueError, r"states\[0\] must not overlap"),
        (
            {"states": [ZEROS, torch.zeros(9).as_strided((4, 3), (2, 1))]},
            ValueError,
            r"states\[1\] must not overlap",
        ),
        ({"states": [ZEROS]}, ValueError, "adam cannot have 1 states"),
        ({"states": [ZEROS, ZEROS.to("meta")]}, ValueError, r"states\[1\] on meta"),
        ({"row_step": STEPS.long()}, ValueError, "row_step must have dtype Int, got Long"),
        ({"row_step": STEPS[:3]}, ValueError, "row_step must have size 4"),
        ({"rows": torch.tensor([0])}, ValueError, "rows must have size 2"),
        ({"rows": torch.tensor([0, 1]).int()}, ValueError, "rows must have dtype Long, got Int"),
        ({"rows": None}, ValueError, "grad must have size 4"),
        ({"rows": torch.tensor([0, 1]).to("meta")}, ValueError, "rows on meta"),
        ({"grad": torch.zeros(2, 2)}, ValueError, "grad must have size 3 in dimension 1, got 2"),
        ({"grad": torch.zeros(2, 3).bfloat16()}, ValueError, "grad must have dtype Float"),
        ({"step": torch.tensor([0])}, ValueError, "step must be one number >= 1"),
        ({"step": torch.tensor([1, 1])}, ValueError, "step must be one number >= 1"),
        ({"step": torch.tensor([1.0])}, ValueError, "step must have dtype Long"),
        ({"step": torch.tensor([1]).to("meta")}, ValueError, "step on meta"),
        ({"rule": "adamw"}, ValueError, "rule must be sgd, adam, .* got adamw"),
        ({"settings": [0.1]}, ValueError, "settings of adam must be 6, got 1"),
        ({"per_row": True}, ValueError, "per_row needs row_step"),
        (
            {
                "per_row": True,
                "row_step": STEPS,
                "rule": "adagrad",
                "settings": [1, 0, 0, 0, 0],
                "states": [ZEROS],
            },
            ValueError,
            "rows cannot count their own steps under adagrad",
        ),
    ],
)
def test_what_is_refused(changes, error, message):
    with pytest.raises(error, match=f"update_rows_: .*{message}"):
        ops.update_rows_(**{**GOOD, **changes})


def test_a_refusal_of_a_single_table_names_no_table():
    for weight in (ZEROS, [ZEROS]):
        with pytest.raises(ValueError, match=r"^update_rows_: all tensors must .* grad on meta"):
            ops.update_rows_(**{**GOOD, "weight": weight, "grad": ZEROS[:2].to("meta")})


@pytest.mark.parametrize("k", range(7))
def test_a_refusal_names_the_table_and_its_tensor(k):
    names = ["weight", "states[0]", "states[1]", "row_step", "rows", "grad", "step"]
    of_table = [ZEROS, ZEROS, ZEROS, STEPS, GOOD["rows"], GOOD["grad"], GOOD["step"]]
    one, other = ([tensor.clone() for tensor in of_table] for _ in range(2))
    other[k] = other[k].to("meta")
    weights, first, second, *rest = zip(one, other, strict=True)
    states = [first[0], second[0], first[1], second[1]]
    # The error names the first tensor on each device.
    found = f"weight on cpu, {names[k]} on meta" if k else "weight on meta, states[0] on cpu"
    with pytest.raises(ValueError, match=rf"update_rows_: table 1: .*, got {re.escape(found)}$"):
        ops.update_rows_(weights, states, *rest, GOOD["rule"], GOOD["settings"])


@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
def test_steps_are_counted_by_the_same_call(device, rule):
    weights = [torch.zeros(3, 2, device=device) for _ in range(2)]
    settings = [0.5, 0.0, 0.0, 0.0] if rule == "sgd" else [0.5, 0.25, 0.0, 0.0, 0.0]
    states = [] if rule == "sgd" else [torch.zeros(3, 2, device=device) for _ in range(2)]
    rows, grad = torch.tensor([1], device=device), torch.ones(1, 2, device=device)
    before, now = (torch.tensor(n, device=device) for n in (4, 5))
    for weight, step in zip(weights, (before, now), strict=True):
        own = states[:1] if weight is weights[0] else states[1:]
        counted = step is before
        ops.update_rows_(weight, own, None, rows, grad, step, rule, settings, count_steps=counted)
    assert (before, now) == (5, 5)
    assert same_bits(*weights)
    assert weights[0][1, 0] == (-0.5 if rule == "sgd" else -0.25)
    for bad, error in ((rows + 9, IndexError), (rows.float(), (TypeError, ValueError))):
        with pytest.raises(error):
            ops.update_rows_(
                weights[0], states[:1], None, bad, grad, before, rule, settings, count_steps=True
            )
        assert before == 5


def test_what_cannot_be_counted():
    weight, grad = torch.zeros(3, 2), torch.ones(3, 2)
    for step in (-1, 2**63 - 1):
        with pytest.raises(ValueError, match=f"step must be one number >= 0.*, got {step}"):
            ops.update_rows_(
                weight, [], None, None, grad, torch.tensor(step), "sgd", [1.0, 0.0, 0.0, 0.0],
                count_steps=True,
            )  # fmt: skip


@pytest.mark.parametrize("together", [True, False])
def test_one_state_for_a_row_may_be_a_vector(device, together):
    rule, settings, _ = CASES["row-wise adagrad"]
    start = table_of("row-wise adagrad", 7, 5, torch.float32)
    grad, step = randn(7, 5).to(device), torch.tensor(2, device=device)
    results = []
    for columns in (slice(None), 0):
        table = copied(start, device, together)
        ops.update_rows_(
            table[0], [table[1][0][:, columns]], None, None, grad, step, rule, settings
        )
        results.append(table)
    for one, other in zip(*map(flat, results), strict=True):
        assert same_bits(one, other)
