"""One fused optimizer step over rows; `sparsekit.optim` has the optimizers."""

from collections.abc import Sequence

import torch

from ._checks import ROW_DTYPES, check_same_device, check_tensor, explain, signed_64

Tensors = Sequence[torch.Tensor]

_op = torch.ops.sparsekit.update_rows_.default


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
) -> None:
    """One step of an optimizer on the rows that have a gradient; all other rows keep their bits.

    ===========================  =====================================  ==========================
    rule                         settings                               states
    ===========================  =====================================  ==========================
    ``"sgd"``                    lr, momentum, weight_decay, nesterov   none, or momentum
    ``"adam"``                   lr, beta1, beta2, eps, weight_decay,   m, v, and for amsgrad the
                                 rescale_eps                            largest v
    ``"adagrad"``                lr, lr_decay, eps, weight_decay,       sum of squares
                                 decoupled
    ``"row_wise_adagrad"``       lr, lr_decay, eps, weight_decay,       sum of mean squares, one
                                 decoupled                              for a row
    ``"rms_prop"``               lr, alpha, eps, momentum, eps_inside,  mean square, then momentum
                                 weight_decay, decoupled                if there is any
    ``"ftrl"``                   lr, l1, l2, lr_power                   n, z
    ``"partial_row_wise_adam"``  lr, beta1, beta2, eps, weight_decay    m, and v, one for a row
    ``"lamb"``                   lr, beta1, beta2, eps, weight_decay    m, v
    ===========================  =====================================  ==========================

    The formulas are in `sparsekit.optim`; csrc/core/include/sparsekit/optimizer_rules.h has them
    as they are computed.

    Several tables, of any sizes but one dtype, are updated by one call: weight, row_step, rows,
    grad and step are then sequences with a tensor for each, or None for all, and states has all
    states of the first table, then those of the next. The result is that of a call for each, but no
    table has changed if the call is refused.

    Args:
        weight: float32, float64 or bfloat16 ``[num_rows, dim]``, changed in place.
        states: ``[num_rows, dim]`` each, ``[num_rows]`` or ``[num_rows, 1]`` where there is one for
            a row; float32 for bfloat16 rows, else as weight. Rows are contiguous and may lie apart,
            so that all states of a row can be neighbours. Changed in place.
        row_step: int32 ``[num_rows]`` or None: the steps of each row; see per_row.
        rows: int64 ``[n]``, distinct; None means row i for gradient i.
        grad: ``[n, dim]`` in the dtype of weight.
        step: int64, one element: the number of this step, from 1 on; see count_steps.
        rule: the optimizer.
        settings: its settings, in the order above.
        per_row: count each row's steps in row_step, and use that count in place of step. Without
            it, row_step is set to step. Its largest number, 2^31 - 1, stands for all later steps.
        rounding_seed: round bfloat16 weights up or down at random, with odds that make the mean
            exact; the draws depend on this seed, step, row and column only. None rounds to the
            nearest.
        count_steps: step has the number of steps made before, from 0 on, and is one more
            afterwards. It is counted by the same call, so that an interruption cannot come between
            the rows and their number of steps.

    Raises:
        TypeError: weight has a wrong dtype.
        ValueError: a wrong shape, dtype or rule, a mix of devices, or what is changed shares memory
            with another argument. States may be interleaved. Of several tables, the error names
            the position.
        IndexError: a row outside ``[0, num_rows)``; on the CPU nothing has been changed,
            on CUDA the other rows have.
    """
    tables = [_listed(argument) for argument in (weight, row_step, rows, grad, step)]
    weights, row_steps, all_rows, grads, steps = tables
    arguments = weights, states, row_steps, all_rows, grads, steps
    seed = None if rounding_seed is None else signed_64(rounding_seed)
    try:
        _op(*arguments, rule, settings, per_row, seed, count_steps)
    except Exception as refusal:
        explain(refusal, _check, *arguments)
    # Ops outside of torch do not count as a change by themselves; without this, a backward that
    # saved the old weight would use the new one in silence.
    torch.autograd.graph.increment_version(weights)


def _listed(argument: torch.Tensor | Tensors | None) -> Tensors:
    """One tensor for each table, or none at all."""
    if argument is None:
        return ()
    return (argument,) if isinstance(argument, torch.Tensor) else argument


def _check(
    weights: Tensors,
    states: Tensors,
    row_steps: Tensors,
    rows: Tensors,
    grads: Tensors,
    steps: Tensors,
    num_grads: torch.Tensor | None = None,
) -> None:
    """Raise what the op refuses too, in clearer words."""
    op, count = "update_rows_", len(weights)
    if count == 0:
        raise ValueError(f"{op}: there is no weight")
    width = len(states) // count
    for i, weight in enumerate(weights):
        of_table = op if count == 1 else f"{op}: table {i}"
        check_tensor(of_table, "weight", weight, ROW_DTYPES, 2)
        named: dict[str, torch.Tensor | None] = {}
        for k, state in enumerate(states[i * width : (i + 1) * width]):
            named[f"states[{k}]"] = state
        lists = {"row_step": row_steps, "rows": rows, "grad": grads, "step": steps}
        named |= {name: list_[i] for name, list_ in lists.items() if i < len(list_)}
        check_same_device(of_table, weight=weight, **named, num_grads=num_grads)
        check_same_device(op, **{"weight of table 0": weights[0], f"weight of table {i}": weight})


@torch.library.register_fake("sparsekit::update_rows_")
def _(
    weights: Tensors,
    states: Tensors,
    row_steps: Tensors,
    rows: Tensors,
    grads: Tensors,
    steps: Tensors,
    rule: str,
    settings: Sequence[float],
    per_row: bool = False,
    rounding_seed: int | None = None,
    count_steps: bool = False,
    num_grads: torch.Tensor | None = None,
) -> None:
    # Also what torch calls for real tensors when one argument is on the meta device.
    _check(weights, states, row_steps, rows, grads, steps, num_grads)
