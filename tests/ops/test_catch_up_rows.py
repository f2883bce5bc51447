"""sparsekit.ops.catch_up_rows_ equals single steps without a gradient."""

import math

import pytest
import torch
from conftest import ROW_DTYPES, assert_close, assert_same_bits_for_any_threads, same_bits
from reference import ops as reference

from sparsekit import ops

from .optimizer_rules import CASES, copied, distinct_rows, flat, table_of

REPLAYED = ("momentum", "nesterov", "exact adam", "lazy adam")


def numbers_of(case, steps):
    """Return changing learning rates, and the values that an optimizer records for each step."""
    rule, settings, _ = CASES[case]
    rates = [0.1 / (1 + step % 7) for step in steps]
    if rule == "sgd":
        return rates, torch.tensor([[rate, 0.0] for rate in rates], dtype=torch.float64)
    _, beta1, beta2, eps, _, rescale = settings
    roots = [math.sqrt(1 - beta2**step) for step in steps]
    pairs = [
        [rate * root / (1 - beta1**step), eps * root if rescale else eps]
        for rate, root, step in zip(rates, roots, steps, strict=True)
    ]
    return rates, torch.tensor(pairs, dtype=torch.float64)


def settings_of(case):
    """Return a rule and its settings without weight decay, which late rows do not get."""
    rule, settings, _ = CASES[case]
    return rule, [*settings[:2], 0.0, settings[3]] if rule == "sgd" else settings


def step_by_step(case, table, row_step, rates, first_step):
    """Take the missed steps with update_rows_ and zero gradients, for rows that have had a step."""
    rule, settings = settings_of(case)
    for i, rate in enumerate(rates):
        step = first_step + i
        late = ((row_step > 0) & (row_step < step)).nonzero().squeeze(1)
        zeros = torch.zeros(len(late), table[0].shape[1], dtype=table[0].dtype)
        count = torch.tensor(step)
        ops.update_rows_(*table, row_step, late, zeros, count, rule, [rate, *settings[1:]])


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 5, 32, 64, 100, 200])
@pytest.mark.parametrize("case", REPLAYED)
def test_equals_steps_with_gradients_of_zeros(device, case, dim, dtype):
    rule, settings = settings_of(case)
    rates, numbers = numbers_of(case, range(4, 24))
    start = table_of(case, 30, dim, dtype)
    # Row 0 has had no step; row 23 and later rows are ahead.
    row_step = torch.arange(30, dtype=torch.int32)
    steps = [row_step.clone().to(device), row_step.clone()]
    steps[0][1:3] = steps[1][1:3] = 3
    ours, expected = copied(start, device), copied(start)
    ops.catch_up_rows_(*ours, steps[0], None, numbers.to(device), 4, rule, settings)
    step_by_step(case, expected, steps[1], rates, 4)
    assert torch.equal(steps[0].cpu(), steps[1])
    assert steps[1].tolist() == [0, *[23] * 23, *range(24, 30)]
    for now, wanted in zip(flat(ours), flat(expected), strict=True):
        assert same_bits(now.cpu(), wanted)


