"""Cases of the optimizers' ops: a step of each rule, and the catch-up of late rows."""

import torch

from sparsekit import ops
from sparsekit.ops._checks import accumulate_dtype

from ..ops.optimizer_rules import CASES, PER_ROW, SIGNED, widths
from ..reference import ops as reference
from .case import Case, Mismatch


def _table(case, name, num_rows, dim, dtype):
    """Draw a weight and states as after some steps; states are interleaved, separate or strided."""
    rule, _, count = CASES[name]
    wide = accumulate_dtype(dtype)
    weight = case.floats(num_rows, dim, dtype=dtype)
    gap = case.any_of(0, 0, 1, 4)
    columns = widths(rule, count, dim)
    space = case.floats(num_rows, sum(columns) + count * gap, dtype=wide)
    parts = space.split([width + gap for width in columns], 1) if count else []
    states = [part[:, :width] for part, width in zip(parts, columns, strict=True)]
    for k, state in enumerate(states):
        if (rule, k) not in SIGNED:
            state.square_()
    if case.maybe(0.3):
        states = [state.contiguous() for state in states]
    return weight, states


def _settings(case, name):
    """Return a rule's settings from tests/ops, with other rates and decays."""
    rule, settings, count = CASES[name]
    settings = [float(value) for value in settings]
    settings[0] *= case.any_of(0.0, 0.1, 1.0)
    if rule in (*PER_ROW, "rms_prop") and case.maybe(0.5):
        settings[1] = case.any_of(0.0, 0.5, 0.95)
    if rule == "sgd" and count and case.maybe(0.5):
        settings[1] = case.any_of(0.1, 0.5, 0.95)
    return rule, settings


def _in_double(tensors):
    return [tensor.double() for tensor in tensors]


def _check(case, weight, states, expected, before, touched, scale=1.0) -> None:
    """Check that untouched rows keep their bits, and others match up to rounding times `scale`."""
    names = ["weight", *(f"states[{k}]" for k in range(len(states)))]
    untouched = torch.ones(len(weight), dtype=torch.bool)
    untouched[touched] = False
    for name, now, wanted, then in zip(names, [weight, *states], expected, before, strict=True):
        case.same(f"{name} of untouched rows", now[untouched], then[untouched])
        both = torch.stack([wanted.abs(), then.double().abs()])
        largest = both.amax((0, 2), keepdim=True)[0] if now.numel() else 0.0
        case.close(name, now, wanted, scale * (largest + 1e-2), 32)


def update_rows(case: Case) -> None:
    """Check update_rows_ on one table, or on several tables in one call."""
    name, dtype = case.any_of(*CASES), case.row_dtype()
    rule, settings = _settings(case, name)
    count, by_row, counts = case.any_of(0, 0, 1, 2, 3, 40), case.maybe(0.8), case.maybe(0.5)
    row_steps = case.maybe(0.5)
    per_row = row_steps and rule in PER_ROW and case.maybe(0.5)
    seed = case.random.getrandbits(64) if case.maybe(0.3) else None
    tables = [
        _update_of_table(case, name, dtype, by_row, row_steps, count > 1)
        for _ in range(max(count, 1))
    ]
    case.note(case=name, tables=count, settings=settings)
    before = [
        (
            [tensor.clone() for tensor in (weight, *states)],
            None if row_step is None else row_step.clone(),
            step.clone(),
        )
        for weight, states, row_step, _, _, step in tables
    ]
    weights, all_states, own_steps, all_rows, grads, steps = map(list, zip(*tables, strict=True))
    states = [state for of_table in all_states for state in of_table]
    own_steps, all_rows = own_steps if row_steps else None, all_rows if by_row else None
    lists = weights, states, own_steps, all_rows, grads, steps
    keywords = {"per_row": per_row, "rounding_seed": seed, "count_steps": counts}
    case.call(
        ops.update_rows_, *(lists if count else tables[0]), rule, settings,
        changes=[weights, states, own_steps, steps if counts else None], **keywords,
    )  # fmt: skip
    for table, then in zip(tables, before, strict=True):
        _check_update(case, table, then, rule, settings, keywords)


