"""Bags equal the reference if kernels pool them in groups of four, singly, or in parts.

A part has 256 entries. The sums of parts are added 256 at a time.
"""

import pytest
import torch
from conftest import assert_close, randn, same_bits
from reference import ops as reference

from sparsekit import ops
from sparsekit.ops.embedding_bag import COMBINERS

from .test_embedding_bag import bags_of, check

all_combiners = pytest.mark.parametrize("combiner", COMBINERS)
weighted_or_not = pytest.mark.parametrize("weighted", [False, True])


def positive_weights(n, dtype=torch.float64):
    return randn(n, dtype=dtype, seed=3).abs() + 0.5


@pytest.mark.pairs
@weighted_or_not
@all_combiners
@pytest.mark.parametrize(
    "lengths", [[257] * 9, [257, 0, 258] * 3, [513] * 4, [255, 256, 257, 511, 512, 513], [300] * 40]
)
def test_bags_just_over_a_part(device, lengths, combiner, weighted):
    """Each bag has a small last part, so there are many parts for this number of entries."""
    rows, offsets = bags_of(lengths, 40)
    weights = positive_weights(len(rows)) if weighted else None
    check(randn(40, 5, dtype=torch.float64), rows, offsets, combiner, weights, device)


@pytest.mark.pairs
@weighted_or_not
@all_combiners
@pytest.mark.parametrize("length", [65_536, 65_537, 70_000])
def test_a_bag_of_more_parts_than_are_added_at_once(device, length, combiner, weighted):
    rows, offsets = bags_of([3, length, 300, 2], 50)
    weight = randn(50, 2, dtype=torch.float64)
    weights = positive_weights(len(rows)) if weighted else None
    expected = reference.embedding_bag(weight, rows, offsets, combiner, weights)
    arguments = [weight, rows, offsets, combiner, *([weights] if weighted else [])]
    on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    assert_close(ops.embedding_bag(*on_device).cpu(), expected)


@all_combiners
@pytest.mark.parametrize("length", [256, 257, 700])
def test_a_long_bag_gives_the_same_bits_alone_and_among_short_ones(device, length, combiner):
    rows, offsets = bags_of([length, *[1] * 200], 50)
    weight = randn(50, 8).to(device)
    together = ops.embedding_bag(weight, rows.to(device), offsets.to(device), combiner)
    alone = ops.embedding_bag(weight, rows[:length].to(device), offsets[:2].to(device), combiner)
    assert same_bits(together[0], alone[0])


@weighted_or_not
@all_combiners
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_mostly_empty_bags(device, dtype, combiner, weighted):
    """With more bags than entries, the backward's workspace still holds its data on each bag."""
    lengths = [0] * 1500
    lengths[7], lengths[800], lengths[-1] = 1, 2, 1
    rows, offsets = bags_of(lengths, 3, lowest=0)
    weights = positive_weights(len(rows), dtype) if weighted else None
    check(randn(3, 4, dtype=dtype), rows, offsets, combiner, weights, device)


@pytest.mark.parametrize("per_bag", [1, 20, 300])
@pytest.mark.parametrize("bags", [1, 3, 4, 5, 8])
def test_the_first_bad_offset_is_named(device, bags, per_bag):
    n = bags * per_bag
    rows = torch.zeros(n, dtype=torch.int64, device=device)
    weight, weights = torch.ones(2, 3, device=device), torch.ones(n, device=device)
    grad = torch.ones(bags, 3, device=device)
    backward = torch.ops.sparsekit.embedding_bag_backward.default
    of_weights = torch.ops.sparsekit.embedding_bag_backward_sample_weights.default
    calls = [
        lambda offsets: ops.embedding_bag(weight, rows, offsets),
        lambda offsets: backward(grad, rows, offsets, COMBINERS["mean"], None, 2),
        lambda offsets: backward(grad, rows, offsets, COMBINERS["mean"], weights, 2),
        lambda offsets: of_weights(grad, weight, rows, offsets, COMBINERS["mean"], weights),
    ]
    for position in {0, 1, bags - 1, bags}:
        in_range = {0: 1, bags: n - 1}.get(position, -1)  # valid, but not at this position
        for value in {-1, n + 1, 2**40, in_range}:
            offsets = torch.arange(bags + 1, device=device) * per_bag
            offsets[position] = value
            for call in calls:
                with pytest.raises(ValueError, match=rf"offsets\[{position}\] is {value}$"):
                    call(offsets)
