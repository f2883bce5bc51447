"""sparsekit.ops.embedding_bag, forward and gradients, equals the reference and torch."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import (
    KEY_DTYPES,
    ROW_DTYPES,
    assert_close,
    assert_same_bits_for_any_threads,
    generator,
    misaligned,
    randn,
    same_bits,
    whole_numbers,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

from sparsekit import ops
from sparsekit.ops.embedding_bag import COMBINERS

all_combiners = pytest.mark.parametrize("combiner", COMBINERS)
weighted_or_not = pytest.mark.parametrize("weighted", [False, True])


def bags_of(lengths, num_rows, seed=0, lowest=-1):
    """Return (rows, offsets) of bags of these lengths."""
    lengths = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    rows = torch.randint(lowest, num_rows, (int(lengths.sum()),), generator=generator(seed))
    return rows, offsets


def check(weight, rows, offsets, combiner, sample_weights, device):
    """Compare the pooled bags and the two gradients with the reference's."""
    results = []
    for embedding_bag in (ops.embedding_bag, reference.embedding_bag):
        on = device if embedding_bag is ops.embedding_bag else torch.device("cpu")
        leaves = [weight.detach().to(on).requires_grad_()]
        if sample_weights is not None:
            leaves.append(sample_weights.detach().to(on).requires_grad_())
        out = embedding_bag(leaves[0], rows.to(on), offsets.to(on), combiner, *leaves[1:])
        upstream = randn(*out.shape, dtype=out.dtype, seed=1).to(on)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for result, expected in zip(*results, strict=True):
        assert_close(result.cpu(), expected)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@weighted_or_not
@all_combiners
@pytest.mark.parametrize("dim", [0, 1, 3, 16, 64, 100, 128, 257, 1024])
def test_equals_the_reference(device, dim, combiner, weighted, dtype):
    rows, offsets = bags_of([0, 1, 3, 0, 0, 17, 40, 2, 0], 23)
    # Weights stay away from zero: a small divisor would magnify rounding.
    sample_weights = randn(len(rows)).abs() + 0.5 if weighted else None
    sample_weights = (
        sample_weights.double() if weighted and dtype == torch.float64 else sample_weights
    )
    check(randn(23, dim, dtype=dtype), rows, offsets, combiner, sample_weights, device)


@pytest.mark.pairs
@weighted_or_not
@all_combiners
@pytest.mark.parametrize(
    "lengths",
    [[], [0], [1], [0, 0, 0], [1] * 100, [5000], [0] * 50 + [1030] + [0] * 50, [1023, 1, 1024]],
    ids=str,
)
def test_shapes_of_bags(device, lengths, combiner, weighted):
    rows, offsets = bags_of(lengths, 5)
    weights = randn(len(rows), dtype=torch.float64).abs() + 0.5 if weighted else None
    check(randn(5, 7, dtype=torch.float64), rows, offsets, combiner, weights, device)


@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    num_rows=st.integers(1, 9),
    dim=st.integers(1, 70),
    combiner=st.sampled_from(list(COMBINERS)),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_bags(device, lengths, num_rows, dim, combiner, weighted, seed):
    rows, offsets = bags_of(lengths, num_rows, seed, lowest=-2)
    # The weights are -1, 0 or 1, so that some weights and some sums of weights are zero.
    weights = whole_numbers(len(rows), dtype=torch.float64, seed=seed).sign()
    weight = randn(num_rows, dim, dtype=torch.float64, seed=seed)
    check(weight, rows, offsets, combiner, weights if weighted else None, device)


