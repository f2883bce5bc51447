"""Implements the rules of `update_rows_` in plain torch, for ops.py.

A rule maps gradient g, weight w and states s of the rows in step t to the new weight and states; v
holds its settings. A state with one value per row has one column. The formulas are in the
docstrings of `sparsekit.optim`.
"""

from collections.abc import Sequence
from typing import Any

import torch

_State = list[torch.Tensor]
_Moved = tuple[torch.Tensor, _State]


def _sgd(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, momentum, weight_decay, nesterov = v
    g = g + weight_decay * w if weight_decay else g
    if not s:
        return w - lr * g, []
    b = momentum * s[0] + g
    return w - lr * (g + momentum * b if nesterov else b), [b]


def _adam(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, beta1, beta2, eps, weight_decay, rescale_eps = v
    mean = beta1 * s[0] + (1 - beta1) * g
    square = beta2 * s[1] + (1 - beta2) * g * g
    states = [mean, square]
    if len(s) == 3:
        states.append(torch.maximum(s[2], square))
    root = (1 - beta2**t).sqrt()
    eps_t = eps * root if rescale_eps else torch.full_like(root, eps)
    step_size, eps_t = (x.to(w.dtype) for x in (lr * root / (1 - beta1**t), eps_t))
    return w * (1 - lr * weight_decay) - step_size * (mean / (states[-1].sqrt() + eps_t)), states


def _decayed(
    g: torch.Tensor, w: torch.Tensor, rate: Any, weight_decay: float, decoupled: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if decoupled:
        return g, w * (1 - rate * weight_decay)
    return g + weight_decay * w if weight_decay else g, w


def _adagrad(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, lr_decay, eps, weight_decay, decoupled = v
    rate = (lr / (1 + (t - 1) * lr_decay)).to(w.dtype)
    g, w = _decayed(g, w, rate, weight_decay, decoupled)
    # States with one column hold the mean over the row.
    squares = g * g if s[0].shape == g.shape else (g * g).sum(1, keepdim=True) / max(g.shape[1], 1)
    total = s[0] + squares
    return w - rate * (g / (total.sqrt() + eps)), [total]


def _rms_prop(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, alpha, eps, momentum, eps_inside, weight_decay, decoupled = v
    g, w = _decayed(g, w, lr, weight_decay, decoupled)
    square = alpha * s[0] + (1 - alpha) * g * g
    scaled = g / ((square + eps).sqrt() if eps_inside else square.sqrt() + eps)
    if len(s) == 1:
        return w - lr * scaled, [square]
    b = momentum * s[1] + (lr * scaled if eps_inside else scaled)
    return w - (b if eps_inside else lr * b), [square, b]


def _ftrl(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, l1, l2, lr_power = v
    if lr == 0:
        return w, s
    n = s[0] + g * g
    z = s[1] + g - (n**-lr_power - s[0] ** -lr_power) / lr * w
    w = (z.sign() * l1 - z) / (n**-lr_power / lr + 2 * l2)
    return w.masked_fill(z.abs() <= l1, 0), [n, z]


def _partial_row_wise_adam(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, beta1, beta2, eps, weight_decay = v
    mean = beta1 * s[0] + (1 - beta1) * g
    square = beta2 * s[1] + (1 - beta2) * (g * g).sum(1, keepdim=True) / max(g.shape[1], 1)
    unbiased = mean / (1 - beta1**t).to(w.dtype), square / (1 - beta2**t).to(w.dtype)
    step = lr * unbiased[0] / (unbiased[1].sqrt() + eps)
    return w * (1 - lr * weight_decay) - step, [mean, square]


def _lamb(
    v: Sequence[float], t: torch.Tensor, g: torch.Tensor, w: torch.Tensor, s: _State
) -> _Moved:
    lr, beta1, beta2, eps, weight_decay = v
    mean = beta1 * s[0] + (1 - beta1) * g
    square = beta2 * s[1] + (1 - beta2) * g * g
    unbiased = mean / (1 - beta1**t).to(w.dtype), square / (1 - beta2**t).to(w.dtype)
    u = unbiased[0] / (unbiased[1].sqrt() + eps) + weight_decay * w
    norms = w.norm(dim=1, keepdim=True), u.norm(dim=1, keepdim=True)
    ratio = torch.where((norms[0] == 0) | (norms[1] == 0), 1, norms[0] / norms[1])
    return w - lr * ratio * u, [mean, square]


RULES = {
    "sgd": _sgd,
    "adam": _adam,
    "adagrad": _adagrad,
    "row_wise_adagrad": _adagrad,
    "rms_prop": _rms_prop,
    "ftrl": _ftrl,
    "partial_row_wise_adam": _partial_row_wise_adam,
    "lamb": _lamb,
}
