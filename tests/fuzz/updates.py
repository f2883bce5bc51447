"""The optimizers' ops: a step of every rule, and the steps that rows have missed."""

import torch

from sparsekit import ops, reference
from sparsekit.ops._checks import accumulate_dtype

from ..ops.optimizer_rules import CASES
from .case import Case, Mismatch


def _table(case, name, num_rows, dim, dtype):
    """A weight and states as after some steps, the states together, apart or with gaps."""
    rule, _, count = CASES[name]
    wide = accumulate_dtype(dtype)
    width = 1 if rule == "row_wise_adagrad" else dim
    weight = case.floats(num_rows, dim, dtype=dtype)
    gap = case.any_of(0, 0, 1, 4)
    space = case.floats(num_rows, count, width + gap, dtype=wide)
    states = [state[:, :width] for state in space.unbind(1)] if count else []
    for k, state in enumerate(states):
        if (rule, k) not in (("sgd", 0), ("adam", 0), ("rms_prop", 1), ("ftrl", 1)):
            state.square_()
    if case.maybe(0.3):
        states = [state.contiguous() for state in states]
    return weight, states


def _settings(case, name):
    """Those of the suites, with other rates and other decays."""
    rule, settings, count = CASES[name]
    settings = [float(value) for value in settings]
    settings[0] *= case.any_of(0.0, 0.1, 1.0)
    if rule in ("adam", "rms_prop") and case.maybe(0.5):
        settings[1] = case.any_of(0.0, 0.5, 0.95)
    if rule == "sgd" and count and case.maybe(0.5):
        settings[1] = case.any_of(0.1, 0.5, 0.95)
    return rule, settings


def _in_double(tensors):
    return [tensor.double() for tensor in tensors]


def _check(case, weight, states, expected, before, touched, scale=1.0) -> None:
    """Rows that were not touched keep their bits; magnitudes are those of a row, times scale."""
    names = ["weight", *(f"states[{k}]" for k in range(len(states)))]
    untouched = torch.ones(len(weight), dtype=torch.bool)
    untouched[touched] = False
    for name, now, wanted, then in zip(names, [weight, *states], expected, before, strict=True):
        case.same(f"{name} of untouched rows", now[untouched], then[untouched])
        both = torch.stack([wanted.abs(), then.double().abs()])
        largest = both.amax((0, 2), keepdim=True)[0] if now.numel() else 0.0
        case.close(name, now, wanted, scale * (largest + 1e-2), 32)


def update_rows(case: Case) -> None:
    name, dtype = case.any_of(*CASES), case.row_dtype()
    num_rows = case.size(case.most(2000, 600))
    dim = case.dim(num_rows)
    rule, settings = _settings(case, name)
    weight, states = _table(case, name, num_rows, dim, dtype)
    case.note(case=name, weight=weight, states=states, settings=settings)
    rows = None
    if case.maybe(0.8):
        touched = case.random.randint(0, num_rows)
        rows = case.placed(torch.randperm(num_rows, generator=case.generator)[:touched])
    n = num_rows if rows is None else len(rows)
    grad = case.placed(case.floats(n, dim, dtype=dtype) * case.any_of(1, 1, 0, 1e-3))
    step = torch.tensor(case.any_of(1, 2, 10, 1000, 2**31 - 2)).view(case.any_of((), (1,)))
    row_step = own = None
    if case.maybe(0.5):
        row_step = case.integers(0, 50, num_rows, torch.int32)
        own, own_before = row_step.clone(), row_step.clone()
    per_row = row_step is not None and rule == "adam" and case.maybe(0.5)
    seed = case.random.getrandbits(64) if case.maybe(0.3) else None
    before = [weight.clone(), *(state.clone() for state in states)]
    changes = [weight, *states, *([] if row_step is None else [row_step])]
    keywords = {"per_row": per_row, "rounding_seed": seed}
    case.call(
        ops.update_rows_, weight, states, row_step, rows, grad, step, rule, settings,
        changes=changes, **keywords,
    )  # fmt: skip
    double_weight, *double_states = expected = _in_double(before)
    reference.update_rows_(
        double_weight, double_states, own, rows, grad.double(), step, rule, settings,
        per_row=per_row,
    )  # fmt: skip
    touched = slice(None) if rows is None else rows
    # Ftrl works a weight out from z and n, which has it times (sqrt(n') - sqrt(n)) / lr.
    scale = 2 / settings[0] if rule == "ftrl" and settings[0] else 1.0
    _check(case, weight, states, expected, before, touched, scale)
    if row_step is not None:
        case.same("row_step", row_step, own)
    if seed is not None and dtype == torch.bfloat16:
        then = before[0], before[1:], None if row_step is None else own_before
        reference.update_rows_(*then, rows, grad, step, rule, settings, **keywords)
        # The last bit of the float32 value may turn the rounding of one in thousands.
        differ = int((weight != before[0]).sum())
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