SHORT = [[2], [0, 0, 5], [1, 0, 2, 0], [0, 3, 4, 0, 0, 1, 2], [2] * 33, [1] * 30 + [0, 0]]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@weighted_or_not
@pytest.mark.parametrize("dim", [1, 4, 20, 64, 132])
@pytest.mark.parametrize("lengths", SHORT)
def test_short_bags(device, lengths, dim, weighted, dtype):
    """On a device, short bags share a tile, with or without a long bag between them."""
    # In bfloat16, the reference rounds the gradients of a long bag differently.
    for extra in ([], *([[700, *[1] * 150]] if dtype != torch.bfloat16 else [])):
        rows, offsets = bags_of(lengths + extra + lengths, 23)
        sample_weights = randn(len(rows)).abs() + 0.5 if weighted else None
        if weighted and dtype == torch.float64:
            sample_weights = sample_weights.double()
        check(randn(23, dim, dtype=dtype), rows, offsets, "mean", sample_weights, device)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_bag_gives_the_same_bits_among_short_and_long_ones(device, combiner):
    rows, offsets = bags_of([3, 0, 2, 9, 1, 0, 5, 2, 2], 23, lowest=0)
    weight = randn(23, 8).to(device)
    together = ops.embedding_bag(weight, rows.to(device), offsets.to(device), combiner)
    for bag, (begin, end) in enumerate(itertools.pairwise(offsets)):
        # Nine other bags of length 1 or 20 make the average bag short or long.
        for length in (1, 20):
            other_rows, others = bags_of([length] * 9, 23, seed=2, lowest=0)
            mixed = torch.cat([rows[begin:end], other_rows]).to(device)
            bounds = torch.cat([torch.zeros(1, dtype=torch.int64), others + end - begin])
            alone = ops.embedding_bag(weight, mixed, bounds.to(device), combiner)
            assert same_bits(alone[0], together[bag])


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(device, combiner, dtype):
    rows, offsets = bags_of([0, 3, 1, 700, 0], 50, lowest=0)
    weight = randn(50, 32, dtype=dtype).to(device)
    result = ops.embedding_bag(weight, rows.to(device), offsets.to(device), combiner)
    expected = torch.nn.functional.embedding_bag(
        rows, weight.cpu(), offsets, mode=combiner, include_last_offset=True
    )
    assert_close(result.cpu(), expected)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_sums_of_whole_numbers_are_exact(device, dtype):
    rows, offsets = bags_of([0, 1, 300, 30], 40)
    weight = whole_numbers(40, 100, dtype=dtype).to(device)
    result = ops.embedding_bag(weight, rows.to(device), offsets.to(device))
    assert torch.equal(result.cpu(), reference.embedding_bag(weight.cpu(), rows, offsets))


def test_formulas(device):
    weight = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], device=device)
    rows = torch.tensor([0, 1, 2, -1, 2], device=device)
    offsets = torch.tensor([0, 2, 2, 4, 5], device=device)
    sample_weights = torch.tensor([3.0, 4.0, 2.0, 6.0, 0.0], device=device)

    def first_column(combiner, *weights):
        return ops.embedding_bag(weight, rows, offsets, combiner, *weights)[:, 0].tolist()

    assert first_column("sum") == [3, 0, 4, 4]
    assert first_column("mean") == [1.5, 0, 2, 4]  # the negative row counts in the mean
    assert first_column("sqrtn") == pytest.approx([3 / 2**0.5, 0, 4 / 2**0.5, 4])
    assert first_column("sum", sample_weights) == [11, 0, 8, 0]
    assert first_column("mean", sample_weights) == pytest.approx([11 / 7, 0, 1, 0])
    assert first_column("sqrtn", sample_weights) == pytest.approx([11 / 5, 0, 8 / 40**0.5, 0])


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_a_zero_divisor_gives_zeros_and_no_gradient(device, combiner):
    weight = torch.ones(2, 3, device=device, requires_grad=True)
    rows, offsets = torch.tensor([0, 1], device=device), torch.tensor([0, 2], device=device)
    values = [1.0, -1.0] if combiner == "mean" else [0.0, 0.0]
    sample_weights = torch.tensor(values, device=device, requires_grad=True)
    out = ops.embedding_bag(weight, rows, offsets, combiner, sample_weights)
    out.sum().backward()
    for zeros in (out, weight.grad, sample_weights.grad):
        assert not zeros.any()


