"""sparsekit.ops.group_embedding_bag_ and its backward, against the reference and the single ops."""

import contextlib
import random

import pytest
import simt
import torch
from conftest import (
    ROW_DTYPES,
    TOLERANCE,
    assert_same_bits_for_any_threads,
    deterministic,
    misaligned,
    randn,
    same_bits,
)
from simt_counts import counted

from sparsekit import ops, reference_group
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops._group import FEATURE_COLUMNS, split_by_table

from .groups import NO_LIMIT, Group, Source, random_group

SEEDS = range(20)


def more(group, first_keys, initial):
    """What pooling may take besides."""
    arguments = {"sample_weights": group.sample_weights, "first_keys": first_keys}
    if initial:
        arguments["keys"] = group.asked[0]
        arguments |= {"seeds": group.seeds, "initializers": group.initializers}
    return arguments


def pool(group, outs, found, initial=False):
    """Pool what group_find_or_insert_ or group_find has returned."""
    *numbers, bags, first_keys = found if len(found) == 5 else (found[0], *found[1:])
    if len(numbers) == 3:
        rows, inverse, counts = numbers
        numbers = inverse, rows, counts
    else:
        numbers = numbers[0], None, None
    arguments = more(group, first_keys, initial)
    ops.group_embedding_bag_(outs, group.weights, *numbers, bags, group.asked[2], **arguments)


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [tensor.cpu() for tensor in value]


def in_double(value):
    """On the CPU, and exact enough to compare with whatever the order of additions is."""
    if isinstance(value, torch.Tensor):
        return value.cpu().double() if value.is_floating_point() else value.cpu()
    return [in_double(tensor) for tensor in value]


def check_pool(group, found, initial=False):
    outs = group.outs()
    pool(group, outs, found, initial)
    *numbers, bags, first_keys = on_cpu(found)
    if len(numbers) == 3:
        rows, inverse, counts = numbers
        numbers = inverse, rows, counts
    else:
        numbers = numbers[0], None, None
    arguments = {name: in_double(value) for name, value in more(group, first_keys, initial).items()}
    weights, features = in_double(group.weights), group.asked[2]

    def pooled(weights):
        expected = in_double(group.outs())
        reference_group.group_embedding_bag_(
            expected, weights, *numbers, bags, features, **arguments
        )
        return expected

    num_bags = sum(feature[3] for feature in group.features)
    longest = int(bags[: num_bags + 1].diff().max()) if initial and num_bags else 0
    each = zip(outs, pooled(weights), pooled([w.abs() for w in weights]), strict=True)
    for out, expected, magnitude in each:
        # Initial values, too, which are below 1, as most weights of keys are.
        assert_equal_but_for_rounding(out, expected, magnitude + longest)
    return outs


def assert_equal_but_for_rounding(actual, expected, magnitude):
    """Magnitude is what the sum of absolute values comes to."""
    largest = magnitude.max().item() if magnitude.numel() else 0
    # A term passes through the additions of a run, 1024 in a gradient, and a few more.
    of_run = 1100 * torch.finfo(accumulate_dtype(actual.dtype)).eps / 2
    tolerance = max(TOLERANCE[actual.dtype], of_run) * max(1, largest)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=tolerance)


def backward(group, grads, found, *, with_rows=True, **options):
    rows, inverse, counts, bags, first_keys = found
    return ops.group_embedding_bag_backward(
        grads,
        group.dims,
        inverse,
        rows if with_rows else None,
        counts,
        bags,
        group.asked[2],
        group.sample_weights,
        first_keys,
        **options,
    )


def random_grads(group):
    return [
        randn(n, dtype=group.dtype, seed=i).to(group.device) for i, n in enumerate(group.places)
    ]


def sums_of(group, counts, sums):
    """The gradients of each table, of those of all."""
    return split_by_table(group.dims, counts.tolist(), torch.empty(int(counts.sum())), sums)[1]


