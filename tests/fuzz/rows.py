"""Cases of the ops on rows: gathering, segment sums, bags and gradients, initial vectors."""

from contextlib import contextmanager

import torch
from conftest import deterministic, same_bits

from sparsekit import ops
from sparsekit.ops._checks import accumulate_dtype
from sparsekit.ops.embedding_bag import COMBINERS

from ..reference import ops as reference
from .case import Case

SPECIAL = [float("inf"), float("-inf"), float("nan"), -0.0, 1e-42, 3e38]


@contextmanager
def _any_order(case: Case):
    with deterministic(case.maybe(0.5)):
        yield


def gather_rows(case: Case) -> None:
    n, num_rows, dtype = case.size(case.most(5000, 2000)), case.size(400), case.row_dtype()
    dim = case.dim(max(n, num_rows))
    values = case.floats(num_rows, dim, dtype=dtype)
    if case.maybe(0.2) and values.numel():
        values.view(-1)[:: case.random.randint(1, 9)] = case.any_of(*SPECIAL)
    table = case.placed(values).requires_grad_()
    rows = case.placed(case.integers(-2, num_rows - 1, n, case.key_dtype()))
    if num_rows == 0:
        rows = -rows.abs() - 1
    result = case.call(ops.gather_rows, table, rows)
    case.same("rows", result.detach(), reference.gather_rows(values, rows))

    upstream = case.placed(case.floats(n, dim, dtype=dtype, kind=case.any_of("any", "whole")))
    with _any_order(case):
        (grad,) = case.call(torch.autograd.grad, result, table, upstream)
    _check_sum(case, "gradient", grad, upstream, rows, num_rows)


def _check_sum(case, name, actual, data, ids, num_segments) -> None:
    """Check a segment sum; sums of whole numbers must be exact."""
    wide = data.double()
    expected = reference.unsorted_segment_sum(wide, ids, num_segments)
    magnitude = reference.unsorted_segment_sum(wide.abs(), ids, num_segments)
    if bool((wide == wide.round()).all()):
        case.same(name, actual + 0.0, expected.to(actual.dtype) + 0.0)
    else:
        kept = ids[ids >= 0]
        terms = int(torch.bincount(kept).max()) if len(kept) else 0
        case.close(name, actual, expected, magnitude, terms)


def unsorted_segment_sum(case: Case) -> None:
    n = case.random.randint(0, 60_000) if case.maybe(0.02) else case.size(case.most(6000, 2500))
    dtype = case.row_dtype()
    num_segments = case.any_of(1, 2, 40, 1000, case.size(5000))
    dim = case.dim(n)
    data = case.placed(case.floats(n, dim, dtype=dtype, kind=case.any_of("any", "whole")))
    ids = _ids(case, n, num_segments)
    with _any_order(case):
        result = case.call(
            ops.unsorted_segment_sum, data.requires_grad_(), case.placed(ids), num_segments
        )
    _check_sum(case, "sums", result.detach(), data.detach(), ids, num_segments)
    upstream = case.placed(case.floats(num_segments, dim, dtype=dtype))
    (grad,) = case.call(torch.autograd.grad, result, data, upstream)
    case.same("gradient", grad, reference.gather_rows(upstream, ids))


def _ids(case, n, num_segments) -> torch.Tensor:
    dtype = case.key_dtype()
    if num_segments == 0 or case.maybe(0.05):
        return -case.integers(1, 9, n, dtype)
    kind = case.any_of("random", "sorted", "one", "hot", "dropped", "zipf")
    ids = case.integers(0, num_segments - 1, n)
    if kind == "sorted":
        ids = ids.sort().values
    if kind == "one":
        ids[:] = num_segments - 1
    if kind == "hot":
        ids[:: case.any_of(1, 2, 3)] = case.random.randrange(num_segments)
    if kind == "dropped":
        ids = torch.where(ids % 2 == 0, -1 - ids, ids)
    if kind == "zipf":
        ids = (num_segments ** torch.rand(n, generator=case.generator)).long() - 1
    return ids.to(dtype)


def _lengths(case) -> list[int]:
    """Draw the lengths of bags: mostly short, sometimes longer than a part or a chunk."""
    bags = case.size(case.most(600, 200))
    kind = case.any_of("short", "short", "empty", "one", "long", "very long")
    lengths = [case.random.randrange(12) for _ in range(bags)]
    if kind == "empty":
        lengths = [length if case.maybe(0.05) else 0 for length in lengths]
    if kind == "one":
        lengths = [1] * bags
    if kind == "long":
        for _ in range(case.random.randint(1, 3)):
            length = case.any_of(255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049)
            lengths.insert(case.random.randint(0, len(lengths)), length)
    if kind == "very long" and case.maybe(0.1):
        lengths = [*lengths[:3], case.any_of(65_535, 65_536, 65_537, 66_000), *lengths[3:6]]
    return lengths


