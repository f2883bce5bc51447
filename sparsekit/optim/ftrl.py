"""FTRL-Proximal, which sets unimportant weights to exactly zero."""

from collections.abc import Iterable
from typing import Any

from .row_optimizer import RowOptimizer
from .settings import LearningRate, NotNegative, NotPositive, given


class Ftrl(RowOptimizer):
    r"""FTRL-Proximal; rows without a gradient are left unchanged.

    For every row in the gradient g, with p = -lr_power:

    .. math::
        n' &= n + g^2, \quad z = z + g - \frac{n'^p - n^p}{lr} w, \quad n = n' \\
        w &= \begin{cases} 0 & |z| \le l_1 \\
             \dfrac{\operatorname{sign}(z) \, l_1 - z}{n^p / lr + 2 l_2} & \text{else} \end{cases}

    McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1, with
    beta = 0. There are two conventions for l2: in the paper it means :math:`l_2 / 2 \, w^2` in the
    loss, in TensorFlow :math:`l_2 \, w^2`, hence the 2 above. This class follows TensorFlow,
    including its defaults, since most users port their settings from there. If your l2 follows the
    paper, halve it.

    Each step computes the weight from z and n, so the first step keeps only a part of a weight that
    does not start at zero. The dense method differs in two ways. It computes all rows in every
    step, so its first step sets a row that never had a gradient (z = 0) to zero, and a new lr takes
    effect in all rows at once. Here such a row keeps its initial vector, and a new lr takes effect
    in a row at its next gradient. All other weights are equal. With an initializer of zeros and a
    constant lr, there is no difference.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0; with 0, as at the start of some schedules, nothing changes.
        lr_power: exponent of the learning rate's decay, <= 0; -0.5 as in the paper, 0 for a fixed
            rate.
        initial_accumulator_value: n before the first step, >= 0.
        l1: strength of the L1 penalty, >= 0; the larger, the more weights are exactly zero.
        l2: strength of the L2 penalty, >= 0, which pulls weights towards zero.
        stochastic_rounding, seed, maximize: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        `RowOptimizer` lists further errors.
    """

    rule = "ftrl"

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-3,
        lr_power: NotPositive = -0.5,
        initial_accumulator_value: NotNegative = 0.1,
        l1: NotNegative = 0.0,
        l2: NotNegative = 0.0,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"accumulator": group["initial_accumulator_value"], "linear": 0.0}

    def _settings(self, group: dict[str, Any]) -> list[float]:
        return [group["l1"], group["l2"], group["lr_power"]]