@pytest.mark.parametrize("dtype", KEY_DTYPES)
@all_combiners
def test_index_dtypes_and_non_contiguous_arguments(device, combiner, dtype):
    # Make the views on the device: copying them to it would make them contiguous.
    rows, offsets = (
        torch.stack([tensor, tensor], dim=1).to(device, dtype)[:, 0]
        for tensor in bags_of([4, 0, 9, 2], 6)
    )
    sample_weights = (randn(2 * len(rows)).abs() + 0.5).to(device)[::2]
    weight = randn(5, 6).to(device).t()
    for tensor in (weight, rows, offsets, sample_weights):
        assert not tensor.is_contiguous()
    check(weight, rows, offsets, combiner, sample_weights, device)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@weighted_or_not
@all_combiners
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_that_are_not_aligned(device, dim, combiner, weighted, dtype):
    # Lengths of 1, 4 and 16 make divisions exact, and whole numbers make sums exact.
    rows, offsets = (tensor.to(device) for tensor in bags_of([1, 0, 4, 16], 5))
    weight = whole_numbers(5, dim, dtype=dtype).to(device)
    upstream = whole_numbers(4, dim, dtype=dtype, seed=1).to(device)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    ones = torch.ones(len(rows), dtype=accumulate, device=device)

    def compute(copy_weight, copy_upstream):
        leaves = [copy_weight(weight).requires_grad_()]
        if weighted:
            leaves.append(ones.clone().requires_grad_())
        out = ops.embedding_bag(leaves[0], rows, offsets, combiner, *leaves[1:])
        return out, *torch.autograd.grad(out, leaves, copy_upstream(upstream))

    expected = compute(torch.clone, torch.clone)
    for copies in ((misaligned, torch.clone), (torch.clone, misaligned), (misaligned, misaligned)):
        for one, other in zip(compute(*copies), expected, strict=True):
            assert same_bits(one, other)


def test_bfloat16_is_added_in_float32(device):
    weight = torch.ones(1, 3, dtype=torch.bfloat16, device=device, requires_grad=True)
    rows = torch.zeros(1000, dtype=torch.int64, device=device)
    offsets = torch.tensor([0, 1000], device=device)
    out = ops.embedding_bag(weight, rows, offsets)
    assert out.tolist() == [[1000.0] * 3]
    out.sum().backward()
    assert weight.grad.tolist() == [[1000.0] * 3]


