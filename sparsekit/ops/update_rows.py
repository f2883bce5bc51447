"""Applies a fused optimizer step to rows; `sparsekit.optim` has the optimizers."""

from collections.abc import Sequence
from typing import Any

import torch

from ._checks import ROW_DTYPES, check_same_device, check_tensor, signed_64
from ._op import Op

Tensors = Sequence[torch.Tensor]


class _UpdateRows(Op):
    def check(self, *args: Any, **named: Any) -> dict[str, Any]:
        """Check the arguments as `Op` does; with several tables, errors give the table's number."""
        named = {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **named}
        op, weights, states = "update_rows_", named["weights"], named["states"]
        if not weights:
            raise ValueError(f"{op}: there is no weight")
        width = len(states) // len(weights)
        lists = {"row_step": "row_steps", "rows": "rows", "grad": "grads", "step": "steps"}
        for i, weight in enumerate(weights):
            of_table = op if len(weights) == 1 else f"{op}: table {i}"
            check_tensor(of_table, "weight", weight, ROW_DTYPES, 2)
            tensors = {
                f"states[{k}]": state for k, state in enumerate(states[i * width : (i + 1) * width])
            }
            for name, argument in lists.items():
                tensors |= {name: named[argument][i]} if i < len(named[argument]) else {}
            check_same_device(
                of_table, weight=weight, **tensors, num_grads=named["num_grads"], lr=named["lr"]
            )
            check_same_device(
                op, **{"weight of table 0": weights[0], f"weight of table {i}": weight}
            )
        return named


_update = _UpdateRows("update_rows_", {})


def update_rows_(
    weight: torch.Tensor | Tensors,
    states: Tensors,
    row_step: torch.Tensor | Tensors | None,
    rows: torch.Tensor | Tensors | None,
    grad: torch.Tensor | Tensors,
    step: torch.Tensor | Tensors,
    rule: str,
    settings: Sequence[float],
    *,
    per_row: bool = False,
    rounding_seed: int | None = None,
    count_steps: bool = False,
    lr: torch.Tensor | None = None,
) -> None:
    """Apply an optimizer step to rows with a gradient; other rows are left unchanged.

    ===========================  =====================================  ==========================
    rule                         settings                               states
    ===========================  =====================================  ==========================
    ``"sgd"``                    lr, momentum, weight_decay, nesterov   none, or momentum
    ``"adam"``                   lr, beta1, beta2, eps, weight_decay,   m, v, and for amsgrad the
                                 rescale_eps                            largest v
    ``"adagrad"``                lr, lr_decay, eps, weight_decay,       sum of squares
                                 decoupled
    ``"row_wise_adagrad"``       lr, lr_decay, eps, weight_decay,       sum of mean squares, one
                                 decoupled                              per row
    ``"rms_prop"``               lr, alpha, eps, momentum, eps_inside,  mean square, then momentum
                                 weight_decay, decoupled                if there is any
    ``"ftrl"``                   lr, l1, l2, lr_power                   n, z
    ``"partial_row_wise_adam"``  lr, beta1, beta2, eps, weight_decay    m, and one v per row
    ``"lamb"``                   lr, beta1, beta2, eps, weight_decay    m, v
    ===========================  =====================================  ==========================

    The formulas are in `sparsekit.optim`; csrc/core/include/sparsekit/optimizer_rules.h shows how
    they are computed.

    One call can update several tables, of any sizes but all of one dtype. Then weight, row_step,
    rows, grad and step are sequences with one tensor per table, or None for all tables; states has
    all states of the first table, then all states of the second, and so on. The result is the same
    as with one call per table, except that no table is changed if the call is refused.

    Args:
        weight: float32, float64 or bfloat16 ``[num_rows, dim]``, changed in place.
        states: ``[num_rows, dim]`` each, ``[num_rows]`` or ``[num_rows, 1]`` for a state with one
            number per row; float32 for bfloat16 rows, else the dtype of weight. Each row is
            contiguous, but there may be gaps between rows, so that all states of a row can be
            stored side by side. Changed in place.
        row_step: int32 ``[num_rows]`` or None: the step count of each row; see per_row.
        rows: int64 ``[n]``, distinct; None means row i for gradient i.
        grad: ``[n, dim]`` in the dtype of weight.
        step: int64, one element: the number of this step, counted from 1; see count_steps.
        rule: the optimizer.
        settings: the rule's settings, in the order above.
        per_row: count each row's steps in row_step, and use that count instead of step. Without it,
            row_step is set to step. Counts stop at 2^31 - 1.
        rounding_seed: round bfloat16 weights up or down at random, with odds that make the mean
            exact; the draws depend on this seed, step, row and column only. None rounds to the
            nearest.
        count_steps: step holds the number of earlier steps, initially 0; the call increments it.
            An interruption then cannot leave just one of rows and step updated.
        lr: float32 or float64, one element: replaces the first setting. It is read when the rows
            are updated, so a CUDA graph follows its changes.

    Raises:
        TypeError: weight has a wrong dtype.
        ValueError: a wrong shape, dtype or rule, a mix of devices, or a tensor to change shares
            memory with another argument. States may be interleaved. With several tables, the error
            names the table's position.
        IndexError: a row outside ``[0, num_rows)``; on the CPU nothing has been changed,
            on CUDA the other rows have been.
    """
    tables = [_listed(argument) for argument in (weight, row_step, rows, grad, step)]
    weights, row_steps, all_rows, grads, steps = tables
    seed = None if rounding_seed is None else signed_64(rounding_seed)
    _update(
        weights, states, row_steps, all_rows, grads, steps, rule, settings, per_row, seed,
        count_steps, None, lr,
    )  # fmt: skip
    # Ops outside of torch do not increment a tensor's version by themselves: without this, a
    # backward that has saved the old weight would silently use the new weight.
    torch.autograd.graph.increment_version(weights)


def _listed(argument: torch.Tensor | Tensors | None) -> Tensors:
    """Return the tensors of all tables as a sequence, which is empty for None."""
    if argument is None:
        return ()
    return (argument,) if isinstance(argument, torch.Tensor) else argument


@_update.fake
def _() -> None:
    return None
