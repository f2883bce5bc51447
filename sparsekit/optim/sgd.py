"""SGD with momentum, which moves only touched rows or, like the dense method, all rows."""

from collections.abc import Iterable
from typing import Annotated, Any

import torch

from .catch_up import CatchUpOptimizer
from .settings import Fraction, LearningRate, NotNegative, given, in_float64, one_of


class SGD(CatchUpOptimizer):
    r"""Stochastic gradient descent with momentum.

    For every row in the gradient g:

    .. math::
        g = g + \lambda w, \quad b = \mu b + g, \quad
        w = w - lr \begin{cases} g + \mu b & \text{nesterov} \\ b & \text{else} \end{cases}

    as in torch.optim.SGD without dampening; Sutskever et al., "On the importance of initialization
    and momentum in deep learning", ICML 2013. Without momentum (mu = 0) it is plain SGD and has no
    state.

    With momentum, the dense method also moves rows without a gradient, since their b is not zero.
    ``mode="catch_up"`` gives exactly the same weights, but only takes time for touched rows; see
    `Adam`. ``mode="touched"`` leaves such rows and their b unchanged.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        momentum: mu, in [0, 1).
        weight_decay: lambda, >= 0, on touched rows; must be 0 in mode "catch_up".
        nesterov: as in the formula; needs momentum.
        mode: ``"touched"`` or ``"catch_up"``.
        stochastic_rounding, seed, maximize: as in `LazyAdam`; no rounding in mode "catch_up".

    Raises:
        ValueError: an argument out of range, or two arguments that cannot be combined.
        `CatchUpOptimizer` and `RowOptimizer` list further errors.
    """

    rule = "sgd"

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-3,
        momentum: Fraction = 0.0,
        weight_decay: NotNegative = 0.0,
        nesterov: bool = False,
        *,
        mode: Annotated[str, one_of("touched", "catch_up")] = "touched",
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _check_settings(self, group: dict[str, Any]) -> None:
        super()._check_settings(group)
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError("SGD: nesterov needs momentum > 0, got 0")
        for argument in ("weight_decay", "stochastic_rounding"):
            if group["mode"] == "catch_up" and group[argument]:
                raise ValueError(
                    f"SGD: {argument} does not go with mode='catch_up', got {group[argument]}"
                )

    def _moves_all(self, group: dict[str, Any]) -> bool:
        return group["mode"] == "catch_up" and group["momentum"] > 0

    def _sweeps(self, group: dict[str, Any]) -> bool:
        return False

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] > 0 else {}

    def _settings(self, group: dict[str, Any]) -> list[float]:
        return [group["momentum"], group["weight_decay"], group["nesterov"]]

    def _numbers(self, group: dict[str, Any], step: int) -> tuple[float | torch.Tensor, float]:
        return in_float64(group["lr"]), 0.0
