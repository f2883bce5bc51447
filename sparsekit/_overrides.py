"""Calls functions without the overrides of Tensor subclasses such as parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def without_overrides(function: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
    """Call a function with the overrides of Tensor subclasses disabled.

    Accessing an attribute of a subclass is then three times as fast. Unlike the context manager
    `torch._C.DisableTorchFunctionSubclass`, this C function restores the setting even if an
    interrupt arrives at any moment.
    """
    result: Result = torch._C._disabled_torch_function_impl(function, (), arguments, named)
    return result
