"""sparsekit.ops.group_embedding_bag_ and its backward equal the reference and the single ops."""

import contextlib
import random

import pytest
import torch
from conftest import (
    ROW_DTYPES,
    assert_same_bits_for_any_threads,
    deterministic,
    same_bits,
)

from sparsekit import ops
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops._group import FeatureColumn

from .group_bags import (
    backward,
    check_all,
    check_backward,
    check_pool,
    pool,
    random_grads,
    small,
    sums_of,
)
from .groups import NO_LIMIT, Group, Source, random_bags, random_group

SEEDS = range(20)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(device, dtype, seed):
    check_all(random_group(seed, dtype, device))


def test_short_bags_that_take_a_block_several_rounds(device):
    group = Group(torch.float32, [64, 128], [500] * 2, [True] * 2, [1] * 2, device)
    keys = torch.arange(3000) * 7 % 400
    offsets = random_bags(random.Random(0), 3000, 1500)
    group.sources = [
        Source(keys[:1500], torch.empty(0).long(), torch.empty(0)),  # a key for each bag
        Source(keys, offsets, torch.empty(0)),
    ]
    group.ask(0, 0, 0, 1500, "sum")
    group.ask(1, 1, 0, 1500, "mean")
    check_pool(group, group.find_or_insert())
    check_pool(group, group.find(), initial=True)


def single_ops(group, t, rows, inverse, count, grad):
    """Return the output and gradient of table t, which has a separate source and feature."""
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


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_sum_is_never_a_negative_zero(device, combiner):
    group = Group(torch.float32, [4], [5], [False], [1], device)
    offsets = torch.tensor([0, 1, 1, 3])  # bags of one key, none and two
    group.sources.append(Source(torch.tensor([1, 2, 3]), offsets, torch.empty(0)))
    group.ask(0, 0, 0, 3, combiner)
    group.weights[0].fill_(-0.0)
    (out,) = outs = group.outs()
    pool(group, outs, group.find())
    assert same_bits(out.cpu(), torch.zeros(12))


def test_one_output_for_all(device):
    """Features may share an output: as columns of a matrix, or as slots of a layer."""
    group = Group(torch.float32, [3, 2], [50] * 2, [True] * 2, [1] * 2, device)
    keys = torch.arange(12) % 7
    offsets = torch.tensor([0, 2, 2, 5, 6, 9, 12])
    group.sources.append(Source(keys, offsets, torch.empty(0)))  # two samples with three slots
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
    """Entries with a negative index add no gradient, even if they fill whole chunks."""
    group = Group(torch.float32, [16, 16], [300] * 2, [True] * 2, [1] * 2, device)
    for t in range(2):
        group.sources.append(Source(torch.arange(200), torch.empty(0).long(), torch.empty(0)))
        group.ask(t, t, 0, 200, "sum")
    found = group.find_or_insert()
    found[1][kept:200] = -1
    for value in (1.0, 2.0, 3.0):  # fill memory that may be reused for the result
        junk = torch.full((2 * 200 * 16,), value, device=device)
        del junk
        check_backward(group, found)


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
    group.features[0][FeatureColumn[column]] = value
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
    group, (rows, inverse, counts, _, key_starts) = small(device)
    bags = torch.tensor(bad, dtype=torch.int32, device=device)
    found = rows, inverse, counts, bags, key_starts
    if backend == "cpu":
        with pytest.raises(ValueError, match="bags must"):
            pool(group, group.outs(), found)
    else:
        # A device skips invalid bags, and may then read unspecified rows and raise an IndexError.
        with contextlib.suppress(IndexError):
            pool(group, group.outs(), found)
    with pytest.raises(ValueError, match="bags has 2 elements, but features have 2 bags"):
        pool(group, group.outs(), (rows, inverse, counts, bags[:2], key_starts))


@pytest.mark.parametrize("bad", [-1, 1, 4, 2**62])
def test_first_keys_that_are_refused(device, backend, bad):
    group, found = small(device)
    found[4][0] = bad
    group.sources[0].weights = torch.ones(3)
    with contextlib.ExitStack() as stack:
        if backend == "cpu":  # a device skips these entries
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
    group, (rows, inverse, counts, bags, key_starts) = small(device)
    arguments = {
        "outs": group.outs(),
        "weights": group.weights,
        "index": inverse,
        "rows": rows,
        "counts": counts,
        "bags": bags,
        "features": group.asked[2],
        "sample_weights": [torch.ones(3, device=device)],
        "key_starts": key_starts,
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
    # Without a tensor, nothing tells the ops the device.
    rows, grads = backward(group, [torch.empty(0, device=found[1].device)], found)
    assert len(rows) == len(grads) == 0