def check_backward(group, found, divisor=1, with_rows=True):
    grads = random_grads(group)
    if not grads:
        return
    result = backward(group, grads, found, with_rows=with_rows, divisor=divisor)
    rows, inverse, counts, bags, first_keys = on_cpu(found)
    rest = in_double(group.sample_weights), first_keys, divisor

    def summed(grads):
        return reference_group.group_embedding_bag_backward(
            grads,
            group.dims,
            inverse,
            rows if with_rows else None,
            counts,
            bags,
            group.asked[2],
            *rest,
        )

    expected_rows, expected = summed(in_double(grads))
    assert torch.equal(result[0].cpu(), expected_rows)
    assert result[1].shape == expected.shape
    _, magnitude = summed([grad.abs() for grad in in_double(grads)])
    each = (sums_of(group, counts, sums) for sums in (result[1], expected, magnitude))
    for sums, of_reference, size in zip(*each, strict=True):
        assert_equal_but_for_rounding(sums, of_reference, size)


def entries_of(group, counts):
    """The entries of each table that stand for its distinct rows."""
    entry = 0
    for t, count in enumerate(counts.tolist()):
        yield slice(entry, entry + count)
        entry += sum(group.keys_of(f) for f in group.features if f[0] == t)


def places_for(group, found, seed):
    """Room for the gradients of all rows, in any order and with gaps: out, units and found.

    Units are such that vectors of some tables may be read and written wide.
    """
    draw = random.Random(seed)
    rows, inverse, counts, *rest = found
    units = [draw.choice([unit for unit in (1, 2, 4, 8) if dim % unit == 0]) for dim in group.dims]
    slots = [(t, j) for t, count in enumerate(counts.tolist()) for j in range(count)]
    draw.shuffle(slots)
    own = [entries.start for entries in entries_of(group, counts)]
    at, places = 0, torch.full_like(rows, -1)
    for t, j in slots:
        at += -at % units[t] + draw.choice([0, 0, units[t]])
        places[own[t] + j] = at // units[t]
        at += group.dims[t]
    out = torch.full((at,), 9.0, dtype=group.dtype, device=group.device)
    return out, units, (places, inverse, counts, *rest)


def backward_at(group, grads, found, out, units, placed):
    places, inverse, counts, bags, first_keys = placed
    weights = group.sample_weights
    ops.group_embedding_bag_backward_at_(
        out, units, grads, group.dims, inverse, places, counts, bags, group.asked[2], weights,
        first_keys,
    )  # fmt: skip


def check_backward_at(group, found, seed=0):
    """The bits of the sums in one piece, and nothing else changes."""
    grads = random_grads(group)
    if not grads:
        return
    counts = found[2]
    sums = sums_of(group, counts, backward(group, grads, found, with_rows=False)[1])
    out, units, placed = places_for(group, found, seed)
    expected = out.clone()
    for unit, entries, own in zip(units, entries_of(group, counts), sums, strict=True):
        for row, gradient in zip((placed[0][entries] * unit).tolist(), own, strict=True):
            expected[row : row + len(gradient)] = gradient
    backward_at(group, grads, found, out, units, placed)
    assert same_bits(out, expected)
    rows, inverse, *rest = on_cpu(placed[:4])

    def written(grads, fill):
        plain = torch.full(out.shape, fill, dtype=torch.float64)
        reference_group.group_embedding_bag_backward_at_(
            plain, units, grads, group.dims, inverse, rows, *rest, group.asked[2],
            in_double(group.sample_weights), placed[4].cpu(),
        )  # fmt: skip
        return plain

    magnitude = written([grad.abs() for grad in in_double(grads)], 0.0)
    assert_equal_but_for_rounding(out, written(in_double(grads), 9.0), magnitude)