@pytest.mark.parametrize("given_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sample_weights_of_any_floating_dtype(device, given_dtype):
    rows, offsets = bags_of([3, 2], 4, lowest=0)
    sample_weights = torch.tensor([0.5, 2, 1, 4, 0.25], dtype=given_dtype, device=device)
    weight = whole_numbers(4, 3).to(device)
    leaf = sample_weights.clone().requires_grad_()
    out = ops.embedding_bag(weight, rows.to(device), offsets.to(device), "sum", leaf)
    expected = reference.embedding_bag(weight.cpu(), rows, offsets, "sum", sample_weights.cpu())
    assert torch.equal(out.detach().cpu(), expected)
    out.sum().backward()
    assert leaf.grad.dtype == given_dtype
    assert torch.equal(leaf.grad.cpu(), weight.cpu().sum(1)[rows].to(given_dtype))


@pytest.mark.pairs(any_device=True)
@weighted_or_not
@all_combiners
def test_bits_do_not_depend_on_threads(device, combiner, weighted):
    rows, offsets = bags_of([7] * 900 + [0, 3000, 1], 200)
    rows[::2] = 3  # a frequent row spans several chunks of the backward
    weights = [(randn(len(rows)).to(device).abs() + 0.5).requires_grad_()] if weighted else []
    rows, offsets = rows.to(device), offsets.to(device)
    weight = randn(200, 65).to(device).requires_grad_()

    def compute():
        out = ops.embedding_bag(weight, rows, offsets, combiner, *weights)
        return [out, *torch.autograd.grad((out * out).sum(), [weight, *weights])]

    assert_same_bits_for_any_threads(compute)


@weighted_or_not
@all_combiners
def test_gradient(device, combiner, weighted):
    rows = torch.tensor([0, 3, 3, -1, 2, 0, 3], device=device)
    offsets = torch.tensor([0, 0, 3, 5, 6, 6, 7], device=device)
    weight = randn(5, 3, dtype=torch.float64).to(device).requires_grad_()
    pool = functools.partial(_pool, rows, offsets, combiner)
    if not weighted:
        assert torch.autograd.gradcheck(pool, (weight,))
        return
    values = [0.7, -1.3, 2.0, 1.5, 0.4, -0.8, 3.0]  # so that no bag's sum is near zero
    sample_weights = torch.tensor(values, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(pool, (weight, sample_weights))
    assert torch.autograd.gradcheck(pool, (weight.detach(), sample_weights))
    assert torch.autograd.gradcheck(pool, (weight, sample_weights.detach()))


def _pool(rows, offsets, combiner, weight, *sample_weights):
    return ops.embedding_bag(weight, rows, offsets, combiner, *sample_weights)


def test_the_table_may_change_before_a_backward_that_does_not_read_it(device):
    weight = torch.ones(2, 3, device=device, requires_grad=True)
    rows, offsets = torch.tensor([0, 1], device=device), torch.tensor([0, 2], device=device)
    sample_weights = torch.ones(2, device=device)
    for constants in (None, sample_weights):
        weight.grad = None
        out = ops.embedding_bag(weight, rows, offsets, "sum", constants)
        with torch.no_grad():
            weight.mul_(2)
        out.sum().backward()
        assert weight.grad.tolist() == [[1.0] * 3] * 2

    sample_weights.requires_grad_()
    out = ops.embedding_bag(weight, rows, offsets, "sum", sample_weights)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


ONES = torch.ones(3, 2)
ROWS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((ONES, ROWS, [0, 3], "max"), ValueError, "combiner must be one of .* got 'max'"),
        ((ONES[0], ROWS, [0, 3]), ValueError, r"weight must have 2 dimension\(s\)"),
        ((ONES.half(), ROWS, [0, 3]), TypeError, "weight must be float32 or"),
        ((ONES, ROWS.double(), [0, 3]), TypeError, "rows must be int64 or int32"),
        ((ONES, ROWS, []), ValueError, "offsets must have one element more"),
        ((ONES, ROWS, [1, 3]), ValueError, r"offsets\[0\] is 1"),
        ((ONES, ROWS, [-1, 3]), ValueError, r"offsets\[0\] is -1"),
        ((ONES, ROWS, [0, 2, 1, 3]), ValueError, r"offsets\[2\] is 1"),
        ((ONES, ROWS, [0, 2]), ValueError, r"to len\(rows\) = 3, but offsets\[1\] is 2"),
        ((ONES, ROWS, [0, 4, 3]), ValueError, r"offsets\[1\] is 4"),
        ((ONES, ROWS, [0]), ValueError, r"offsets\[0\] is 0"),
        ((ONES, ROWS, [0, 3], "sum", ROWS), TypeError, "sample_weights must be float32 or"),
        (
            (ONES, ROWS, [0, 3], "sum", ONES[:, 0][:2]),
            ValueError,
            "sample_weights must have size 3",
        ),
        ((ONES, ROWS + 1, [0, 3]), IndexError, r"rows\[2\] is 3, but weight has 3 rows"),
        ((ONES, ROWS.to("meta"), [0, 3]), ValueError, "rows on meta"),
    ],
)
def test_what_is_refused(arguments, error, message):
    weight, rows, offsets, *rest = arguments
    with pytest.raises(error, match=f"embedding_bag: .*{message}"):
        ops.embedding_bag(weight, rows, torch.tensor(offsets, dtype=torch.int64), *rest)


@all_combiners
def test_a_row_out_of_range_of_a_table_without_columns(device, combiner):
    weight = torch.ones(3, 0, device=device)
    rows = torch.tensor([0, 2, 3, 4], device=device)
    offsets = torch.tensor([0, 1, 4], device=device)
    with pytest.raises(IndexError, match=r"rows\[2\] is 3, but weight has 3 rows"):
        ops.embedding_bag(weight, rows, offsets, combiner)
    assert ops.embedding_bag(weight, rows - 2, offsets, combiner).shape == (2, 0)


