"""Variants of Adam that treat a row as a whole: one second moment or one step length per row."""

from collections.abc import Iterable
from typing import Any

from .row_optimizer import RowOptimizer
from .settings import Betas, BiasCorrection, LearningRate, NotNegative, given


class _RowAdam(RowOptimizer):
    """Base of `PartialRowWiseAdam` and `LazyLAMB`; defines their arguments and states."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.0,
        *,
        bias_correction: BiasCorrection = "global",
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def _settings(self, group: dict[str, Any]) -> list[float]:
        return [*group["betas"], group["eps"], group["weight_decay"]]


class PartialRowWiseAdam(_RowAdam):
    r"""`LazyAdam` with one second moment per row, which halves the size of the states.

    At step t, for every row in the gradient g:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \quad
        v = \beta_2 v + (1 - \beta_2) \frac{1}{dim} \sum_j g_j^2 \\
        w &= (1 - lr \, \lambda) w
             - lr \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + eps}

    Other rows and their moments are left unchanged. m has one number per element, and v has one
    number per row. Columns with small gradients therefore move less than under Adam. This is
    FBGEMM's PARTIAL_ROWWISE_ADAM; the formula is from its source (genscript/optimizers.py). A 1-dim
    parameter has rows of one element; a 0-dim parameter is a single row.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the square root of the bias-corrected second moment, >= 0.
        weight_decay: lambda, >= 0, on touched rows, independent of the gradient as in `LazyAdam`.
        bias_correction, stochastic_rounding, seed, maximize: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        `RowOptimizer` lists further errors.
    """

    rule = "partial_row_wise_adam"
    row_states = ("exp_avg_sq",)


class LazyLAMB(_RowAdam):
    r"""LAMB with rows as layers: a row with a gradient moves in proportion to its norm.

    With the moments m and v of `LazyAdam`, at step t, for every row in the gradient:

    .. math::
        u &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + eps} + \lambda w \\
        w &= w - lr \frac{\lVert w \rVert}{\lVert u \rVert} u

    Other rows and their moments are left unchanged. The ratio of the two norms is 1 if either norm
    is 0, so a row of zeros can move; FBGEMM's LAMB, whose layers are rows too, never moves such a
    row. Source: You et al., "Large batch optimization for deep learning: training BERT in 76
    minutes", ICLR 2020, algorithm 2, with the identity for phi.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0: how far a row moves, as a fraction of its norm.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the square root of the bias-corrected second moment, >= 0.
        weight_decay: lambda, >= 0; it is part of u and of the norm of u.
        bias_correction, stochastic_rounding, seed, maximize: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        `RowOptimizer` lists further errors.
    """

    rule = "lamb"
