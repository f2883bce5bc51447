"""Pools table rows into bags."""

from typing import Any

import torch

from ._checks import FLOATING, KEY_DTYPES, ROW_DTYPES, accumulate_dtype, check_tensor
from ._op import Of, Op

COMBINERS = {"sum": 0, "mean": 1, "sqrtn": 2}

_TENSORS = {
    "weight": Of(ROW_DTYPES, 2),
    "rows": Of(KEY_DTYPES, 1),
    "offsets": Of(KEY_DTYPES, 1),
    "sample_weights": Of((torch.float32, torch.float64), 1),
}
_pool = Op("embedding_bag", _TENSORS, gradient=True)
_pool_backward = Op("embedding_bag_backward", {})
_pool_backward_sample_weights = Op("embedding_bag_backward_sample_weights", {})


def check_combiner(name: str, combiner: str) -> None:
    """Raise ValueError unless combiner is one of ``COMBINERS``; `name` is for the error message."""
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

    A bag is zeros if it is empty or its divisor is zero. The result is differentiable in weight and
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
        additions. Before rounding to bfloat16, ``|error of S| <= (k + 1) u / (1 - (k + 1) u) *
        sum |w_i x_i|`` with u = 2^-24 (2^-53 for float64); see Higham, "Accuracy and stability of
        numerical algorithms", 2nd edition, section 4.2. For example, the sum of 70,000 rows of one
        sign has a relative error of at most 3.2e-5.

    Raises:
        TypeError: a wrong dtype.
        ValueError: a wrong shape, combiner or offset; the message gives an offset's position.
        IndexError: a row >= num_rows; the message gives its position.
    """
    name = "embedding_bag"
    check_combiner(name, combiner)
    if sample_weights is not None:
        check_tensor(name, "sample_weights", sample_weights, FLOATING, 1)
        _pool.check(weight, rows, offsets)
        sample_weights = sample_weights.to(accumulate_dtype(weight.dtype))
    return _pool(weight, rows, offsets, COMBINERS[combiner], sample_weights)


@_pool.fake
def _(weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return weight.new_empty([offsets.shape[0] - 1, weight.shape[1]])


@_pool_backward.fake
def _(grad: torch.Tensor, num_rows: int) -> torch.Tensor:
    return grad.new_empty([num_rows, grad.shape[1]])


@_pool_backward_sample_weights.fake
def _(sample_weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(sample_weights)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, rows, offsets, combiner, sample_weights = inputs
    # Save the table only if the gradient for sample_weights needs it. If it is not saved, callers
    # are free to change the table before the backward.
    kept = weight if sample_weights is not None and sample_weights.requires_grad else None
    ctx.save_for_backward(rows, offsets, sample_weights, kept)
    ctx.combiner = combiner
    ctx.num_rows = weight.shape[0]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, offsets, sample_weights, weight = ctx.saved_tensors
    grad_weight = grad_sample_weights = None
    if ctx.needs_input_grad[0]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        grad_weight = _pool_backward.op(
            grad, rows, offsets, ctx.combiner, sample_weights, ctx.num_rows, deterministic
        )
    if weight is not None:
        grad_sample_weights = _pool_backward_sample_weights.op(
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
    # The backward is linear in grad, and pooling is the transpose of this linear map.
    rows, offsets, sample_weights = ctx.saved_tensors
    grad_grad = _pool.op(grad, rows, offsets, ctx.combiner, sample_weights)
    return grad_grad, None, None, None, None, None, None


def _no_second_derivative(ctx: Any, grad: torch.Tensor) -> Any:
    raise NotImplementedError("embedding_bag: no second derivative with respect to sample_weights")


torch.library.register_autograd(
    "sparsekit::embedding_bag_backward", _backward_backward, setup_context=_setup_backward
)
torch.library.register_autograd(
    "sparsekit::embedding_bag_backward_sample_weights", _no_second_derivative
)
