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
        # Every optimizer of torch loads the compiler; but to switch it off takes as long as half a
        # lookup, and mostly nothing is being compiled.
        if "torch._dynamo" not in sys.modules or not (
            torch.compiler.is_compiling() or _compiles_calls()
        ):
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call


def _compiles_calls() -> bool:
    """Whether a compiler looks at what is called in this thread."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None
