"""Applies missed steps to rows, for optimizers that change all rows in every step."""

from collections.abc import Sequence

import torch

from ._checks import ROW_DTYPES
from ._op import Of, Op

_catch_up = Op("catch_up_rows_", {"weight": Of(ROW_DTYPES, 2)})


def catch_up_rows_(
    weight: torch.Tensor,
    states: Sequence[torch.Tensor],
    row_step: torch.Tensor,
    rows: torch.Tensor | None,
    numbers: torch.Tensor,
    first_step: int,
    rule: str,
    settings: Sequence[float],
) -> None:
    """Apply the steps that rows have missed because they had no gradient.

    The result is the same as calling `update_rows_` with a gradient of zeros for each step after a
    row's row_step, up to ``first_step + count - 1``, with one exception: once the last gradient is
    too long ago to move a weight, a step only changes the states. Rows with a row_step of 0 have
    never had a gradient and do not change. If numbers is empty, nothing changes.

    Args:
        weight: as in `update_rows_`, changed in place.
        states: as in `update_rows_`, changed in place.
        row_step: int32 ``[num_rows]``, the last step applied to each row, changed in place.
        rows: int64 ``[n]``, distinct; negative rows are ignored. None means all rows.
        numbers: float64 ``[count, 2]``: for rule ``"sgd"`` each step's learning rate, and an unused
            number; for ``"adam"`` the step size ``lr sqrt(1 - beta2^t) / (1 - beta1^t)`` and eps,
            or ``eps sqrt(1 - beta2^t)`` if eps is rescaled.
        first_step: number of the step that row 0 of numbers belongs to, >= 1.
        rule: ``"sgd"`` with momentum, or ``"adam"`` without amsgrad.
        settings: as in `update_rows_`; rates, eps and weight decay are not used.

    Raises:
        TypeError: weight has a wrong dtype.
        ValueError: a wrong shape, dtype or rule, a step beyond 2^31 - 1, a mix of devices, or a
            tensor to change shares memory with another argument. States may be interleaved.
        IndexError: a row >= num_rows. On the CPU nothing has been changed; on CUDA the other rows
            have been.
    """
    _catch_up(weight, states, row_step, rows, numbers, first_step, rule, settings)
    torch.autograd.graph.increment_version(weight)  # for the reason given in update_rows_


@_catch_up.fake
def _() -> None:
    return None
