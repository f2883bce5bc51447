"""RMSProp, in torch's form and in TensorFlow's form."""

from collections.abc import Iterable
from typing import Annotated, Any

from .row_optimizer import RowOptimizer
from .settings import Fraction, LearningRate, NotNegative, given, one_of

# Default settings for each form.
_FORMS = {
    "torch": {"alpha": 0.99, "eps": 1e-8, "initial_accumulator_value": 0.0},
    "tensorflow": {"alpha": 0.9, "eps": 1e-10, "initial_accumulator_value": 1.0},
}


class RMSProp(RowOptimizer):
    r"""RMSProp on the rows with a gradient; other rows, and their averages, are left unchanged.

    For every row in the gradient g, with ``form="torch"``:

    .. math::
        v = \alpha v + (1 - \alpha) g^2, \quad b = \mu b + \frac{g}{\sqrt{v} + eps}, \quad
        w = w - lr \, b

    and with ``form="tensorflow"``:

    .. math::
        v = \alpha v + (1 - \alpha) g^2, \quad b = \mu b + \frac{lr \, g}{\sqrt{v + eps}}, \quad
        w = w - b

    The two forms differ in their defaults (below), in the position of eps and, if lr changes, in
    the effect of momentum. Sources: Tieleman and Hinton, lecture 6.5 of "Neural networks for
    machine learning", 2012; torch.optim.RMSprop; tf.compat.v1.train.RMSPropOptimizer, which does
    not change untouched rows either.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        alpha: decay of v, in [0, 1); None means 0.99, or 0.9 for TensorFlow's form.
        eps: as in the formula, >= 0; None means 1e-8, or 1e-10 for TensorFlow's form.
        momentum: mu, in [0, 1); with 0 there is no b.
        form: ``"torch"`` or ``"tensorflow"``.
        initial_accumulator_value: v before the first step, >= 0; None means 0, or 1 for
            TensorFlow's form, whose first steps are therefore small.
        weight_decay: lambda, >= 0, on touched rows: :math:`g = g + \lambda w` before the update, as
            in torch.optim.RMSprop.
        decoupled_weight_decay: True uses :math:`w = (1 - lr \, \lambda) w` instead.
        stochastic_rounding, seed, maximize: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        `RowOptimizer` lists further errors.
    """

    rule = "rms_prop"

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-2,
        alpha: Fraction | None = None,
        eps: NotNegative | None = None,
        momentum: Fraction = 0.0,
        *,
        form: Annotated[str, one_of(*_FORMS)] = "torch",
        initial_accumulator_value: NotNegative | None = None,
        weight_decay: NotNegative = 0.0,
        decoupled_weight_decay: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        states = {"square_avg": _usual(group, "initial_accumulator_value")}
        return states | {"momentum_buffer": 0.0} if group["momentum"] > 0 else states

    def _settings(self, group: dict[str, Any]) -> list[float]:
        inside = group["form"] == "tensorflow"
        alpha, eps = _usual(group, "alpha"), _usual(group, "eps")
        return [
            alpha, eps, group["momentum"], inside, group["weight_decay"],
            group["decoupled_weight_decay"],
        ]  # fmt: skip


def _usual(group: dict[str, Any], argument: str) -> float:
    """Return a setting, or the form's default if the setting is None."""
    value = group[argument]
    return _FORMS[group["form"]][argument] if value is None else value