# Arguments of the backward ops: two bags with one and two rows of a 4 x 2 table.
BACKWARD = {
    "grad": torch.ones(2, 2),
    "weight": torch.ones(4, 2),
    "rows": ROWS,
    "offsets": torch.tensor([0, 1, 3]),
    "combiner": 0,
    "sample_weights": torch.ones(3),
    "num_rows": 4,
}
BOTH = ("embedding_bag_backward", "embedding_bag_backward_sample_weights")


def call_backward(op, **changes):
    arguments = {**BACKWARD, **changes}
    del arguments["weight" if op == BOTH[0] else "num_rows"]
    return getattr(torch.ops.sparsekit, op)(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message", "ops"),
    [
        ({"grad": ONES}, ValueError, r"grad must have size 2 in dimension 0, got 3", BOTH),
        ({"grad": ONES[:1]}, ValueError, r"grad must have size 2 in dimension 0, got 1", BOTH),
        ({"grad": ONES[:0]}, ValueError, r"grad must have size 2 in dimension 0, got 0", BOTH),
        ({"grad": ONES[0]}, ValueError, r"grad must have 2 dimension\(s\), got 1", BOTH),
        ({"grad": ONES[:2].half()}, ValueError, "must (be float32|have dtype Float)", BOTH),
        ({"grad": ONES[:2].double()}, ValueError, "must have dtype", BOTH),
        ({"grad": torch.ones(2, 3)}, ValueError, "grad must have size 2 in dimension 1", BOTH[1:]),
        ({"grad": torch.ones(2, 1)}, ValueError, "grad must have size 2 in dimension 1", BOTH[1:]),
        ({"weight": torch.ones(4)}, ValueError, "weight must have 2 dimension", BOTH[1:]),
        ({"rows": ROWS[:2]}, ValueError, "sample_weights must have size 2", BOTH),
        ({"rows": ROWS[None]}, ValueError, "rows must have 1 dimension", BOTH),
        ({"rows": ROWS + 2}, IndexError, r"rows\[2\] is 4, but weight has 4 rows", BOTH),
        ({"offsets": torch.tensor([0, 3])}, ValueError, "grad must have size 1", BOTH),
        ({"offsets": torch.tensor([0, 1, 2])}, ValueError, r"offsets\[2\] is 2", BOTH),
        ({"offsets": torch.tensor([0, 4, 3])}, ValueError, r"offsets\[1\] is 4", BOTH),
        ({"offsets": ROWS[:0]}, ValueError, "offsets must have one element more", BOTH),
        ({"combiner": 3}, ValueError, "combiner must be 0", BOTH),
        ({"sample_weights": torch.ones(2)}, ValueError, "sample_weights must have size 3", BOTH),
        ({"sample_weights": torch.ones(3).double()}, ValueError, "must have dtype Float", BOTH),
        ({"num_rows": 2}, IndexError, r"rows\[2\] is 2, but weight has 2 rows", BOTH[:1]),
        ({"num_rows": -1}, ValueError, r"num_rows must be in \[0", BOTH[:1]),
    ],
)
def test_what_the_backward_ops_refuse(engine, changes, error, message, ops):
    for op in ops:
        assert call_backward(op).shape == ((4, 2) if op == BOTH[0] else (3,))
        with pytest.raises(error, match=f"^{op}: .*{message}"):
            call_backward(op, **changes)


@pytest.mark.parametrize("bags", [255, 256, 257])
def test_the_last_offset_is_checked_among_many_bags(engine, bags):
    offsets = torch.zeros(bags + 1, dtype=torch.int64)
    offsets[-1] = 2  # there are 3 rows
    message = rf"to len\(rows\) = 3, but offsets\[{bags}\] is 2"
    with pytest.raises(ValueError, match=message):
        ops.embedding_bag(ONES, ROWS, offsets)
    for op in BOTH:
        with pytest.raises(ValueError, match=message):
            call_backward(op, grad=torch.ones(bags, 2), offsets=offsets)


