"""sparsekit.ops.update_rows_ of several tables equals separate calls, or changes nothing."""

import pytest
import torch
from conftest import ROW_DTYPES, assert_same_bits_for_any_threads, misaligned, randn, same_bits
from reference import ops as reference
from simt_counts import counted

from sparsekit import ops

from .optimizer_rules import CASES, PER_ROW, copied, distinct_rows, table_of

# Rows, dim and touched rows of the tables of a call; some tables are empty.
SIZES = [(50, 16, 20), (9, 3, 0), (400, 128, 300), (1, 1, 1), (0, 8, 0), (30, 300, 30), (20, 0, 7),
         (60, 100, 60), (40, 16, 1)]  # fmt: skip
STEPS = [1, 2, 7, 1000]


class Call:
    """Arguments of a call of update_rows_ with several tables."""

    def __init__(self, case, dtype, device, sizes=SIZES, own_steps=False, all_rows=False):
        self.rule, self.settings, _ = CASES[case]
        tables = [
            copied(table_of(case, num_rows, dim, dtype), device, together=i % 2 == 0)
            for i, (num_rows, dim, _) in enumerate(sizes)
        ]
        self.weights = [weight for weight, _ in tables]
        self.each = len(tables[0][1])
        self.states = [state for _, states in tables for state in states]
        self.row_steps = []
        if own_steps:
            for i, (n, *_) in enumerate(sizes):
                self.row_steps.append(torch.arange(n, dtype=torch.int32, device=device) % (i + 2))
        self.rows = []
        if not all_rows:
            self.rows = [distinct_rows(n, of, seed=n).to(device) for of, _, n in sizes]
        counts = [of if all_rows else n for of, _, n in sizes]
        self.grads = [
            randn(n, dim, dtype=dtype, seed=i).to(device)
            for i, (n, (_, dim, _)) in enumerate(zip(counts, sizes, strict=True))
        ]
        self.steps = [torch.tensor(STEPS[i % 4], device=device) for i in range(len(sizes))]

    def changed(self):
        """Return all tensors that a call may change."""
        return [*self.weights, *self.states, *self.row_steps, *self.steps]

    def arguments(self):
        return (
            self.weights, self.states, self.row_steps, self.rows, self.grads, self.steps,
            self.rule, self.settings,
        )  # fmt: skip

    def together(self, update=ops.update_rows_, **keywords):
        update(*self.arguments(), **keywords)

    def one_by_one(self, **keywords):
        for i, weight in enumerate(self.weights):
            states = self.states[i * self.each : (i + 1) * self.each]
            row_step = self.row_steps[i] if self.row_steps else None
            rows = self.rows[i] if self.rows else None
            ops.update_rows_(
                weight, states, row_step, rows, self.grads[i], self.steps[i], self.rule,
                self.settings, **keywords,
            )  # fmt: skip


def check(case, dtype, device, keywords=None, **options):
    one, other = (Call(case, dtype, device, **options) for _ in range(2))
    before = [tensor.clone() for tensor in one.weights]
    one.together(**(keywords or {}))
    other.one_by_one(**(keywords or {}))
    for now, expected in zip(one.changed(), other.changed(), strict=True):
        assert same_bits(now, expected)
    assert not all(same_bits(now, then) for now, then in zip(one.weights, before, strict=True))


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_a_call_for_each(device, case, dtype):
    check(case, dtype, device)
    check(case, dtype, device, {"count_steps": True}, own_steps=True)
    check(case, dtype, device, all_rows=True)
    if CASES[case][0] in PER_ROW:
        check(case, dtype, device, {"per_row": True}, own_steps=True)
    if dtype == torch.bfloat16:
        check(case, dtype, device, {"rounding_seed": 2**63 + 5, "count_steps": True})


@pytest.mark.parametrize("count", [29, 30, 31, 80])
def test_any_number_of_tables(device, count):
    """On a device, the descriptors of up to 30 tables are launch arguments; more are copied."""
    sizes = [(5 + i % 7, (1, 4, 6, 16)[i % 4], i % 4) for i in range(count)]
    for _ in range(2):
        check("lazy adam", torch.float32, device, {"count_steps": True}, sizes=sizes)


def test_more_tables_than_a_launch_takes(device):
    check("momentum", torch.float32, device, {"count_steps": True}, sizes=[(3, 4, 2)] * 800)


@pytest.mark.parametrize("count", [1, 26, 500])
def test_launches_do_not_depend_on_the_number_of_tables(count):
    """One launch updates the rows and one counts the steps."""
    call = Call("lazy adam", torch.float32, "cpu", sizes=[(3, 4, 2)] * count)
    # The descriptors are copied once, 32 KB per launch; later steps reuse them on the device.
    for copies in (2 if count > 30 else 0, 0):
        with counted() as counts:
            call.together(count_steps=True)
        count_of_op = counts.sum("update_rows_")
        assert count_of_op.kernels == count_of_op.launches == 2 + copies
        assert count_of_op.waits == 0


