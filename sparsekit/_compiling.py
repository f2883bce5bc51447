"""Excludes lookups from compilation by torch, and refuses to export layers."""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_WHY = "sparsekit: a lookup in a table cannot be compiled, so a graph ends before it"


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Exclude a function from compilation, as `torch.compiler.disable` does.

    `disable` imports the compiler, which takes as long as importing torch. It is therefore called
    only when a compiler is already active. The compiler then ends its graph before the call, and
    does not trace the function.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal disabled
        # Disabling the compiler takes half as long as a lookup, so do it only when calls are being
        # compiled. A check for torch._dynamo is not enough: every torch optimizer loads it.
        if "torch._dynamo" not in sys.modules or not (
            torch.compiler.is_compiling() or _compiles_calls()
        ):
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    _skip_frames_of(call)
    return call


def _skip_frames_of(function: Callable[..., object]) -> None:
    """Tell the compiler to skip the function's own code, as `eval_frame.skip_code` does.

    All functions that `uncompiled` returns share one code object. The compiler would otherwise
    compile this code again for each function.
    """
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):  # if these attributes are missing, only speed is lost
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, skip)


def _compiles_calls() -> bool:
    """Return whether a compiler intercepts calls in this thread."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


_skip_frames_of(_compiles_calls)


def refuse_recording(name: str) -> None:
    """Raise NotImplementedError: a layer was called while torch was recording a graph.

    The graph would contain constants: the keys' current row numbers, or the result for a
    placeholder batch without values. `name` is the layer's name.
    """
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
    raise _not_supported(name, "torch.jit.trace" if tracing else "torch.export")


def refuse_script(name: str) -> None:
    """Raise NotImplementedError: torch.jit.script was called on the layer with this name."""
    raise _not_supported(name, "torch.jit.script")


def _not_supported(name: str, tool: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: {tool} is not supported, since a lookup depends on the keys that a table has; "
        f"call the embedding layers outside of it, and give the part of the model that takes "
        f"their outputs to {tool}. To make a model faster, torch.compile works with embedding "
        f"layers in it"
    )
