"""Reads CSR feature matrices as bags: columns are keys, and values are sample weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Keys, offsets and weights of bags.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def read_torch_csr(inputs: torch.Tensor, sample_weights: Any, layer: str) -> Parts:
    """Read a float CSR tensor ``[bags, columns]`` as keys, offsets and weights, without copying."""
    _check_no_weights(sample_weights, layer)
    return inputs.col_indices(), inputs.crow_indices(), inputs.values()


def is_scipy_csr(inputs: Any) -> bool:
    """Return whether `inputs` is a scipy CSR matrix or array; scipy need not be installed."""
    return getattr(inputs, "format", None) == "csr" and hasattr(inputs, "indptr")


def read_scipy_csr(inputs: Any, sample_weights: Any, layer: str, device: torch.device) -> Parts:
    """Return, on the device, a scipy CSR matrix ``[bags, columns]`` as keys, offsets and weights.

    Raises:
        TypeError: the values are complex, or wider than 64 bits.
        ValueError: the matrix has one dimension, or sample_weights are also given.
    """
    _check_no_weights(sample_weights, layer)
    if len(inputs.shape) != 2:
        raise ValueError(
            f"{layer}: a feature matrix must have shape [batch * slot_num, columns], got "
            f"{tuple(inputs.shape)}"
        )
    weights = inputs.data
    if weights.dtype.kind in "biu":
        weights = weights.astype(np.float32)
    elif weights.dtype.kind != "f" or weights.itemsize > 8:
        raise TypeError(
            f"{layer}: a feature matrix must have real numbers of at most 64 bits, got "
            f"{weights.dtype}"
        )
    # Copy read-only arrays, since torch warns about them.
    parts = (
        np.require(part, requirements="W") for part in (inputs.indices, inputs.indptr, weights)
    )
    keys, offsets, flat = (torch.from_numpy(part).to(device) for part in parts)
    return keys, offsets, flat


def _check_no_weights(sample_weights: Any, layer: str) -> None:
    if sample_weights is not None:
        raise ValueError(f"{layer}: inputs has weights of its own; pass no sample_weights")