def embedding_bag(case: Case) -> None:
    lengths, dtype = _lengths(case), case.row_dtype()
    n, num_rows = sum(lengths), 1 + case.size(300)
    dim = case.any_of(1, 2, 4) if n > 20_000 else case.dim(max(n, num_rows, len(lengths)))
    combiner = case.any_of(*COMBINERS)
    weight = case.floats(num_rows, dim, dtype=dtype, kind=case.any_of("any", "whole"))
    rows = case.keys(n, torch.int64) % (num_rows + 1) - 1
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    sample_weights = None
    if case.maybe(0.5):
        sample_weights = _sample_weights(case, n, accumulate_dtype(dtype))
    leaves = [case.placed(weight).requires_grad_()]
    if sample_weights is not None:
        leaves.append(case.placed(sample_weights).requires_grad_())
    pooled = case.call(
        ops.embedding_bag,
        leaves[0],
        case.placed(rows.to(case.key_dtype())),
        case.placed(offsets.to(case.key_dtype())),
        combiner,
        *leaves[1:],
    )
    upstream = case.placed(case.floats(len(lengths), dim, dtype=dtype))
    with _any_order(case):
        grads = case.call(torch.autograd.grad, pooled, leaves, upstream)
    wanted = _pooled_in_double(weight, rows, offsets, combiner, sample_weights, upstream)
    hits = int(torch.bincount(rows[rows >= 0], minlength=1).max())
    terms = max([*lengths, 1]), hits + max([*lengths, 1]), dim + 2 * max([*lengths, 1])
    names = "pooled", "gradient", "gradient of sample_weights"
    for name, result, (expected, magnitude), count in zip(
        names, [pooled.detach(), *grads], wanted, terms, strict=False
    ):
        case.close(name, result, expected, magnitude, count)


def _sample_weights(case, n, dtype) -> torch.Tensor:
    """Draw weights whose sums may be exactly zero, but never nearly zero through rounding."""
    if case.maybe(0.3):
        return case.floats(n, dtype=dtype, kind="whole").sign()
    return (torch.rand(n, generator=case.generator, dtype=torch.float64) + 0.5).to(dtype)


def _pooled_in_double(weight, rows, offsets, combiner, sample_weights, upstream):
    """Compute bags and gradients in float64; return each with the magnitude of its terms."""
    weight, g = weight.double(), upstream.double()
    bags = len(offsets) - 1
    bag = torch.repeat_interleave(torch.arange(bags), offsets.diff())
    w = weight.new_ones(len(rows)) if sample_weights is None else sample_weights.double()

    def by_bag(terms):
        return terms.new_zeros(bags, *terms.shape[1:]).index_add(0, bag, terms)

    def by_row(terms):
        kept = rows >= 0
        return terms.new_zeros(len(weight), g.shape[1]).index_add(0, rows[kept], terms[kept])

    total = by_bag(w) if combiner == "mean" else by_bag(w * w).sqrt()
    d = torch.ones_like(total) if combiner == "sum" else total
    inverse = torch.where(d == 0, 0.0, 1 / d)  # dividing by zero gives zeros
    x = reference.gather_rows(weight, rows)
    results = [
        (
            by_bag(w[:, None] * x) * inverse[:, None],
            by_bag((w[:, None] * x).abs()) * inverse.abs()[:, None],
        ),
    ]
    shares = (w * inverse[bag])[:, None] * g[bag]
    results.append((by_row(shares), by_row(shares.abs())))
    dots, magnitude = (g[bag] * x).sum(1), (g[bag] * x).abs().sum(1)
    if combiner != "sum":
        part = w if combiner == "sqrtn" else torch.ones_like(w)
        down = inverse**2 if combiner == "sqrtn" else inverse
        shared = part * (by_bag(w * dots) * down)[bag]
        size = part.abs() * (by_bag(w.abs() * magnitude) * down.abs())[bag]
        dots, magnitude = (dots - shared) * inverse[bag], (magnitude + size) * inverse[bag].abs()
    results.append((dots, magnitude))
    return results


def init_rows(case: Case) -> None:
    dtype, num_rows = case.row_dtype(), case.size(case.most(1500, 600))
    dim = case.dim(num_rows)
    in_order = case.maybe(0.3)
    n = num_rows if in_order else case.random.randint(0, num_rows)
    keys = case.placed(case.keys(n, torch.int64))
    rows = status = None
    if not in_order:
        rows = torch.randperm(num_rows, generator=case.generator)[:n]
        rows = case.placed(torch.where(case.integers(0, 4, n) == 0, -1 - rows, rows))
        if case.maybe(0.5):
            status = torch.tensor([case.any_of(0, num_rows // 2, num_rows, -1), 0])
    distribution = case.any_of("constant", "uniform", "normal")
    a, b = case.any_of((-0.05, 0.05), (0.0, 1.0), (3.0, 7.5), (-1e-30, 1e-30))
    settings = {"seed": case.any_of(0, -1, 2**64 - 1, case.random.getrandbits(64))}
    settings |= {"distribution": distribution, "a": a, "b": b}
    out = case.floats(num_rows, dim, dtype=dtype)
    expected = out.clone()
    case.call(ops.init_rows_, out, keys, rows, status, changes=[out], **settings)
    reference.init_rows_(expected, keys, rows, status, **settings)
    if same_bits(out, expected) or distribution != "normal":
        return case.same("vectors", out, expected)
    return case.close("vectors", out, expected.double(), expected.double().abs())


OPS = {
    "gather_rows": gather_rows,
    "unsorted_segment_sum": unsorted_segment_sum,
    "embedding_bag": embedding_bag,
    "init_rows": init_rows,
}