def test_equals_the_reference(device):
    call, expected = (Call("lazy adam", torch.float64, place) for place in (device, "cpu"))
    call.together(count_steps=True)
    expected.together(reference.update_rows_, count_steps=True)
    for now, wanted in zip(call.changed(), expected.changed(), strict=True):
        torch.testing.assert_close(now.cpu(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_tables_of_which_some_are_not_aligned(device, dtype):
    """Results are the same if some tables are not aligned and need narrower accesses."""
    results = []
    for odd in (False, True):
        call = Call("lazy adam", dtype, device, sizes=[(30, 16, 9)] * 5)
        if odd:
            call.weights[1], call.grads[3] = misaligned(call.weights[1]), misaligned(call.grads[3])
            call.states[8] = misaligned(call.states[8])
        call.together()
        results.append(call.changed())
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


def test_bits_do_not_depend_on_threads(device):
    sizes = [(3000, 17, 2500), (5, 3, 2), (900, 64, 900), (700, 1, 650), (2, 100, 2)]

    def compute():
        call = Call("lazy adam", torch.float32, device, sizes=sizes)
        call.together()
        return call.changed()

    assert_same_bits_for_any_threads(compute)


def test_tables_may_share_what_is_only_read(device):
    one, other = (Call("sgd", torch.float32, device, sizes=[(6, 4, 3)] * 40) for _ in range(2))
    one.rows, one.grads, one.steps = ([own[0]] * 40 for own in (one.rows, one.grads, one.steps))
    other.rows, other.grads, other.steps = (
        [own[0].clone() for _ in range(40)] for own in (one.rows, one.grads, one.steps)
    )
    one.together()
    other.together()
    for now, expected in zip(one.weights, other.weights, strict=True):
        assert same_bits(now, expected)


BAD = {
    "weights": (lambda w: w.double(), ValueError, "weight must have dtype Float, got Double"),
    "weights, dim": (lambda w: w[0], ValueError, r"weight must have 2 dimension"),
    "states": (lambda s: s[:-1], ValueError, r"states\[0\] must have size 400"),
    "states, dtype": (lambda s: s.double(), ValueError, r"states\[0\] must have dtype Float"),
    "row_steps": (lambda s: s.long(), ValueError, "row_step must have dtype Int"),
    "rows": (lambda r: r[1:], ValueError, "rows must have size 300"),
    "grads": (lambda g: g[:, 1:], ValueError, "grad must have size 128 in dimension 1, got 127"),
    "steps": (lambda s: s.float(), ValueError, "step must have dtype Long"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_refusal_names_the_table_and_changes_nothing(device, what):
    change, error, message = BAD[what]
    call = Call("lazy adam", torch.float32, device, own_steps=True)
    list_ = getattr(call, what.split(",")[0])
    before = [tensor.clone() for tensor in call.changed()]
    at = 2 * (call.each if list_ is call.states else 1)
    kept, list_[at] = list_[at], change(list_[at])
    with pytest.raises(error, match=f"^update_rows_: table 2: {message}"):
        call.together()
    list_[at] = kept
    for now, then in zip(call.changed(), before, strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize("bad", [-1, 400, 2**40])
def test_a_row_out_of_range(device, backend, bad):
    call = Call("lazy adam", torch.float32, device)
    before = [tensor.clone() for tensor in call.changed()]
    call.rows[2][-1] = bad
    with pytest.raises(IndexError, match=rf"table 2: rows\[299\] is {bad}, .* has 400 rows"):
        call.together(count_steps=True)
    if backend != "cpu":  # a device has updated the other rows, but counted no step
        assert [step.item() for step in call.steps] == [step.item() for step in before[-9:]]
        return
    for now, then in zip(call.changed(), before, strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": []}, "there is no weight"),
        ({"states": lambda s: s[1:]}, "states must have equally many tensors .* 9 weights, got 17"),
        ({"row_steps": lambda s: s[1:]}, "row_steps must have 9 tensors or none, got 8"),
        ({"rows": lambda r: [*r, r[0]]}, "rows must have 9 tensors or none, got 10"),
        ({"grads": lambda g: g[:1]}, "grads must have 9 tensors, one for each weight, got 1"),
        ({"steps": lambda s: s[:0]}, "steps must have 9 tensors, one for each weight, got 0"),
        ({"rows": lambda r: []}, "table 0: grad must have size 50 in dimension 0, got 20"),
    ],
)
def test_lists_of_other_lengths(changes, message):
    call = Call("lazy adam", torch.float32, "cpu", own_steps=True)
    for name, change in changes.items():
        setattr(call, name, change(getattr(call, name)) if callable(change) else change)
    with pytest.raises(ValueError, match=f"^update_rows_: {message}"):
        call.together()
