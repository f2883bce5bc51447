"""Computes the exact result of dense Adam from sparse gradients."""

import math
from collections.abc import Iterable
from typing import Annotated, Any

import torch

from .catch_up import CatchUpOptimizer
from .settings import Betas, EpsConvention, LearningRate, NotNegative, given, in_float64, one_of


class Adam(CatchUpOptimizer):
    r"""Dense Adam for sparse gradients, exactly as in torch.optim.Adam: all rows move in each step.

    At step t, for every row, with g = 0 where there is no gradient:

    .. math::
        m = \beta_1 m + (1 - \beta_1) g, \quad v = \beta_2 v + (1 - \beta_2) g^2, \quad
        w = w - lr \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + eps}

    Kingma and Ba, "Adam", ICLR 2015, algorithm 1. With ``eps_convention="tensorflow"`` it is the
    Adam of tf.keras, TensorFlow 1 and SOK. They add eps to a root without bias correction; this eps
    is the paper's epsilon hat at the end of section 2:

    .. math::
        w = w - lr \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + eps}

    The difference matters where gradients are not much larger than eps: for g = 1e-6 and eps = 1e-7
    the first step is 0.909 lr in the first form and 0.240 lr in the second.

    A row continues to move for several hundred steps after its last gradient, while `LazyAdam`
    leaves it unchanged.

    ``mode="catch_up"`` lets a row wait until it is read: the next lookup, gradient, save or copy of
    the row applies the steps that it has missed, with the learning rates of those steps. A step
    thus takes time for the touched rows only. Each touched row costs the arithmetic of at most
    about 370 missed steps with the default betas, since later steps are smaller than the last bit
    of a float64. ``mode="sweep"`` moves the whole table in every step, as SOK's Adam does. Both
    modes give the same weights: bitwise if no row misses more than this number of steps, otherwise
    up to rounding.

    Args:
        params: parameters or groups of them; float32, float64 or bfloat16.
        lr: learning rate, >= 0.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the square root of the second moment, >= 0. TensorFlow's own default is 1e-7,
            or 1e-8 in tf.compat.v1.
        mode: ``"catch_up"`` or ``"sweep"``. In mode catch_up, only weights of embedding layers may
            have sparse gradients; call `catch_up` before reading or writing ``weight`` other than
            through its layer.
        eps_convention: ``"torch"``, the default, as in torch.optim.Adam, or ``"tensorflow"``.
        maximize: as in `LazyAdam`.

    Raises:
        ValueError: an argument out of range.
        `CatchUpOptimizer` and `RowOptimizer` list further errors.
    """

    rule = "adam"

    def __init__(
        self,
        params: Iterable[Any],
        lr: LearningRate = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: NotNegative = 1e-8,
        *,
        mode: Annotated[str, one_of("catch_up", "sweep")] = "catch_up",
        eps_convention: EpsConvention = "torch",
        maximize: bool = False,
    ) -> None:
        super().__init__(params, given(locals()))

    def _check_settings(self, group: dict[str, Any]) -> None:
        super()._check_settings(group)
        if group["stochastic_rounding"]:
            raise ValueError("Adam: there is no stochastic_rounding; LazyAdam has it")

    def _moves_all(self, group: dict[str, Any]) -> bool:
        return True

    def _sweeps(self, group: dict[str, Any]) -> bool:
        return group["mode"] == "sweep"

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def _settings(self, group: dict[str, Any]) -> list[float]:
        return [*group["betas"], group["eps"], 0.0, group["eps_convention"] == "torch"]

    def _numbers(self, group: dict[str, Any], step: int) -> tuple[float | torch.Tensor, float]:
        beta1, beta2 = group["betas"]
        root = math.sqrt(1 - beta2**step)
        eps = group["eps"] * (root if group["eps_convention"] == "torch" else 1)
        return in_float64(group["lr"]) * root / (1 - beta1**step), eps