def check_strided(group, found):
    """Rows anywhere in one piece of memory, as vectors are that ranks have sent."""
    counts = found[2]
    space, units, placed = places_for(group, found, seed=1)
    space = misaligned(space) if len(space) % 2 else space
    given = group.weights
    for unit, entries, weight in zip(units, entries_of(group, counts), given, strict=True):
        each = zip(found[0][entries].tolist(), (placed[0][entries] * unit).tolist(), strict=True)
        for row, at in each:
            space[at : at + weight.shape[1]] = weight[row]
    expected = group.outs()
    pool(group, expected, found)
    try:
        group.weights = [
            space.as_strided(
                (max(0, (len(space) - dim) // unit + 1), dim), (unit, 1), space.storage_offset()
            )
            for dim, unit in zip(group.dims, units, strict=True)
        ]
        outs = check_pool(group, placed)
    finally:
        group.weights = given
    for one, other in zip(outs, expected, strict=True):
        assert same_bits(one, other)


def check_all(group):
    """Before keys are inserted, and after."""
    unseen = group.find()
    check_pool(group, unseen)
    check_pool(group, unseen, initial=True)
    found = group.find_or_insert()
    trained = check_pool(group, found)
    seen = check_pool(group, group.find(), initial=True)
    for one, other in zip(trained, seen, strict=True):
        assert same_bits(one, other)
    check_backward(group, found)
    check_backward(group, found, divisor=3)
    check_backward(group, found, with_rows=False)
    check_backward_at(group, found)
    check_strided(group, found)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(device, dtype, seed):
    check_all(random_group(seed, dtype, device))


def single_ops(group, t, rows, inverse, count, grad):
    """Output and gradient of table t, which has a source and a feature of its own."""
    source = group.sources[t]
    entry = sum(len(other.keys) for other in group.sources[:t])
    distinct = rows[entry : entry + count].long()
    numbers = inverse[entry : entry + len(source.keys)].long()
    combiner = ("sum", "mean", "sqrtn")[group.features[t][4]]
    weights = source.weights.to(group.device) if len(source.weights) else None
    offsets = source.offsets.to(group.device)
    out = ops.embedding_bag(group.weights[t], distinct[numbers], offsets, combiner, weights)
    order = distinct.argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(count, device=group.device)
    vectors = group.weights[t][distinct[order]].requires_grad_()
    pooled = ops.embedding_bag(vectors, place[numbers], offsets, combiner, weights)
    pooled.backward(grad.view_as(pooled))
    return out, distinct[order], vectors.grad


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_bits_are_those_of_the_single_ops(device, dtype):
    group = Group(dtype, [16, 4, 33], [1000] * 3, [True] * 3, [1] * 3, device)
    for t, (n, bags) in enumerate(((6000, 5), (900, 300), (700, 2))):
        keys = torch.arange(n) * 7919 % (n // (20, 1, 3)[t])
        offsets = torch.cat([torch.zeros(1).long(), torch.arange(1, bags + 1) * n // bags])
        weights = torch.rand(n if t == 1 else 0, dtype=accumulate_dtype(dtype))
        group.sources.append(Source(keys, offsets, weights))
        group.ask(t, t, 0, bags, ("sum", "mean", "sqrtn")[t])
    found = group.find_or_insert()
    rows, inverse, counts, *_ = found
    outs, grads = group.outs(), random_grads(group)
    with deterministic():
        pool(group, outs, found)
        all_rows, sums = backward(group, grads, found)
        parts = sums_of(group, counts, sums)
        first = 0
        for t, count in enumerate(counts.tolist()):
            out, own_rows, own_sums = single_ops(group, t, rows, inverse, count, grads[t])
            assert same_bits(outs[t], out.view(-1))
            assert torch.equal(all_rows[first : first + count], own_rows)
            assert same_bits(parts[t], own_sums)
            assert parts[t].data_ptr() % 16 == 0
            first += count


def test_same_bits_for_any_threads(device):
    group = random_group(11, torch.float32, device, most_keys=20_000)
    found = group.find_or_insert()
    grads = random_grads(group)

    def compute():
        outs = group.outs()
        pool(group, outs, found)
        rows, sums = backward(group, grads, found)
        return [*outs, rows, *sums_of(group, found[2], sums)]

    assert_same_bits_for_any_threads(compute)


def test_copies_keep_the_sign_of_zero(device):
    group = Group(torch.float32, [4], [5], [False], [1], device)
    group.sources.append(Source(torch.tensor([1, 2]), torch.tensor([0, 1, 1, 2]), torch.empty(0)))
    group.ask(0, 0, 0, 3, "none")
    group.weights[0].fill_(-0.0)
    (out,) = outs = group.outs()
    pool(group, outs, group.find())
    expected = torch.tensor([-0.0] * 4 + [0.0] * 4 + [-0.0] * 4)
    assert same_bits(out.cpu(), expected)


def test_one_output_for_all(device):
    """Columns of a matrix, and slots of a layer whose bags lie slot by slot."""
    group = Group(torch.float32, [3, 2], [50] * 2, [True] * 2, [1] * 2, device)
    keys = torch.arange(12) % 7
    offsets = torch.tensor([0, 2, 2, 5, 6, 9, 12])
    group.sources.append(Source(keys, offsets, torch.empty(0)))  # three slots of two samples
    group.features = [
        [0, 0, 0, 2, 0, NO_LIMIT, 0, 0, 8],
        [0, 0, 2, 2, 1, NO_LIMIT, 0, 3, 8],
        [1, 0, 4, 2, 0, NO_LIMIT, 0, 6, 8],
    ]
    group.places = [16]
    found = group.find_or_insert()
    (out,) = check_pool(group, found)
    slots = [
        ops.embedding_bag(
            group.weights[t],
            group.hash_tables[t].find(keys[offsets[2 * s] : offsets[2 * s + 2]].to(device)),
            (offsets[2 * s : 2 * s + 3] - offsets[2 * s]).to(device),
            combiner,
        )
        for s, (t, combiner) in enumerate(((0, "sum"), (0, "mean"), (1, "sum")))
    ]
    assert same_bits(out.view(2, 8), torch.cat(slots, 1))
    check_backward(group, found)


@pytest.mark.parametrize("kept", [0, 1, 64, 65, 130])
def test_rows_without_entries_have_zeros(device, kept):
    """Numbers below 0 get no gradient, though whole chunks of entries have them."""
    group = Group(torch.float32, [16, 16], [300] * 2, [True] * 2, [1] * 2, device)
    for t in range(2):
        group.sources.append(Source(torch.arange(200), torch.empty(0).long(), torch.empty(0)))
        group.ask(t, t, 0, 200, "sum")
    found = group.find_or_insert()
    found[1][kept:200] = -1
    for value in (1.0, 2.0, 3.0):  # memory that is not zeros already
        junk = torch.full((2 * 200 * 16,), value, device=device)
        del junk
        check_backward(group, found)


def small(device, dim=4):
    group = Group(torch.float32, [dim], [10], [True], [1], device)
    group.sources.append(Source(torch.tensor([5, 6, 5]), torch.tensor([0, 1, 3]), torch.empty(0)))
    group.ask(0, 0, 0, 2, "sum")
    return group, group.find_or_insert()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tensor", 1),
        ("tensor", -1),
        ("begin", 1),
        ("begin", -1),
        ("begin", 2**62),
        ("stride", 3),
        ("stride", 5),
        ("stride", -4),
        ("stride", 2**62),
    ],
)
def test_places_that_are_refused(device, column, value):
    group, found = small(device)
    group.features[0][FEATURE_COLUMNS.index(column)] = value
    outs = group.outs()
    with pytest.raises(ValueError, match=r"features\[0\] has .* outs\[-?\d\]"):
        pool(group, outs, found)
    assert (outs[0] == 9).all()
    with pytest.raises(ValueError, match=r"features\[0\] has .* grads\[-?\d\]"):
        backward(group, outs, found)


@pytest.mark.parametrize("bad", [2, 3, 2**31 - 1])
def test_numbers_that_are_refused(device, bad):
    group, found = small(device)
    found[1][1] = bad
    with pytest.raises(IndexError, match=r"index\[1\] is"):
        pool(group, group.outs(), found)
    with pytest.raises(IndexError, match=r"index\[1\] is"):
        backward(group, group.outs(), found)


@pytest.mark.parametrize("bad", [10, 2**31 - 1])
def test_rows_that_are_refused(device, bad):
    group, found = small(device)
    rows, *rest = group.find()
    rows[2] = bad
    with pytest.raises(IndexError, match="group_embedding_bag_"):
        pool(group, group.outs(), (rows, *rest))
    found[0][0] = bad
    with pytest.raises(IndexError, match="group_embedding_bag_"):
        pool(group, group.outs(), found)


def test_counts_that_are_refused(device, backend):
    group, found = small(device)
    rows, inverse, counts, *rest = found
    for bad in (-1, 4) if backend == "cpu" else (-1,):
        with pytest.raises(ValueError, match=rf"counts\[0\] is {bad}"):
            backward(group, group.outs(), (rows, inverse, counts.fill_(bad), *rest))
    with pytest.raises(ValueError, match="counts must have size 1"):
        backward(group, group.outs(), (rows, inverse, counts[:0], *rest))


@pytest.mark.parametrize("bad", [[1, 1, 3], [0, 2, 1], [0, 1, 4], [0, -1, 3], [0, 1, -(2**31)]])
def test_bags_that_are_refused(device, backend, bad):
    group, (rows, inverse, counts, _, first_keys) = small(device)
    bags = torch.tensor(bad, dtype=torch.int32, device=device)
    found = rows, inverse, counts, bags, first_keys
    if backend == "cpu":
        with pytest.raises(ValueError, match="bags must"):
            pool(group, group.outs(), found)
    else:
        # A device takes what is left of them, and then finds rows that are undefined.
        with contextlib.suppress(IndexError):
            pool(group, group.outs(), found)
    with pytest.raises(ValueError, match="bags has 2 elements, but features have 2 bags"):
        pool(group, group.outs(), (rows, inverse, counts, bags[:2], first_keys))


@pytest.mark.parametrize("bad", [-1, 1, 4, 2**62])
def test_first_keys_that_are_refused(device, backend, bad):
    group, found = small(device)
    found[4][0] = bad
    group.sources[0].weights = torch.ones(3)
    with contextlib.ExitStack() as stack:
        if backend == "cpu":  # a device leaves entries out
            message = r"features\[0\] has keys .* but sample_weights\[0\] has 3 elements"
            stack.enter_context(pytest.raises(ValueError, match=message))
        pool(group, group.outs(), found)


def test_what_is_written_shares_no_memory(device):
    group, found = small(device)
    with pytest.raises(ValueError, match=r"overlaps .* in memory"):
        pool(group, [group.weights[0].view(-1)[:8]], found)
    space = torch.zeros(16, device=device)
    with pytest.raises(ValueError, match=r"outs\[1\] overlaps outs\[0\] in memory"):
        pool(group, [space[:8], space[4:12]], found)


def test_a_bag_without_combiner_has_one_key_at_most(device, backend):
    group, found = small(device)
    group.features[0][4] = 3
    with pytest.raises(ValueError, match="bag 1 of source 0 has more keys than its max_nnz=1"):
        group.find()
    if backend == "cpu":
        with pytest.raises(ValueError, match="bag 1 has more keys than its max_nnz=1"):
            pool(group, group.outs(), found)


@pytest.mark.parametrize(
    "wrong", ["outs", "weights", "index", "rows", "counts", "bags", "sample_weights", "keys"]
)
def test_dtypes_that_are_refused(device, wrong):
    group, (rows, inverse, counts, bags, first_keys) = small(device)
    arguments = {
        "outs": group.outs(),
        "weights": group.weights,
        "index": inverse,
        "rows": rows,
        "counts": counts,
        "bags": bags,
        "features": group.asked[2],
        "sample_weights": [torch.ones(3, device=device)],
        "first_keys": first_keys,
        "keys": group.asked[0],
    }
    value = arguments[wrong]
    arguments[wrong] = value.half() if isinstance(value, torch.Tensor) else [value[0].half()]
    error = ValueError if wrong == "outs" else TypeError
    with pytest.raises(error, match=rf"group_embedding_bag_: {wrong}(\[0\])? must"):
        ops.group_embedding_bag_(**arguments)


def test_no_tables(device):
    group = Group(torch.float32, [], [], [], [], device)
    found = group.find_or_insert()
    pool(group, [], found)
    rows, grads = backward(group, [torch.empty(0, device=device)], found)
    assert len(rows) == len(grads) == 0


def strided(grad, kind):
    """The same gradient [bags, dim] in other memory."""
    if kind == "columns":
        wide = torch.full((len(grad), grad.shape[1] + 7), torch.nan, dtype=grad.dtype)
        wide[:, 3:-4] = grad.cpu()
        return wide.to(grad.device)[:, 3:-4]
    if kind == "every other":
        return torch.stack([grad, torch.full_like(grad, torch.nan)], 1)[:, 0]
    if kind == "slots":  # [batch, 2, dim], of which each sample has a row of its own
        wide = torch.full((len(grad) // 2, 2 * grad.shape[1] + 5), torch.nan, dtype=grad.dtype)
        wide = wide.to(grad.device)
        wide[:, : 2 * grad.shape[1]] = grad.reshape(len(grad) // 2, -1)
        return wide[:, : 2 * grad.shape[1]].unflatten(1, (2, -1))
    if kind == "transposed":
        return grad.T.contiguous().T
    assert kind == "one number"
    return grad[:1, :1].expand_as(grad)


@pytest.mark.parametrize("kind", ["columns", "every other", "slots", "transposed", "one number"])
@pytest.mark.parametrize("dim", [16, 3])
def test_gradients_of_any_strides(device, kind, dim):
    group = Group(torch.float32, [dim, 4], [50] * 2, [True] * 2, [1] * 2, device)
    keys, offsets = torch.arange(40) % 7, torch.arange(21) * 2
    for t in range(2):
        group.sources.append(Source(keys, offsets, torch.empty(0)))
        group.ask(t, t, 0, 20, "sum")
    found = group.find_or_insert()
    one, other = (randn(20, width).to(device) for width in (dim, 4))
    view = strided(one, kind)
    assert not view.is_contiguous()
    results = [
        backward(group, grads, found) for grads in ([view.contiguous(), other], [view, other])
    ]
    for expected, result in zip(
        *(sums_of(group, found[2], sums) for _, sums in results), strict=True
    ):
        assert same_bits(result, expected)


def at(group, found, out, units=(4,), **changed):
    """Gradients of ones, written to out."""
    rows, inverse, counts, bags, first_keys = found
    arguments = {
        "out": out,
        "units": list(units),
        "grads": [torch.ones_like(vectors) for vectors in group.outs()],
        "dims": group.dims,
        "index": inverse,
        "rows": rows,
        "counts": counts,
        "bags": bags,
        "features": group.asked[2],
        "first_keys": first_keys,
    }
    ops.group_embedding_bag_backward_at_(**arguments | changed)


def test_places_of_gradients(device):
    group, found = small(device)
    found[0][:2] = torch.tensor([3, 0])
    out = torch.full((10,), 9.0, device=device)
    at(group, found, out, [2])
    assert out.tolist() == [1] * 4 + [9] * 2 + [2] * 4
    found[0][:2] = torch.tensor([2**31 - 1, 0])
    found[1][:] = torch.tensor([1, 1, -1])  # a row without entries has a gradient of zeros
    found[0][0] = 4
    out = torch.full((8,), 9.0, device=device)
    at(group, found, out, [1])
    assert out.tolist() == [2] * 4 + [0] * 4


@pytest.mark.parametrize(
    ("bad", "unit", "elements"),
    [(-1, 4, 8), (2, 4, 8), (5, 1, 8), (2, 3, 9), (1, 2**44, 8), (2**31 - 1, 2**44, 8), (0, 1, 3)],
)
def test_places_of_gradients_that_are_refused(device, bad, unit, elements):
    group, found = small(device)
    found[0][:2] = torch.tensor([0, bad]) if elements > 3 else torch.tensor([bad, bad])
    space = torch.full((elements + 40,), 9.0, device=device)
    out = space[20 : 20 + elements]
    position = int(elements > 3)
    with pytest.raises(
        IndexError, match=rf"backward_at_: rows\[{position}\] is {bad}, which is no"
    ):
        at(group, found, out, [unit])
    assert (space[:20] == 9).all()
    assert (space[20 + elements :] == 9).all()


@pytest.mark.parametrize("bad", [2, 2**31 - 1])
def test_numbers_of_gradients_that_are_refused(device, bad):
    group, found = small(device)
    found[1][1] = bad
    with pytest.raises(IndexError, match=r"backward_at_: index\[1\] is"):
        at(group, found, torch.empty(8, device=device))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"units": []}, "units must have 1 element"),
        ({"units": [0]}, r"units\[0\] must be in \[1, 2\^44\], got 0"),
        ({"units": [-4]}, r"units\[0\] must be in"),
        ({"units": [2**62]}, r"units\[0\] must be in"),
        ({"units": [4, 4]}, "units must have 1 element"),
        ({"grads": []}, "grads must not be empty"),
        ({"dims": [5]}, r"features\[0\] has 2 vectors of 5"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows must have size 3"),
        ({"out": torch.zeros(8, dtype=torch.float64)}, "out must have dtype Float, got Double"),
    ],
)
def test_arguments_of_gradients_that_are_refused(device, changed, message):
    group, found = small(device)
    arguments = {"out": torch.zeros(8), "units": [4]} | changed
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.to(device)
    with pytest.raises(ValueError, match=f"backward_at_: .*{message}"):
        at(group, found, **arguments)
    assert (arguments["out"] == 0).all()


def test_gradients_are_not_written_to_a_strided_tensor(device):
    group, found = small(device)
    with pytest.raises(ValueError, match="backward_at_: out must be contiguous"):
        at(group, found, torch.zeros(16, device=device)[::2])


def test_gradients_are_written_apart_from_other_arguments(device):
    group, found = small(device)
    grad = torch.ones(8, device=device)
    with pytest.raises(ValueError, match=r"grads\[0\] overlaps out in memory"):
        at(group, found, grad, grads=[grad])


@pytest.mark.parametrize("wrong", ["grads", "index", "rows", "counts", "bags", "features"])
def test_dtypes_of_gradients_that_are_refused(device, wrong):
    group, found = small(device)
    rows, inverse, counts, bags, _ = found
    arguments = {"grads": group.outs(), "index": inverse, "rows": rows, "counts": counts}
    arguments |= {"bags": bags, "features": group.asked[2]}
    value = arguments[wrong]
    changed = value.half() if isinstance(value, torch.Tensor) else [value[0].half()]
    with pytest.raises(TypeError, match=rf"backward_at_: {wrong}(\[0\])? must be"):
        at(group, found, torch.zeros(8, device=device), **{wrong: changed})


@pytest.mark.parametrize("seed", range(5))
def test_gradients_stay_within_out_without_checks(seed):
    """On a device, whatever rows, index, counts and bags are; a sanitizer sees what is touched."""
    draw = random.Random(seed)
    for _ in range(20):
        group, found = small("cpu")
        for tensor in found[:4]:
            limits = torch.iinfo(tensor.dtype)
            edges = (limits.min, -1, 0, 1, 2, 3, limits.max)
            tensor[draw.randrange(len(tensor))] = draw.choice(edges)
        space = torch.full((48,), 9.0)
        with counted():
            at(group, found, space[20:28], [draw.choice([1, 4, 2**44])])
        assert (space[:20] == 9).all()
        assert (space[28:] == 9).all()
        with contextlib.suppress(IndexError), simt.SimtMode():
            ops.unique(torch.zeros(1).long())


def test_a_backward_to_places_without_tables(device):
    group = Group(torch.float32, [], [], [], [], device)
    found = group.find_or_insert()
    out = torch.zeros(3, device=device)
    at(group, found, out, [], grads=[])
    at(group, found, out, [], grads=[torch.empty(0, device=device)])
    assert (out == 0).all()


@pytest.mark.parametrize("wide", [True, False])
def test_weights_whose_rows_overlap(device, wide):
    """Every element may begin a row, or every fourth."""
    unit = 4 if wide else 1
    group, (_, inverse, *rest) = small(device)
    space = torch.arange(20.0, device=device)
    group.weights = [space.as_strided((17 // unit, 4), (unit, 1))]
    rows = torch.tensor([16 // unit - 1, 1, 0], dtype=torch.int32, device=device)
    outs = group.outs()
    pool(group, outs, (rows, inverse, *rest))
    one, other = (space[row * unit :][:4] for row in rows[:2].tolist())
    assert torch.equal(outs[0], torch.cat([one, one + other]))
    rows[0] = 17 // unit
    with pytest.raises(IndexError, match="group_embedding_bag_"):
        pool(group, outs, (rows, inverse, *rest))


@pytest.mark.parametrize("strides", [(0, 1), (1, 5), (0, 0)])
def test_weights_that_are_copied(device, strides):
    """Rows whose elements are no neighbours, or of which there is only one."""
    group, found = small(device)
    space = torch.arange(60.0, device=device)
    group.weights = [space.as_strided((10, 4), strides)]
    check_pool(group, found)