def _update_of_table(case: Case, name, dtype, by_row, row_steps, small):
    """Draw a table's arguments: weight, states, row_step, rows, grad and step."""
    num_rows = case.size(60 if small else case.most(2000, 600))
    dim = case.dim(num_rows)
    weight, states = _table(case, name, num_rows, dim, dtype)
    rows = None
    if by_row:
        touched = case.random.randint(0, num_rows)
        rows = case.placed(torch.randperm(num_rows, generator=case.generator)[:touched])
    n = num_rows if rows is None else len(rows)
    grad = case.placed(case.floats(n, dim, dtype=dtype) * case.any_of(1, 1, 0, 1e-3))
    step = torch.tensor(case.any_of(1, 2, 10, 1000, 2**31 - 2)).view(case.any_of((), (1,)))
    row_step = case.integers(0, 50, num_rows, torch.int32) if row_steps else None
    return weight, states, row_step, rows, grad, step


def _check_update(case: Case, table, before, rule, settings, keywords) -> None:
    weight, states, row_step, rows, grad, step = table
    then, row_step_before, step_before = before
    double_weight, *double_states = expected = _in_double(then)
    own = None if row_step is None else row_step_before.clone()
    counted = step_before.clone()
    reference.update_rows_(
        double_weight, double_states, own, rows, grad.double(), counted, rule, settings,
        **(keywords | {"rounding_seed": None}),
    )  # fmt: skip
    touched = slice(None) if rows is None else rows
    # Ftrl's z contains the weight times (sqrt(n') - sqrt(n)) / lr: a small lr magnifies rounding.
    scale = 2 / settings[0] if rule == "ftrl" and settings[0] else 1.0
    _check(case, weight, states, expected, then, touched, scale)
    case.same("step", step, counted)
    if row_step is not None:
        case.same("row_step", row_step, own)
    if keywords["rounding_seed"] is not None and weight.dtype == torch.bfloat16:
        rounded, *rounded_states = then
        reference.update_rows_(
            rounded, rounded_states, row_step_before, rows, grad, step_before, rule, settings,
            **keywords,
        )  # fmt: skip
        # A different last bit in float32 may change the rounding of one value in thousands.
        differ = int((weight != rounded).sum())
        if differ > 2 + weight.numel() // 100:
            raise Mismatch(f"{differ} of {weight.numel()} weights are rounded another way")


def catch_up_rows(case: Case) -> None:
    name = case.any_of("momentum", "nesterov", "lazy adam", "exact adam")
    dtype = case.any_of(torch.float32, torch.float64)  # bfloat16 rounds after every step
    num_rows = case.size(60)
    dim = case.dim(num_rows)
    rule, settings = _settings(case, name)
    settings[2 if rule == "sgd" else 4] = 0.0
    weight, states = _table(case, name, num_rows, dim, dtype)
    first_step = case.any_of(1, 5, 100)
    count = case.random.randint(0, 30)
    numbers = torch.rand(count, 2, generator=case.generator, dtype=torch.float64) * 0.1 + 1e-3
    row_step = case.integers(0, first_step + count, num_rows, torch.int32)
    rows = None
    if case.maybe(0.7):
        rows = torch.randperm(num_rows, generator=case.generator)
        rows = rows[: case.random.randint(0, num_rows)]
        rows = case.placed(torch.where(case.integers(0, 4, len(rows)) == 0, -1 - rows, rows))
    own, before = row_step.clone(), [weight.clone(), *(state.clone() for state in states)]
    case.note(case=name)
    case.call(
        ops.catch_up_rows_, weight, states, row_step, rows, numbers, first_step, rule, settings,
        changes=[weight, *states, row_step],
    )  # fmt: skip
    double_weight, *double_states = expected = _in_double(before)
    reference.catch_up_rows_(
        double_weight, double_states, own, rows, numbers, first_step, rule, settings
    )
    touched = slice(None) if rows is None else rows[rows >= 0]
    _check(case, weight, states, expected, before, touched)
    case.same("row_step", row_step, own)


OPS = {"update_rows": update_rows, "catch_up_rows": catch_up_rows}
