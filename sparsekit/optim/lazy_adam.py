"""Adam that updates only the rows with a gradient."""

from collections.abc import Iterable
from typing import Any

from .row_optimizer import RowOptimizer
from .settings import Betas, BiasCorrection, EpsConvention, LearningRate, NotNegative, given


class LazyAdam(RowOptimizer):
    r"""Adam that updates only the rows with a gradient; other rows are left unchanged.

    At step t, for every row in the gradient g:

    .. math::
        m &= \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2 \\
        w &= (1 - lr \, \lambda) w
             - lr \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + eps}

    t counts the steps of the parameter, not of the row, and the moments of rows without a gradient
    do not decay. This differs from dense Adam (`sparsekit.optim.Adam`): a row that is rarely seen
    keeps its momentum until it is seen again. TensorFlow Addons' LazyAdam and
    torch.optim.SparseAdam do the same. The formula is from Kingma and Ba, "Adam", ICLR 2015, end of
    section 2. With ``eps_convention="torch"`` the last term is the one in `Adam`'s formula, as in
    FBGEMM's Adam.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the square root of the second moment, >= 0.
        weight_decay: lambda, >= 0: touched rows shrink by lambda times lr, independently of the
            gradient (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019).
        amsgrad: divide by the square root of the largest v so far (Reddi et al., "On the
            convergence of Adam and beyond", ICLR 2018).
        bias_correction: ``"global"``: t as above. ``"per_row"``: t counts the steps in which the
            row had a gradient, so that the size of a row's first step does not depend on when that
            step is taken.
        eps_convention: where eps is added; see `Adam`. ``"tensorflow"``, the default, is as in
            TensorFlow Addons' LazyAdam and torch.optim.SparseAdam; ``"torch"`` is as in FBGEMM and
            dynamicemb.
        stochastic_rounding: round new bfloat16 weights up or down at random, with odds that make
            the mean exact, so that small steps are not lost. This has no effect on other dtypes.
        seed: seed of that rounding, which depends on seed, step, row and column only.
        maximize: step along the gradient instead of against it, as in torch.optim: -g replaces g.

    Raises:
        ValueError: an argument out of range.
        `RowOptimizer` lists further errors.
    """

    rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        weight_decay: NotNegative = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: BiasCorrection = "global",
        eps_convention: EpsConvention = "tensorflow",
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        states = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
        return states | {"max_exp_avg_sq": 0.0} if group["amsgrad"] else states

    def _settings(self, group: dict[str, Any]) -> list[float]:
        rescale_eps = group["eps_convention"] == "torch"
        return [*group["betas"], group["eps"], group["weight_decay"], rescale_eps]
