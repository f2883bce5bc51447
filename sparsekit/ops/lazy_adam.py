"""One fused LazyAdam step; `sparsekit.optim.LazyAdam` is the optimizer."""

import torch

from ._checks import ROW_DTYPES, check_same_device, check_tensor

_op = torch.ops.sparsekit.lazy_adam_step_.default


def lazy_adam_step_(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rows: torch.Tensor | None,
    grad: torch.Tensor,
    step: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Adam on the rows that have a gradient; all other rows keep their bits.

    The formula is in `sparsekit.optim.LazyAdam`.

    Args:
        weight: float32, float64 or bfloat16 ``[num_rows, dim]``, changed in place.
        exp_avg: ``[num_rows, dim]``, float32 for bfloat16 rows, else as weight; changed in place.
        exp_avg_sq: like exp_avg.
        rows: int64 ``[n]``, distinct; None means row i for gradient i.
        grad: ``[n, dim]`` in the dtype of weight.
        step: int64, one element: the number of this step, from 1 on.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second moment.

    Raises:
        TypeError: weight has a wrong dtype.
        ValueError: a wrong shape or dtype, or a mix of devices.
        IndexError: a row outside ``[0, num_rows)``; nothing has been changed.
    """
    check_tensor("lazy_adam_step_", "weight", weight, ROW_DTYPES, 2)
    state = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_same_device("lazy_adam_step_", **state, rows=rows, grad=grad, step=step)
    _op(weight, exp_avg, exp_avg_sq, rows, grad, step, lr, *betas, eps)
    # Ops outside of torch do not count as a change by themselves; without this, a backward that
    # saved the old weight would use the new one in silence.
    torch.autograd.graph.increment_version(weight)


@torch.library.register_fake("sparsekit::lazy_adam_step_")
def _(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    rows: torch.Tensor | None,
    grad: torch.Tensor,
    step: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    return None