@pytest.mark.pairs
@all_combiners
@pytest.mark.parametrize("n", [257, 512, 70_000, 150_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_of_a_long_sum_is_bounded(device, n, dtype, combiner):
    """The documented error bound holds even if all rounding errors have the same sign.

    Repeated numbers with one exponent round in the same direction many times; a sequential sum of
    70,000 of them exceeds the bound tenfold.
    """
    unit = torch.finfo(dtype).eps / 2
    weight = torch.tensor([[0.1, 0.7, 1 / 3, 0.9, 1.1]] * 3, dtype=dtype)
    weight[1] *= 1 + 2.0**-9
    rows = torch.arange(n) % 3
    samples = torch.full((n,), 1 / 3, dtype=dtype)
    offsets = torch.tensor([0, n, n])
    exact = weight[rows].numpy().astype(np.longdouble) * samples.numpy()[:, None]
    exact = np.array([math.fsum(column) for column in exact.T.astype(np.float64)])
    pooled = ops.embedding_bag(
        *(t.to(device) for t in (weight, rows, offsets)), combiner, samples.to(device)
    )
    # Roundings that affect a term: in its additions, in its product with the weight, and when the
    # exact product is rounded.
    factors = 256 + n / 256 + 1
    if combiner == "mean":
        exact, factors = exact / math.fsum(samples.tolist()), 2 * factors + 1
    elif combiner == "sqrtn":
        squares = samples.double() ** 2
        exact, factors = exact / math.sqrt(math.fsum(squares.tolist())), 2 * factors + 2
    bound = factors * unit / (1 - factors * unit)
    off = np.abs(pooled[0].cpu().double().numpy() / exact - 1)
    assert (off <= bound + 2.0**-52).all(), (off.max(), bound)
    assert pooled[1].tolist() == [0.0] * 5


def test_an_infinite_row_in_a_bag_whose_weights_cancel_is_zeros(device) -> None:
    weight = torch.full((1, 3), torch.inf, device=device)
    rows, offsets = torch.tensor([0, 0], device=device), torch.tensor([0, 2], device=device)
    weights = torch.tensor([1.0, -1.0], device=device)
    pooled = ops.embedding_bag(weight, rows, offsets, "mean", weights)
    assert pooled.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_a_tiny_weight_is_as_good_as_one(device, combiner: str) -> None:
    weight = torch.tensor([[2.0, -3.0]], device=device, requires_grad=True)
    rows, offsets = torch.tensor([0], device=device), torch.tensor([0, 1], device=device)
    tiny = torch.tensor([1e-40 if combiner == "mean" else 1e-18], device=device)
    pooled = ops.embedding_bag(weight, rows, offsets, combiner, tiny)
    torch.testing.assert_close(pooled, weight, rtol=1e-4, atol=0)
    pooled.sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones_like(weight), rtol=1e-4, atol=0)


def test_second_derivatives(device) -> None:
    weight = randn(4, 3, dtype=torch.float64).to(device).requires_grad_()
    rows = torch.tensor([0, 3, 3, 1], device=device)
    offsets = torch.tensor([0, 1, 4], device=device)
    weights = (randn(4, dtype=torch.float64).abs() + 0.5).to(device)

    def cubed(w: torch.Tensor) -> torch.Tensor:
        return ops.embedding_bag(w, rows, offsets, "mean", weights) ** 3

    assert torch.autograd.gradgradcheck(cubed, (weight,))
    weights.requires_grad_()
    for first in (weights, weight):
        (grad,) = torch.autograd.grad(cubed(weight).sum(), first, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            grad.sum().backward()


def test_a_size_beyond_any_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_segments must be in \[0, 2\^48\)"):
        ops.unsorted_segment_sum(torch.ones(0, 0), torch.ones(0, dtype=torch.int64), 2**61)
    with pytest.raises(TypeError):
        ops.unsorted_segment_sum(torch.ones(0, 0), torch.ones(0, dtype=torch.int64), 2.5)
