"""What `torch.compile` must not look into."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.disable`, put off until there is a compiler in the process.

    That would import the compiler, which takes as long as importing torch.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call
