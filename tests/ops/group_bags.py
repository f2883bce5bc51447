"""Compares pooling of random groups, and the gradients of pooling, with the reference."""

import random

import torch
from conftest import (
    TOLERANCE,
    misaligned,
    randn,
    same_bits,
)
from reference import groups as reference_group

from sparsekit import ops
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops._group import split_by_table

from .groups import Group, Source


def more(group, key_starts, initial):
    """Return the optional arguments of pooling."""
    arguments = {"sample_weights": group.sample_weights, "key_starts": key_starts}
    if initial:
        arguments["keys"] = group.asked[0]
        arguments |= {"seeds": group.seeds, "initializers": group.initializers}
    return arguments


def pool(group, outs, found, initial=False):
    """Pool the rows found by group_find_or_insert_ or group_find."""
    *numbers, bags, key_starts = found if len(found) == 5 else (found[0], *found[1:])
    if len(numbers) == 3:
        rows, inverse, counts = numbers
        numbers = inverse, rows, counts
    else:
        numbers = numbers[0], None, None
    arguments = more(group, key_starts, initial)
    ops.group_embedding_bag_(outs, group.weights, *numbers, bags, group.asked[2], **arguments)


def on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return [tensor.cpu() for tensor in value]


def in_double(value):
    """Copy tensors to the CPU in float64, in which the order of additions hardly matters."""
    if isinstance(value, torch.Tensor):
        return value.cpu().double() if value.is_floating_point() else value.cpu()
    return [in_double(tensor) for tensor in value]


def check_pool(group, found, initial=False):
    outs = group.outs()
    pool(group, outs, found, initial)
    *numbers, bags, key_starts = on_cpu(found)
    if len(numbers) == 3:
        rows, inverse, counts = numbers
        numbers = inverse, rows, counts
    else:
        numbers = numbers[0], None, None
    arguments = {name: in_double(value) for name, value in more(group, key_starts, initial).items()}
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
        # Initial values add to the magnitude. They are below 1, as are most weights of keys.
        assert_equal_but_for_rounding(out, expected, magnitude + longest)
    return outs


def assert_equal_but_for_rounding(actual, expected, magnitude):
    """Check equality up to rounding; `magnitude` is the sum of the terms' absolute values."""
    largest = magnitude.max().item() if magnitude.numel() else 0
    # A term takes part in the additions of its run (up to 1024 in a gradient) and in a few more.
    of_run = 1100 * torch.finfo(accumulate_dtype(actual.dtype)).eps / 2
    tolerance = max(TOLERANCE[actual.dtype], of_run) * max(1, largest)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=tolerance)


def backward(group, grads, found, *, with_rows=True, **options):
    rows, inverse, counts, bags, key_starts = found
    *gradients, num_rows = ops.group_embedding_bag_backward(
        grads,
        group.dims,
        inverse,
        rows if with_rows else None,
        counts,
        bags,
        group.asked[2],
        group.sample_weights,
        key_starts,
        **options,
    )
    assert num_rows.is_cpu
    assert num_rows.shape == counts.shape
    return gradients


def random_grads(group):
    return [
        randn(n, dtype=group.dtype, seed=i).to(group.device) for i, n in enumerate(group.places)
    ]


def sums_of(group, counts, sums):
    """Split the gradients of all tables into one tensor per table."""
    return split_by_table(group.dims, counts.tolist(), torch.empty(int(counts.sum())), sums)[1]


def check_backward(group, found, divisor=1, with_rows=True):
    grads = random_grads(group)
    if not grads:
        return
    result = backward(group, grads, found, with_rows=with_rows, divisor=divisor)
    rows, inverse, counts, bags, key_starts = on_cpu(found)
    rest = in_double(group.sample_weights), key_starts, divisor

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
    """Yield, for each table, the slice of entries in which its distinct rows are listed."""
    entry = 0
    for t, count in enumerate(counts.tolist()):
        yield slice(entry, entry + count)
        entry += sum(group.keys_of(f) for f in group.features if f[0] == t)


