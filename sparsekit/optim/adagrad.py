"""Adagrad, with a sum of squares for each element or for each row."""

from collections.abc import Iterable
from typing import Any

from .row_optimizer import RowOptimizer
from .settings import check_range


class Adagrad(RowOptimizer):
    r"""Adagrad; rows without a gradient keep their bits, as they do under the dense method.

    At step t, for every row in the gradient g:

    .. math::
        s = s + g^2, \quad w = w - \frac{lr}{1 + (t - 1) \, lr\_decay} \frac{g}{\sqrt{s} + eps}

    Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic
    optimization", JMLR 2011; the same as torch.optim.Adagrad.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        lr_decay: as in the formula, >= 0.
        initial_accumulator_value: s before the first step, >= 0.
        eps: added to the root, >= 0.
        stochastic_rounding, seed: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        And what `RowOptimizer` raises.
    """

    rule = "adagrad"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults, stochastic_rounding, seed)

    def _check_settings(self, group: dict[str, Any]) -> None:
        for argument in ("lr", "lr_decay", "initial_accumulator_value", "eps"):
            check_range(type(self).__name__, argument, group[argument], 0, None)

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"sum": group["initial_accumulator_value"]}

    def _settings(self, group: dict[str, Any]) -> list[float]:
        return [float(group["lr"]), group["lr_decay"], group["eps"]]


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with one sum for a row, so the state is one number for each row.

    .. math::
        s = s + \frac{1}{dim} \sum_j g_j^2

    and the rest as in `Adagrad`, whose arguments it takes. This is FBGEMM's EXACT_ROWWISE_ADAGRAD,
    the usual choice for tables that leave no room for a second one. A parameter of one dimension
    has rows of one element; for one with none the row is all of it.
    """

    rule = "row_wise_adagrad"
    row_wise = True
