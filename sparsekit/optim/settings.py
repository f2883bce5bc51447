"""Settings of optimizers: the constructors' arguments, with allowed values in annotations."""

from __future__ import annotations

import numbers
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias, get_args

import torch

from ..errors import check_number


@dataclass(frozen=True)
class Allowed:
    """The values that a setting may have.

    Attributes:
        words: description of the values, which follows "must be" in error messages.
        holds: returns whether a value is allowed.
        is_number: whether the value must be a number; `holds` is then passed a float.
        or_none: whether the value may also be None.
    """

    words: str
    holds: Callable[[Any], bool]
    is_number: bool = True
    or_none: bool = False

    def check(self, name: str, argument: str, value: Any) -> None:
        """Raise TypeError if the value should be a number, ValueError if it is not allowed."""
        if value is None and self.or_none:
            return
        if not self.holds(check_number(name, argument, value) if self.is_number else value):
            shown = value if self.is_number else repr(value)
            raise ValueError(f"{name}: {argument} must be {self.words}, got {shown}")

    def __repr__(self) -> str:  # shown in signatures by help()
        return self.words


class _AllowedRates(Allowed):
    """Allowed values for a learning rate: a number, or a one-element tensor that kernels read."""

    def check(self, name: str, argument: str, value: Any) -> None:
        """Raise the errors of `Allowed.check`, and TypeError for a dtype that kernels lack."""
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            if value.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"{name}: {argument} must be a number, or a float32 or float64 tensor, got one "
                    f"of {value.dtype}"
                )
            if not value.is_cpu:
                return  # reading the value would wait for its device
        super().check(name, argument, value)


def rate_on(device: torch.device, name: str, lr: Any) -> tuple[float, torch.Tensor | None]:
    """Return ``(lr, None)``, or ``(0.0, lr)`` if lr is a tensor on `device`, for kernels to read.

    Raises:
        ValueError: lr is neither on the CPU nor on `device`. Errors begin with `name`.
    """
    if not isinstance(lr, torch.Tensor):
        return float(lr), None
    if lr.device == device:
        return 0.0, lr  # kernels ignore the number
    if not lr.is_cpu:
        raise ValueError(f"{name}: lr is on {lr.device}, but its parameters are on {device}")
    return float(lr), None


def in_float64(lr: Any) -> float | torch.Tensor:
    """Return a number as a float, and a tensor as a 0-dim float64 tensor without waiting for it."""
    return lr.double().reshape(()) if isinstance(lr, torch.Tensor) else float(lr)


def one_of(*choices: str) -> Allowed:
    """Return an `Allowed` that accepts exactly these strings."""
    return Allowed(" or ".join(map(repr, choices)), lambda value: value in choices, False)


def _are_betas(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and all(isinstance(b, numbers.Real) and 0 <= float(b) < 1 for b in value)


NotNegative: TypeAlias = Annotated[float, Allowed(">= 0", lambda value: value >= 0)]
LearningRate: TypeAlias = Annotated[
    float | torch.Tensor, _AllowedRates(">= 0", lambda value: value >= 0)
]
NotPositive: TypeAlias = Annotated[float, Allowed("<= 0", lambda value: value <= 0)]
Fraction: TypeAlias = Annotated[float, Allowed("in [0, 1)", lambda value: 0 <= value < 1)]
Betas: TypeAlias = Annotated[
    tuple[float, float], Allowed("two numbers in [0, 1)", _are_betas, False)
]
BiasCorrection: TypeAlias = Annotated[str, one_of("global", "per_row")]
# Where eps is added: to the square root of v after bias correction ("torch") or before it.
EpsConvention: TypeAlias = Annotated[str, one_of("torch", "tensorflow")]


def given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Select the settings, in order, from the ``locals()`` of an optimizer's constructor."""
    others = "self", "params", "__class__"
    return {name: value for name, value in arguments.items() if name not in others}


def allowed_values(constructor: Callable[..., None]) -> dict[str, Allowed]:
    """Return the allowed values of each argument whose annotation contains an `Allowed`."""
    found = {}
    for name, annotation in constructor.__annotations__.items():
        or_none = types.NoneType in get_args(annotation)
        for kind in (annotation, *get_args(annotation)):
            for mark in getattr(kind, "__metadata__", ()):
                if isinstance(mark, Allowed):
                    found[name] = replace(mark, or_none=or_none)
    return found