@pytest.mark.parametrize("case", REPLAYED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_in_any_order(device, case, dtype):
    rule, settings = settings_of(case)
    _, numbers = numbers_of(case, range(1, 30))
    expected = table_of(case, 40, 9, dtype)
    ours = copied(expected, device)
    own = [(torch.arange(40) % 35).int() for _ in range(2)]
    own[0] = own[0].to(device)
    rows = torch.cat([distinct_rows(17, 40), torch.tensor([-1, -(2**63)])])
    ops.catch_up_rows_(*ours, own[0], rows.to(device), numbers.to(device), 1, rule, settings)
    reference.catch_up_rows_(*expected, own[1], rows, numbers, 1, rule, settings)
    assert torch.equal(own[0].cpu(), own[1])
    for now, wanted in zip(flat(ours), flat(expected), strict=True):
        assert_close(now.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", REPLAYED)
def test_what_is_cut_off_does_not_matter(device, case, dtype):
    rule, settings = settings_of(case)
    rates, numbers = numbers_of(case, range(6, 806))
    start = table_of(case, 3, 4, dtype)
    row_step = torch.tensor([5, 0, 700], dtype=torch.int32)
    ours, expected = copied(start, device), copied(start)
    steps = row_step.clone().to(device)
    ops.catch_up_rows_(*ours, steps, None, numbers.to(device), 6, rule, settings)
    step_by_step(case, expected, row_step, rates, 6)
    for now, wanted in zip(flat(ours), flat(expected), strict=True):
        assert_close(now.cpu(), wanted)
    assert (ours[0][0].cpu() != start[0][0]).all()
    # Momentum has almost vanished; a second moment decays more slowly, but must have decayed.
    assert ours[1][0][0].abs().max() < 1e-30
    if rule == "adam":
        torch.testing.assert_close(ours[1][1].cpu(), expected[1][1], rtol=1e-3, atol=0)


def test_a_row_that_is_further_back_than_what_is_kept(device):
    # No optimizer leaves a row this late, but the op must not read before the first of `numbers`.
    rule, settings = settings_of("momentum")
    _, numbers = numbers_of("momentum", range(10, 13))
    start = table_of("momentum", 2, 4, torch.float64)
    tables = []
    for begun in (2, 9):
        row_step = torch.tensor([begun, 0], dtype=torch.int32, device=device)
        tables.append(copied(start, device))
        ops.catch_up_rows_(*tables[-1], row_step, None, numbers.to(device), 10, rule, settings)
        assert row_step.tolist() == [12, 0]
    assert same_bits(tables[0][0], tables[1][0])


@pytest.mark.parametrize("step", [2**31 - 1, 2**31 - 2, -1, -(2**31)])
def test_steps_of_rows_that_cannot_be(device, step):
    rule, settings = settings_of("exact adam")
    _, numbers = numbers_of("exact adam", range(10, 13))
    table = copied(table_of("exact adam", 2, 4, torch.float64), device)
    row_step = torch.tensor([step, 9], dtype=torch.int32, device=device)
    ops.catch_up_rows_(*table, row_step, None, numbers.to(device), 10, rule, settings)
    assert row_step.tolist() == [step if step > 0 else 12, 12]
    assert table[0].isfinite().all()


def test_no_steps_at_all(device):
    rule, settings = settings_of("exact adam")
    start = table_of("exact adam", 4, 3, torch.float32)
    table, row_step = copied(start, device), torch.ones(4, dtype=torch.int32, device=device)
    nothing = torch.empty(0, 2, dtype=torch.float64, device=device)
    ops.catch_up_rows_(*table, row_step, None, nothing, 2, rule, settings)
    assert same_bits(table[0].cpu(), start[0])
    none = torch.empty(0, dtype=torch.int64, device=device)
    ops.catch_up_rows_(*table, row_step, none, nothing, 2, rule, settings)


@pytest.mark.parametrize("case", REPLAYED)
def test_no_steps_change_nothing_of_rows_that_are_behind(device, case):
    rule, settings = settings_of(case)
    expected = table_of(case, 4, 3, torch.float32)
    start = copied(expected)
    table = copied(expected, device)
    own = [torch.tensor([0, 1, 8, 9], dtype=torch.int32) for _ in range(2)]
    own[0] = own[0].to(device)
    nothing = torch.empty(0, 2, dtype=torch.float64)
    rows = torch.tensor([3, 1, 0, -1])
    for some in (None, rows):
        some_there = None if some is None else some.to(device)
        ops.catch_up_rows_(*table, own[0], some_there, nothing.to(device), 7, rule, settings)
        reference.catch_up_rows_(
            *expected, own[1], torch.arange(4) if some is None else some, nothing, 7, rule, settings
        )
    assert own[0].tolist() == own[1].tolist() == [0, 1, 8, 9]
    for now, wanted, then in zip(flat(table), flat(expected), flat(start), strict=True):
        assert same_bits(now.cpu(), then)
        assert same_bits(wanted, then)


@pytest.mark.parametrize(("first", "count"), [(2**31 - 3, 3), (2**31 - 1, 1), (1, 0)])
def test_the_last_steps_that_there_can_be(device, first, count):
    rule, settings = settings_of("momentum")
    numbers = torch.full((count, 2), 0.1, dtype=torch.float64)
    table = copied(table_of("momentum", 2, 4, torch.float64), device)
    row_step = torch.tensor([1, 0], dtype=torch.int32, device=device)
    arguments = (*table, row_step, None, numbers.to(device), first, rule, settings)
    ops.catch_up_rows_(*arguments)
    assert row_step.tolist() == [first + count - 1 if count else 1, 0]


@pytest.mark.parametrize(
    ("first", "count", "message"),
    [
        (2**31 - 3, 4, "4 steps from 2147483645 on go beyond step"),
        (2**31 - 1, 2, "2 steps from 2147483647 on go beyond"),
        (2**31, 1, r"first_step must be in \[1, 2\^31 - 1\], got 2147483648"),
        (2**63 - 1, 1, "first_step must be in"),
    ],
)
def test_steps_beyond_what_row_step_can_have(device, first, count, message):
    rule, settings = settings_of("momentum")
    numbers = torch.full((count, 2), 0.1, dtype=torch.float64, device=device)
    table = copied(table_of("momentum", 2, 4, torch.float64), device)
    row_step = torch.tensor([1, 0], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"catch_up_rows_: {message}"):
        ops.catch_up_rows_(*table, row_step, None, numbers, first, rule, settings)
    assert row_step.tolist() == [1, 0]


def test_bits_do_not_depend_on_alignment(device):
    rule, settings = settings_of("exact adam")
    _, numbers = numbers_of("exact adam", range(2, 40))
    start = table_of("exact adam", 6, 16, torch.float32)
    plain, odd = copied(start, device), copied(start, device)
    space = torch.zeros(6, 37, device=device)
    spaced = [space[:, :16], space[:, 18:34]]
    for view, state in zip(spaced, odd[1], strict=True):
        view.copy_(state)
    for weight, states in (plain, (odd[0], spaced)):
        row_step = torch.ones(6, dtype=torch.int32, device=device)
        ops.catch_up_rows_(weight, states, row_step, None, numbers.to(device), 2, rule, settings)
    for one, other in zip(flat(plain), [odd[0], *spaced], strict=True):
        assert same_bits(one, other)


def test_a_row_out_of_range(device, backend):
    rule, settings = settings_of("momentum")
    _, numbers = numbers_of("momentum", range(2, 4))
    start = table_of("momentum", 4, 3, torch.float32)
    table, row_step = copied(start, device), torch.ones(4, dtype=torch.int32, device=device)
    rows = torch.tensor([1, 4], device=device)
    with pytest.raises(IndexError, match=r"catch_up_rows_: rows\[1\] is 4, but weight has 4 rows"):
        ops.catch_up_rows_(*table, row_step, rows, numbers.to(device), 2, rule, settings)
    kept = slice(None) if backend == "cpu" else slice(2, None)
    assert same_bits(table[0].cpu()[kept], start[0][kept])


ZEROS = torch.zeros(4, 3)
GOOD = {
    "weight": ZEROS,
    "states": [ZEROS],
    "row_step": torch.zeros(4, dtype=torch.int32),
    "rows": None,
    "numbers": torch.zeros(1, 2, dtype=torch.float64),
    "first_step": 1,
    "rule": "sgd",
    "settings": [0.1, 0.9, 0, 0],
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": ZEROS.half()}, TypeError, "weight must be float32 or float64"),
        ({"states": []}, ValueError, "rows do not move without a gradient under sgd with 0"),
        (
            {"rule": "adagrad", "settings": [0.1, 0, 0, 0, 0]},
            ValueError,
            "under adagrad with 1 states",
        ),
        ({"rule": "x"}, ValueError, "rule must be sgd, adam"),
        ({"row_step": torch.zeros(4)}, ValueError, "row_step must have dtype Int, got Float"),
        ({"rows": torch.zeros(1)}, ValueError, "rows must have dtype Long, got Float"),
        ({"rows": torch.zeros(1, 1).long()}, ValueError, "rows must have 1 dimension"),
        ({"numbers": torch.zeros(1, 2)}, ValueError, "numbers must have dtype Double, got Float"),
        ({"numbers": torch.zeros(2).double()}, ValueError, "numbers must have 2 dimension"),
        ({"numbers": torch.zeros(2, 1).double()}, ValueError, "numbers must have size 2"),
        ({"numbers": torch.zeros(1, 2).double().to("meta")}, ValueError, "numbers on meta"),
        ({"first_step": 0}, ValueError, r"first_step must be in \[1, .*, got 0"),
    ],
)
def test_what_is_refused(changes, error, message):
    with pytest.raises(error, match=f"catch_up_rows_: .*{message}"):
        ops.catch_up_rows_(**{**GOOD, **changes})


def test_bits_do_not_depend_on_threads(device):
    rule, settings = settings_of("exact adam")
    _, numbers = numbers_of("exact adam", range(2, 20))
    start = table_of("exact adam", 2000, 20, torch.float32)

    def compute():
        table = copied(start, device)
        row_step = (torch.arange(2000) % 19).int().to(device)
        ops.catch_up_rows_(*table, row_step, None, numbers.to(device), 2, rule, settings)
        return flat(table)

    assert_same_bits_for_any_threads(compute)
