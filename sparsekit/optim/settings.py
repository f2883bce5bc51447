"""Checks of the optimizers' settings."""

import numbers
from collections.abc import Sequence
from typing import Any

import torch


def check_range(name: str, argument: str, value: Any, least: float, below: float | None) -> None:
    """Raise ValueError unless ``least <= value``, and ``value < below`` if that is given."""
    shown, value = value, number(name, argument, value)
    if below is None:
        if not value >= least:
            raise ValueError(f"{name}: {argument} must be >= {least:g}, got {shown}")
    elif not least <= value < below:
        raise ValueError(f"{name}: {argument} must be in [{least:g}, {below:g}), got {shown}")


def number(name: str, argument: str, value: Any) -> float:
    """The value of a setting; TypeError for what is no number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: {argument} must be a number, got {value!r}")
    return float(value)


def check_choice(name: str, argument: str, group: dict[str, Any], choices: Sequence[str]) -> None:
    """Raise ValueError unless the group's setting is one of the choices."""
    if group[argument] not in choices:
        listed = " or ".join(map(repr, choices))
        raise ValueError(f"{name}: {argument} must be {listed}, got {group[argument]!r}")
