"""Checks tensors; error messages name the op, the argument and the value."""

from collections.abc import Sequence

import torch

KEY_DTYPES = (torch.int64, torch.int32)
ROW_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
FLOATING = (*ROW_DTYPES, torch.float16)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for summing rows of ``dtype``: float32 for bfloat16, else dtype itself."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def signed_64(seed: int) -> int:
    """Return the seed's 64 bits as a signed integer, which the ops require."""
    return (seed + 2**63) % 2**64 - 2**63


def check_tensor(
    op: str, name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype] | None, dim: int | None
) -> None:
    """Raise TypeError for a wrong type or dtype, ValueError for a wrong number of dimensions.

    If dtypes or dim is None, any dtype or any number of dimensions is accepted.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if dtypes is not None and tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {expected}, got {tensor.dtype}")
    if dim is not None and tensor.dim() != dim:
        raise ValueError(
            f"{op}: {name} must have {dim} dimension(s), got shape {tuple(tensor.shape)}"
        )


def check_same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors are on the same device."""
    first: dict[torch.device, str] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            first.setdefault(tensor.device, name)
    if len(first) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {listed}")
