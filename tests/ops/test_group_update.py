"""sparsekit.ops.group_embedding_bag_update_ equals the two ops that it combines."""

import contextlib
import random
from dataclasses import dataclass

import pytest
import torch
from conftest import ROW_DTYPES, assert_close, assert_same_bits_for_any_threads, same_bits
from reference import groups as reference_group

from sparsekit import ops
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops._group import split_by_table

from .group_bags import backward, random_grads
from .groups import Group, Source, random_bags, random_group
from .optimizer_rules import CASES, PER_ROW, copied, table_of

COMBINERS = ("sum", "mean", "none", "sqrtn")
DIMS = (16, 1, 3, 64, 8, 0, 20)


def mixed_group(count, dtype, device, keys=40, others=40, weighted=False):
    """Return tables of several dims; every fifth table gets no keys, and every tenth no feature.

    keys: number of keys of the first table.
    """
    dims = [DIMS[t % len(DIMS)] for t in range(count)]
    hashed = [t % 3 != 1 for t in range(count)]
    group = Group(
        dtype, dims, [max(keys, 90)] + [max(others, 90)] * (count - 1), hashed, [1] * count, device
    )
    for t in range(count):
        n = 0 if t % 5 == 4 else keys if t == 0 else others
        combiner = COMBINERS[t % 4]
        bags = n if combiner == "none" else n // 3 + 1
        of_keys = torch.arange(n) * 7919 % max(n * 2 // 3, 1)
        weights = torch.rand(n if weighted and t % 2 == 0 else 0, dtype=accumulate_dtype(dtype))
        offsets = torch.arange(n + 1)
        if combiner != "none":
            offsets = random_bags(random.Random(t), n, bags)
        group.sources.append(Source(of_keys, offsets, weights + 0.5))
        if t % 10 != 9:
            group.ask(t, t, 0, bags, combiner)
    return group


@dataclass
class Tables:
    """All tensors that a step changes, with the rule and its settings."""

    weights: list[torch.Tensor]
    states: list[torch.Tensor]
    row_steps: list[torch.Tensor]
    steps: list[torch.Tensor]
    rule: str
    settings: list[float]

    @property
    def changed(self):
        return [*self.weights, *self.states, *self.row_steps, *self.steps]

    @property
    def lists(self):
        return self.weights, self.states, self.row_steps, self.steps

    def rows_and(self, rows, grads):
        """Return the arguments in the order that update_rows_ expects."""
        return self.weights, self.states, self.row_steps, rows, grads, self.steps


def tables_of(group, case, own_steps=False, device=None):
    """Return new tables with the same values in every call."""
    device = group.device if device is None else device
    rule, settings, _ = CASES[case]
    states, row_steps, steps = [], [], []
    for t, weight in enumerate(group.weights):
        start = table_of(case, *weight.shape, group.dtype)
        states += copied(start, device, together=t % 2 == 1)[1]
        if own_steps:
            row_steps.append((torch.arange(len(weight)) % 5).int().to(device))
        steps.append(torch.tensor((1, 2, 7, 1000)[t % 4], device=device))
    weights = [weight.to(device, copy=True) for weight in group.weights]
    return Tables(weights, states, row_steps, steps, rule, settings)


def update(group, grads, found, tables, divisor=1, op=ops.group_embedding_bag_update_, **keywords):
    rows, inverse, counts, bags, key_starts = found
    asked = bags, group.asked[2], group.sample_weights, key_starts
    op(
        grads, inverse, rows, counts, *asked, *tables.lists, tables.rule, tables.settings, divisor,
        **keywords,
    )  # fmt: skip


def check(group, case, divisor=1, own_steps=False, reference=False, found=None, **keywords):
    found, grads = found or group.find_or_insert(), random_grads(group)
    one, other = (tables_of(group, case, own_steps) for _ in range(2))
    update(group, grads, found, one, divisor, **keywords)
    if grads:
        sums = backward(group, grads, found, divisor=divisor)
        rows_and_sums = split_by_table(group.dims, found[2].tolist(), *sums)
    else:
        rows_and_sums = (
            [torch.empty(0, dtype=torch.int64, device=group.device) for _ in group.dims],
            [torch.empty(0, dim, dtype=group.dtype, device=group.device) for dim in group.dims],
        )
    ops.update_rows_(*other.rows_and(*rows_and_sums), other.rule, other.settings, **keywords)
    for now, expected in zip(one.changed, other.changed, strict=True):
        assert same_bits(now, expected)
    if reference:
        wanted = tables_of(group, case, own_steps, device="cpu")
        update_reference(group, grads, found, wanted, divisor, **keywords)
        for now, expected in zip(one.changed, wanted.changed, strict=True):
            if now.is_floating_point():
                assert_close(now.cpu(), expected)
            else:
                assert torch.equal(now.cpu(), expected)
    return one


def update_reference(group, grads, found, tables, divisor, **keywords):
    rows, inverse, counts, bags, key_starts = (tensor.cpu() for tensor in found)
    weights = [tensor.cpu() for tensor in group.sample_weights]
    reference_group.group_embedding_bag_update_(
        [grad.cpu() for grad in grads], inverse, rows, counts, bags, group.asked[2], weights,
        key_starts, *tables.lists, tables.rule, tables.settings, divisor, **keywords,
    )  # fmt: skip


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_two_ops(device, case, dtype):
    exact = dtype == torch.float64
    for count in (1, 3, 9):
        group = mixed_group(count, dtype, device)
        assert check(group, case, reference=exact).steps[0] == 1
        counted = check(group, case, 3, own_steps=True, reference=exact, count_steps=True)
        assert [int(step) for step in counted.steps[:3]] == [2, 3, 8][:count]
        if CASES[case][0] in PER_ROW:
            check(group, case, own_steps=True, reference=exact, per_row=True)
        if dtype == torch.bfloat16:
            check(group, case, rounding_seed=2**63 + 5)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_any_number_of_tables(device, count, dtype):
    for weighted in (False, True):
        group = mixed_group(count, dtype, device, weighted=weighted)
        before = [weight.clone() for weight in group.weights]
        tables = check(group, "lazy adam", 2, count_steps=True)
        moved = [not same_bits(now, then) for now, then in zip(tables.weights, before, strict=True)]
        assert moved == [t % 5 != 4 and dim > 0 for t, dim in enumerate(group.dims)]
        # Tables without keys count a step, too.
        assert [int(step) for step in tables.steps] == [
            (2, 3, 8, 1001)[t % 4] for t in range(count)
        ]


# Number of entries of each row of a table. On a device, a chunk has 64 entries of a table.
LENGTHS = (
    [64],
    [65],
    [63, 1, 64],
    [64, 64, 64],
    [1, 128, 1],
    [0, 0, 70, 0, 58, 0],
    [0] * 70,
    [1] * 129,
    [3, 5000, 2, 0, 200],
)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["lazy adam", "row-wise adagrad"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_rows_of_any_number_of_entries(device, lengths, case, dtype):
    """Rows may have any number of entries, even after another table and with wide vectors."""
    dims = [8, 16, 7, 1, 520, 301]
    group = Group(dtype, dims, [200] * len(dims), [True] * len(dims), [1] * len(dims), device)
    without = []
    for t in range(len(dims)):
        own = torch.tensor([2, 0, 3] if t == 0 else lengths)
        keys = torch.arange(len(own)).repeat_interleave(own.clamp(min=1))
        keys = keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(t))]
        without.append(own[keys] == 0)
        offsets = random_bags(random.Random(t), len(keys), len(keys) // 2 + 1)
        group.sources.append(Source(keys, offsets, torch.empty(0)))
        group.ask(t, t, 0, len(offsets) - 1, COMBINERS[t % 2])
    rows, inverse, *others = group.find_or_insert()
    inverse[torch.cat(without).to(device)] = -1
    check(group, case, 3, found=(rows, inverse, *others))


@pytest.mark.parametrize("seed", range(20))
def test_random_groups(device, seed):
    group = random_group(seed, torch.float64, device)
    check(group, "exact adam", 1 + seed % 3, reference=bool(group.features))


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("case", ["lazy adam", "row-wise adagrad"])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_large_table_beside_small_ones(device, backend, threads, case):
    keys = 20_000 if backend == "cpu" else 6_000
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            check(mixed_group(9, dtype, device, keys=keys, weighted=True), case, 2)
    finally:
        torch.set_num_threads(1)


def test_tables_that_threads_do_alone():
    """With enough small tables, each thread updates whole tables."""
    group = mixed_group(40, torch.float32, "cpu", keys=3000, others=3000)
    try:
        for threads in (2, 4, 4):
            torch.set_num_threads(threads)
            check(group, "lazy adam")
    finally:
        torch.set_num_threads(1)


def test_same_bits_for_any_threads(device):
    group = mixed_group(40, torch.float32, device, keys=20_000)
    found, grads = group.find_or_insert(), random_grads(group)

    def compute():
        tables = tables_of(group, "exact adam")
        update(group, grads, found, tables, count_steps=True)
        return tables.changed

    assert_same_bits_for_any_threads(compute)


def test_gradients_that_are_not_contiguous(device):
    group = mixed_group(1, torch.float32, device)
    found, (grad,) = group.find_or_insert(), random_grads(group)
    one, other = (tables_of(group, "momentum") for _ in range(2))
    update(group, [grad], found, one)
    apart = torch.stack([grad, grad * 0], 1)[:, 0]
    assert not apart.is_contiguous()
    update(group, [apart], found, other)
    assert all(map(same_bits, one.changed, other.changed))


def test_a_backward_that_needs_the_old_weight_notices(device):
    group = mixed_group(1, torch.float32, device)
    found, grads = group.find_or_insert(), random_grads(group)
    tables = tables_of(group, "momentum")
    weight = tables.weights[0].requires_grad_()
    loss = (weight**2).sum()
    with torch.no_grad():
        update(group, grads, found, tables)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def refused(error, message, group, found, tables, grads=None, changed=False, **keywords):
    """Check that the call raises and changes nothing, or with `changed` only weights and states."""
    grads = random_grads(group) if grads is None else grads
    before = [tensor.clone() for tensor in tables.changed]
    with pytest.raises(error, match=f"^group_embedding_bag_update_: {message}"):
        update(group, grads, found, tables, count_steps=True, **keywords)
    kept = len(tables.weights) + len(tables.states) if changed else 0
    for now, then in list(zip(tables.changed, before, strict=True))[kept:]:
        assert same_bits(now, then)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", [26, 2**31 - 1])
def test_numbers_that_are_refused(device, bad, threads):
    group = mixed_group(3, torch.float32, device, keys=5000)
    found, tables = group.find_or_insert(), tables_of(group, "lazy adam")
    assert found[2][1] == 26
    torch.set_num_threads(threads)
    try:
        for entry in (5000, 5039):
            inverse = found[1].clone()
            inverse[entry] = bad
            of_table_1 = found[0], inverse, *found[2:]
            refused(IndexError, rf"index\[{entry}\] is", group, of_table_1, tables)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("bad", [-1, -2, 90, 2**31 - 1])
def test_rows_that_are_refused(device, backend, bad):
    if bad == -1 and backend != "cpu":
        pytest.skip("there the lookup has reported a key without a row")
    group = mixed_group(3, torch.float32, device)
    found, tables = group.find_or_insert(), tables_of(group, "lazy adam")
    found[0][82] = bad
    on_device = backend != "cpu"
    message = rf"one of rows is {bad}, " if on_device else rf"rows\[82\] is {bad}, "
    message += "which is no row of table 2"
    refused(IndexError, message, group, found, tables, changed=on_device)


def test_a_device_leaves_out_a_key_without_a_row(device, backend):
    if backend == "cpu":
        pytest.skip("the lookup raises its error before the update")
    group = mixed_group(3, torch.float32, device)
    found, tables = group.find_or_insert(), tables_of(group, "lazy adam")
    expected = tables_of(group, "lazy adam")
    update(group, random_grads(group), found, expected)
    row, found[0][82] = int(found[0][82]), -1
    expected.weights[2][row] = tables.weights[2][row]
    update(group, random_grads(group), found, tables)
    for now, then in zip(tables.weights, expected.weights, strict=True):
        assert same_bits(now, then)


def test_a_negative_number_gets_no_gradient(device):
    group = mixed_group(3, torch.float32, device)
    found = group.find_or_insert()
    found[1][45:60] = -1
    check(group, "momentum", found=found)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("bad", [-1, 119, 121, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("bag", [0, 5, 14, 28, 42])
def test_bags_that_are_refused(device, backend, bag, bad):
    group = mixed_group(3, torch.float32, device)
    found, tables = group.find_or_insert(), tables_of(group, "lazy adam")
    found[3][bag] = bad
    if backend == "cpu":
        refused(ValueError, "bags must|bag ", group, found, tables)
        return
    # A device skips invalid bags, and may then find an index without a row and raise an IndexError.
    with contextlib.suppress(IndexError):
        update(group, random_grads(group), found, tables)
    for weight in tables.weights:
        assert weight.isfinite().all()


def of(name, change):
    """Return a function that changes one of a step's lists of tensors."""

    def apply(group, tables):
        setattr(tables, name, change(getattr(tables, name)))
        return {}

    return apply


WRONG = {
    "no weight": (of("weights", lambda w: []), ValueError, "there is no weight"),
    "states": (of("states", lambda s: s[1:]), ValueError, "states must have equally many"),
    "a state": (
        of("states", lambda s: [*s[:-1], s[-1][1:]]),
        ValueError,
        r"table 2: states\[1\] must have size 90",
    ),
    "states of one": (of("states", lambda s: s[:3]), ValueError, "adam cannot have 1 states"),
    "row_steps": (of("row_steps", lambda s: s[1:]), ValueError, "row_steps must have 3 tensors"),
    "steps": (of("steps", lambda s: s[1:]), ValueError, "steps must have 3 tensors"),
    "step": (
        of("steps", lambda s: [*s[:-1], s[-1] * 0 - 1]),
        ValueError,
        "table 2: step must be one number >= 0",
    ),
    "step as a float": (
        of("steps", lambda s: [*s[:-1], s[-1].float()]),
        ValueError,
        "table 2: step must have dtype Long",
    ),
    "a weight": (
        of("weights", lambda w: [*w[:-1], w[-1][0]]),
        ValueError,
        r"weights\[2\] must have 2 dimension",
    ),
    "dtype": (
        of("weights", lambda w: [v.double() for v in w]),
        ValueError,
        r"grads\[0\] must have dtype Double, got Float",
    ),
    "dtypes": (
        of("weights", lambda w: [*w[:-1], w[-1].double()]),
        ValueError,
        "table 2: weight must have dtype Float, got Double",
    ),
    "half": (
        of("weights", lambda w: [v.half() for v in w]),
        TypeError,
        r"weights\[0\] must be float32 or float64 or bfloat16",
    ),
    "meta": (
        of("states", lambda s: [*s[:-1], s[-1].to("meta")]),
        ValueError,
        "all tensors must be on one device",
    ),
    "rule": (of("rule", lambda r: "adamw"), ValueError, "rule must be sgd, adam"),
    "settings": (of("settings", lambda s: s[1:]), ValueError, "settings of adam must be 6"),
    "divisor": (lambda g, t: {"divisor": 0}, ValueError, "divisor must be at least 1, got 0"),
    "capacity": (
        of("weights", lambda w: [*w[:-1], w[-1][:9]]),
        IndexError,
        r"rows\[\d+\] is \d+, which is no row of table 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    apply, error, message = WRONG[name]
    group = mixed_group(3, torch.float32, "cpu")
    found, tables = group.find_or_insert(), tables_of(group, "lazy adam", own_steps=True)
    if name == "capacity":
        tables.states = [*tables.states[:4], *(state[:9] for state in tables.states[4:])]
        tables.row_steps[-1] = tables.row_steps[-1][:9]
    keywords = apply(group, tables)
    kept = [tensor for tensor in tables.changed if tensor.device.type != "meta"]
    before = [tensor.clone() for tensor in kept]
    with pytest.raises(error, match=f"^group_embedding_bag_update_: {message}"):
        update(group, random_grads(group), found, tables, count_steps=True, **keywords)
    assert all(map(same_bits, kept, before))


def test_rows_that_cannot_count_their_steps():
    group = mixed_group(3, torch.float32, "cpu")
    found = group.find_or_insert()
    for case, own_steps, message in (
        ("lazy adam", False, "per_row needs row_steps"),
        ("adagrad", True, "rows cannot count their own steps under adagrad"),
    ):
        tables = tables_of(group, case, own_steps)
        refused(ValueError, message, group, found, tables, per_row=True)


def test_what_is_written_shares_no_memory(device):
    group = mixed_group(3, torch.float32, device)
    found, tables = group.find_or_insert(), tables_of(group, "lazy adam", own_steps=True)
    grads = random_grads(group)
    elements = grads[0].numel()

    def refuse(message, **changes):
        keywords = {"grads": grads, "found": found} | changes
        refused(ValueError, message, group, tables=tables, **keywords)

    of_weight = tables.weights[0].view(-1)[:elements]
    refuse(r"weight of table 0 overlaps grads\[0\] in memory", grads=[of_weight, *grads[1:]])
    of_state = tables.states[5].view(torch.int32).view(-1)[: len(found[1])]
    refuse(
        r"states\[1\] of table 2 overlaps index in memory",
        found=(found[0], of_state.zero_(), *found[2:]),
    )
    own, tables.row_steps[1] = tables.row_steps[1], found[0][:90]
    refuse("row_step of table 1 overlaps rows in memory")
    tables.row_steps[1] = own
    tables.steps[1] = tables.steps[0]
    refuse("step of table 1 overlaps step of table 0 in memory")
    tables.steps[1] = found[4][2]
    refuse("step of table 1 overlaps key_starts in memory")
