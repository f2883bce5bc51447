"""Argument checks of the public ops: the errors that name op, argument and value."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

KEY_DTYPES = (torch.int64, torch.int32)
ROW_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which rows of ``dtype`` are added: float32 for bfloat16, else the same."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def check_tensor(
    op: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], dim: int
) -> None:
    """Raise TypeError for a wrong type or dtype, ValueError for a wrong number of dimensions."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {expected}, got {tensor.dtype}")
    if tensor.dim() != dim:
        raise ValueError(
            f"{op}: {name} must have {dim} dimension(s), got shape {tuple(tensor.shape)}"
        )


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError when the named tensors are not all on one device."""
    first: torch.device | None = None
    for tensor in tensors.values():
        if tensor is None:
            continue
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            devices = ((n, t.device) for n, t in tensors.items() if t is not None)
            listed = ", ".join(f"{name} on {device}" for name, device in devices)
            raise ValueError(f"{op}: all tensors must be on one device, got {listed}")


def as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in int64; a call less where it is already."""
    return tensor if tensor.dtype == torch.int64 else tensor.to(torch.int64)


def call(op: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Call an op that has a gradient; past autograd where nobody asks for one.

    The way through autograd, which is Python, takes longer than a small op itself.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    if torch.is_grad_enabled():
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)
