"""Adagrad, with a sum of squares for each element or for each row."""

from collections.abc import Iterable
from typing import Any

from .row_optimizer import RowOptimizer
from .settings import LearningRate, NotNegative, given


class Adagrad(RowOptimizer):
    r"""Adagrad; rows without a gradient are left unchanged, as in the dense method.

    At step t, for every row in the gradient g:

    .. math::
        lr_t = \frac{lr}{1 + (t - 1) \, lr\_decay}, \quad
        s = s + g^2, \quad w = w - lr_t \frac{g}{\sqrt{s} + eps}

    Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 2011. torch.optim.Adagrad uses the same formula.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        lr_decay: as in the formula, >= 0.
        initial_accumulator_value: s before the first step, >= 0.
        eps: added to the square root, >= 0.
        weight_decay: lambda, >= 0, on touched rows: :math:`g = g + \lambda w` before the update, as
            in torch.optim.Adagrad and FBGEMM's L2 mode.
        decoupled_weight_decay: True uses :math:`w = (1 - lr_t \, \lambda) w` instead, as in
            FBGEMM's decoupled mode.
        stochastic_rounding, seed, maximize: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        `RowOptimizer` lists further errors.
    """

    rule = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-2,
        lr_decay: NotNegative = 0.0,
        initial_accumulator_value: NotNegative = 0.0,
        eps: NotNegative = 1e-10,
        weight_decay: NotNegative = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"sum": group["initial_accumulator_value"]}

    def _settings(self, group: dict[str, Any]) -> list[float]:
        names = "lr_decay", "eps", "weight_decay", "decoupled_weight_decay"
        return [group[name] for name in names]


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with a single sum of squares, and so a single state value, for each row.

    .. math::
        s = s + \frac{1}{dim} \sum_j g_j^2

    where g includes an L2 penalty, if there is one; everything else, including the arguments, is as
    in `Adagrad`. This is FBGEMM's EXACT_ROWWISE_ADAGRAD, the usual choice for tables so large that
    a state of the same size would not fit in memory. A 1-dim parameter has rows of one element; a
    0-dim parameter is a single row.
    """

    rule = "row_wise_adagrad"
    row_states = ("sum",)
