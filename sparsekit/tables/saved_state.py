"""Loads saved states: all entries of a module are checked, then a single call loads them all.

Python handles signals between calls, so an interrupt leaves a module unchanged or fully loaded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


def entries(state_dict: Mapping[str, Any], prefix: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the state's entries with these names; names that the state lacks are left out."""
    return {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}


def entry(
    module: str,
    entries: Mapping[str, Any],
    name: str,
    dtypes: Sequence[torch.dtype],
    shape: Sequence[int | None],
) -> torch.Tensor:
    """Check and return one entry of a state; None in `shape` accepts any size.

    Raises:
        TypeError: the entry is not a tensor, or has the wrong dtype.
        ValueError: the entry is missing, has the wrong shape, or has no values.
    """
    if name not in entries:
        raise ValueError(
            f"{module}: the state has no {name}, only {', '.join(entries)}; all entries are loaded "
            f"together"
        )
    value = entries[name]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{module}: {name} in the state must be a tensor, got {value!r:.80}")
    if value.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{module}: {name} in the state must be {expected}, got {value.dtype}")
    fits = value.dim() == len(shape) and all(
        size in (None, own) for size, own in zip(shape, value.shape, strict=True)
    )
    if not fits:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{module}: {name} in the state must have shape [{expected}], got {list(value.shape)}"
        )
    if value.layout != torch.strided or value.device.type not in _DEVICES:
        raise ValueError(
            f"{module}: {name} in the state must be a dense tensor on {' or '.join(_DEVICES)}, got "
            f"{value.layout} on {value.device}"
        )
    return value.detach()


def refuse_meta(module: str, device: torch.device | None) -> None:
    """Raise ValueError for a module on meta, which has no memory to copy a state to."""
    if device is not None and device.type == "meta":
        raise ValueError(
            f"{module}: the module is on meta, where a state cannot be copied to; load it with "
            f"assign=True, or call to_empty(device=...) before"
        )


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first, all in one call."""
    targets, sources = zip(*pairs, strict=True)
    torch._foreach_copy_(targets, sources)


def builtin_of(op: Any) -> Callable[..., Any]:
    """Return the C function behind an op in torch.ops, for `run_all`.

    The op itself is called through a Python method, where an interrupt may stop it.
    """
    function: Callable[..., Any] = op.default._op
    return function


def run_all(calls: Iterable[partial[Any]]) -> None:
    """Run calls of functions written in C, all in one call."""
    tuple(map(partial.__call__, calls))


def replace_all(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Update the first dict of each pair with the second, all in one call."""
    tuple(map(dict.update, *zip(*pairs, strict=True)))
