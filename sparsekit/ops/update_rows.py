"""One fused optimizer step over rows; `sparsekit.optim` has the optimizers."""

from collections.abc import Sequence

import torch

from ._checks import ROW_DTYPES, check_same_device, check_tensor

_op = torch.ops.sparsekit.update_rows_.default


def update_rows_(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    row_step: torch.Tensor | None,
    rows: torch.Tensor | None,
    grad: torch.Tensor,
    step: torch.Tensor,
    rule: str,
    settings: Sequence[float],
    *,
    per_row: bool = False,
    rounding_seed: int | None = None,
    counter: torch.Tensor | None = None,
) -> None:
    """One step of an optimizer on the rows that have a gradient; all other rows keep their bits.

    ========================  ========================================  ==========================
    rule                      settings                                  states
    ========================  ========================================  ==========================
    ``"sgd"``                 lr, momentum, weight_decay, nesterov      none, or momentum
    ``"adam"``                lr, beta1, beta2, eps, weight_decay,      m, v, and for amsgrad the
                              rescale_eps                               largest v
    ``"adagrad"``             lr, lr_decay, eps                         sum of squares
    ``"row_wise_adagrad"``    lr, lr_decay, eps                         sum of mean squares, one
                                                                        for a row
    ``"rms_prop"``            lr, alpha, eps, momentum, eps_inside      mean square, then momentum
                                                                        if there is any
    ``"ftrl"``                lr, l1, l2, lr_power                      n, z
    ========================  ========================================  ==========================

    The formulas are in `sparsekit.optim`; csrc/core/include/sparsekit/optimizer_rules.h has them
    as they are computed.

    Args:
        weight: float32, float64 or bfloat16 ``[num_rows, dim]``, changed in place.
        states: ``[num_rows, dim]`` each, ``[num_rows, 1]`` where there is one for a row; float32
            for bfloat16 rows, else as weight. Rows are contiguous and may lie apart, so that all
            states of a row can be neighbours. Changed in place.
        row_step: int32 ``[num_rows]`` or None: the steps of each row; see per_row.
        rows: int64 ``[n]``, distinct; None means row i for gradient i.
        grad: ``[n, dim]`` in the dtype of weight.
        step: int64, one element: the number of this step, from 1 on.
        rule: the optimizer.
        settings: its settings, in the order above.
        per_row: count each row's steps in row_step, and use that count in place of step. Without
            it, row_step is set to step. Its largest number, 2^31 - 1, stands for all later steps.
        rounding_seed: round bfloat16 weights up or down at random, with odds that make the mean
            exact; the draws depend on this seed, step, row and column only. None rounds to the
            nearest.
        counter: int64, one element, or None: set to step in the same call, so that an interruption
            cannot come between the rows and their number of steps.

    Raises:
        TypeError: weight has a wrong dtype.
        ValueError: a wrong shape, dtype or rule, a mix of devices, or what is changed shares memory
            with another argument. States may be interleaved.
        IndexError: a row outside ``[0, num_rows)``; on the CPU nothing has been changed,
            on CUDA the other rows have.
    """
    _check(weight, states, row_step, rows, grad, step, None, counter)
    seed = rounding_seed
    if seed is not None:
        seed = (seed + 2**63) % 2**64 - 2**63  # the same 64 bits, signed
    _op(weight, states, row_step, rows, grad, step, rule, settings, per_row, seed, None, counter)
    # Ops outside of torch do not count as a change by themselves; without this, a backward that
    # saved the old weight would use the new one in silence.
    torch.autograd.graph.increment_version(weight)


def _check(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    row_step: torch.Tensor | None,
    rows: torch.Tensor | None,
    grad: torch.Tensor,
    step: torch.Tensor,
    num_grads: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
) -> None:
    op = "update_rows_"
    check_tensor(op, "weight", weight, ROW_DTYPES, 2)
    named = {f"states[{k}]": state for k, state in enumerate(states)}
    optional = {"row_step": row_step, "rows": rows, "num_grads": num_grads, "counter": counter}
    check_same_device(op, weight=weight, **named, **optional, grad=grad, step=step)


@torch.library.register_fake("sparsekit::update_rows_")
def _(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    row_step: torch.Tensor | None,
    rows: torch.Tensor | None,
    grad: torch.Tensor,
    step: torch.Tensor,
    rule: str,
    settings: Sequence[float],
    per_row: bool = False,
    rounding_seed: int | None = None,
    num_grads: torch.Tensor | None = None,
    counter: torch.Tensor | None = None,
) -> None:
    # Also what torch calls for real tensors when one argument is on the meta device.
    _check(weight, states, row_step, rows, grad, step, num_grads, counter)