def places_for(group, found, seed):
    """Return `out`, `row_strides`, and `found` with a row of `out` for each gradient.

    The rows are in random order and have gaps. Some strides allow wide reads and writes.
    """
    draw = random.Random(seed)
    rows, inverse, counts, *rest = found
    row_strides = [
        draw.choice([stride for stride in (1, 2, 4, 8) if dim % stride == 0]) for dim in group.dims
    ]
    slots = [(t, j) for t, count in enumerate(counts.tolist()) for j in range(count)]
    draw.shuffle(slots)
    own = [entries.start for entries in entries_of(group, counts)]
    at, places = 0, torch.full_like(rows, -1)
    for t, j in slots:
        at += -at % row_strides[t] + draw.choice([0, 0, row_strides[t]])
        places[own[t] + j] = at // row_strides[t]
        at += group.dims[t]
    out = torch.full((at,), 9.0, dtype=group.dtype, device=group.device)
    return out, row_strides, (places, inverse, counts, *rest)


def backward_at(group, grads, found, out, row_strides, placed):
    places, inverse, counts, bags, key_starts = placed
    weights = group.sample_weights
    ops.group_embedding_bag_backward_at_(
        out, row_strides, grads, group.dims, inverse, places, counts, bags, group.asked[2], weights,
        key_starts,
    )  # fmt: skip


def check_backward_at(group, found, seed=0):
    """Check that `out` gets the expected gradients, bit for bit, and nothing else is written."""
    grads = random_grads(group)
    if not grads:
        return
    counts = found[2]
    sums = sums_of(group, counts, backward(group, grads, found, with_rows=False)[1])
    out, row_strides, placed = places_for(group, found, seed)
    expected = out.clone()
    for stride, entries, own in zip(row_strides, entries_of(group, counts), sums, strict=True):
        for row, gradient in zip((placed[0][entries] * stride).tolist(), own, strict=True):
            expected[row : row + len(gradient)] = gradient
    backward_at(group, grads, found, out, row_strides, placed)
    assert same_bits(out, expected)
    rows, inverse, *rest = on_cpu(placed[:4])

    def written(grads, fill):
        plain = torch.full(out.shape, fill, dtype=torch.float64)
        reference_group.group_embedding_bag_backward_at_(
            plain, row_strides, grads, group.dims, inverse, rows, *rest, group.asked[2],
            in_double(group.sample_weights), placed[4].cpu(),
        )  # fmt: skip
        return plain

    magnitude = written([grad.abs() for grad in in_double(grads)], 0.0)
    assert_equal_but_for_rounding(out, written(in_double(grads), 9.0), magnitude)


def check_strided(group, found):
    """Check pooling of rows anywhere in one buffer, as with vectors received from ranks."""
    counts = found[2]
    space, row_strides, placed = places_for(group, found, seed=1)
    space = misaligned(space) if len(space) % 2 else space
    given = group.weights
    for stride, entries, weight in zip(row_strides, entries_of(group, counts), given, strict=True):
        each = zip(found[0][entries].tolist(), (placed[0][entries] * stride).tolist(), strict=True)
        for row, at in each:
            space[at : at + weight.shape[1]] = weight[row]
    expected = group.outs()
    pool(group, expected, found)
    try:
        group.weights = [
            space.as_strided(
                (max(0, (len(space) - dim) // stride + 1), dim), (stride, 1), space.storage_offset()
            )
            for dim, stride in zip(group.dims, row_strides, strict=True)
        ]
        outs = check_pool(group, placed)
    finally:
        group.weights = given
    for one, other in zip(outs, expected, strict=True):
        assert same_bits(one, other)


def check_all(group):
    """Check the ops before and after keys are inserted."""
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


def small(device, dim=4):
    group = Group(torch.float32, [dim], [10], [True], [1], device)
    group.sources.append(Source(torch.tensor([5, 6, 5]), torch.tensor([0, 1, 3]), torch.empty(0)))
    group.ask(0, 0, 0, 2, "sum")
    return group, group.find_or_insert()
