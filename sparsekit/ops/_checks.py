"""Argument checks of the public ops: the errors that name op, argument and value."""

from collections.abc import Sequence

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
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{op}: all tensors must be on one device, got {listed}")
