"""Pooling of table rows into bags."""

from typing import Any

import torch

from ._checks import (
    KEY_DTYPES,
    ROW_DTYPES,
    CheckedOp,
    accumulate_dtype,
    check_same_device,
    check_tensor,
)

COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2}

_ops = torch.ops.sparsekit
_op = _ops.embedding_bag.default
_checked = CheckedOp(
    _op, gradient=True, weight=(ROW_DTYPES, 2), rows=(KEY_DTYPES, 1), offsets=(KEY_DTYPES, 1)
)


def check_combiner(name: str, combiner: str) -> None:
    """Raise ValueError unless combiner is one of ``COMBINERS``; ``name`` begins the message."""
    if combiner not in COMBINERS:
        raise ValueError(f"{name}: combiner must be one of {list(COMBINERS)}, got {combiner!r}")


def embedding_bag(
    weight: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    combiner: str = "sum",
    sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool rows of a table into bags; bag b pools ``rows[offsets[b]:offsets[b + 1]]``.

    With rows x_i and weights w_i (1 without sample_weights), the bag is

    - ``"sum"``: S = sum w_i x_i
    - ``"mean"``: S / sum w_i, as in TensorFlow; FBGEMM divides by the number of rows
    - ``"sqrtn"``: S / sqrt(sum w_i^2), as in TensorFlow's ``embedding_lookup_sparse``

    and zeros where it is empty or the divisor is zero. Differentiable in weight and
    sample_weights; the gradient for weight is dense.

    Args:
        weight: float32, float64 or bfloat16 (added in float32) ``[num_rows, dim]``.
        rows: int64 or int32 ``[n]``; a negative row stands for a vector of zeros.
        offsets: int64 or int32 ``[bags + 1]``, rising from 0 to n.
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``.
        sample_weights: floating point ``[n]``, or None.

    Returns:
        ``[bags, dim]`` in the dtype of weight. Every engine adds the n rows of a bag in runs of 256
        and then the sums of the runs, so no term passes through more than ``k = 256 + n / 256``
        additions and, before rounding to bfloat16, ``|error of S| <= (k + 1) u / (1 - (k + 1) u) *
        sum |w_i x_i|`` with u = 2^-24 (2^-53 for float64): Higham, "Accuracy and stability of
        numerical algorithms", 2nd edition, section 4.2. A bag of 70,000 rows of one sign is so
        within 3.2e-5 of its sum.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, combiner or offset; the message has its position.
        IndexError: a row >= num_rows; the message has its position.
    """
    name = "embedding_bag"
    check_combiner(name, combiner)
    if sample_weights is not None:
        _checked.check(weight, rows, offsets)
        check_tensor(name, "sample_weights", sample_weights, (*ROW_DTYPES, torch.float16), 1)
        check_same_device(name, weight=weight, sample_weights=sample_weights)
        sample_weights = sample_weights.to(accumulate_dtype(weight.dtype))
    return _checked(weight, rows, offsets, COMBINERS[combiner], sample_weights)


@torch.library.register_fake("sparsekit::embedding_bag")
def _(
    weight: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    combiner: int,
    sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    _checked.check(weight, rows, offsets)
    check_same_device("embedding_bag", weight=weight, sample_weights=sample_weights)
    return weight.new_empty([offsets.shape[0] - 1, weight.shape[1]])


@torch.library.register_fake("sparsekit::embedding_bag_backward")
def _(
    grad: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    combiner: int,
    sample_weights: torch.Tensor | None,
    num_rows: int,
    deterministic: bool = True,
) -> torch.Tensor:
    op = "embedding_bag_backward"
    check_same_device(op, grad=grad, rows=rows, offsets=offsets, sample_weights=sample_weights)
    return grad.new_empty([num_rows, grad.shape[1]])


@torch.library.register_fake("sparsekit::embedding_bag_backward_sample_weights")
def _(
    grad: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    combiner: int,
    sample_weights: torch.Tensor,
) -> torch.Tensor:
    op = "embedding_bag_backward_sample_weights"
    named = {"weight": weight, "rows": rows, "offsets": offsets, "sample_weights": sample_weights}
    check_same_device(op, grad=grad, **named)
    return torch.empty_like(sample_weights)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, rows, offsets, combiner, sample_weights = inputs
    # Only the gradient for sample_weights reads the table; without it the table is free to change
    # before the backward.
    kept = weight if sample_weights is not None and sample_weights.requires_grad else None
    ctx.save_for_backward(rows, offsets, sample_weights, kept)
    ctx.combiner = combiner
    ctx.num_rows = weight.shape[0]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, offsets, sample_weights, weight = ctx.saved_tensors
    grad_weight = grad_sample_weights = None
    if ctx.needs_input_grad[0]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        grad_weight = _ops.embedding_bag_backward.default(
            grad, rows, offsets, ctx.combiner, sample_weights, ctx.num_rows, deterministic
        )
    if weight is not None:
        grad_sample_weights = _ops.embedding_bag_backward_sample_weights.default(
            grad, weight, rows, offsets, ctx.combiner, sample_weights
        )
    return grad_weight, None, None, None, grad_sample_weights


torch.library.register_autograd("sparsekit::embedding_bag", _backward, setup_context=_setup)


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, rows, offsets, combiner, sample_weights, *_ = inputs
    ctx.save_for_backward(rows, offsets, sample_weights)
    ctx.combiner = combiner


def _backward_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    if any(ctx.needs_input_grad[1:]):
        _no_second_derivative(ctx, grad)
    # The gradient is linear in what it came from, and the pooling is its transpose.
    rows, offsets, sample_weights = ctx.saved_tensors
    grad_grad = _op(grad, rows, offsets, ctx.combiner, sample_weights)
    return grad_grad, None, None, None, None, None, None


def _no_second_derivative(ctx: Any, grad: torch.Tensor) -> Any:
    raise NotImplementedError("embedding_bag: no second derivative with respect to sample_weights")


torch.library.register_autograd(
    "sparsekit::embedding_bag_backward", _backward_backward, setup_context=_setup_backward
)
torch.library.register_autograd(
    "sparsekit::embedding_bag_backward_sample_weights", _no_second_derivative
)
