"""Scales down rows whose norm is too large, before a lookup reads them."""

import torch

from ..ops._checks import accumulate_dtype
from ..tables.written_rows import Write


@torch.no_grad()
def limit_norms(
    weight: torch.Tensor, rows: torch.Tensor, max_norm: float, norm_type: float
) -> None:
    """Scale rows by ``max_norm / (norm + 1e-7)``, in place, where their norm is above max_norm.

    This is what torch's `embedding_renorm_` does.

    Args:
        weight: ``[num_rows, dim]``.
        rows: distinct row indices; negative indices are ignored.
        max_norm: the largest allowed norm.
        norm_type: p of the p-norm.
    """
    rows = rows[rows >= 0]
    vectors = weight.detach()[rows].to(accumulate_dtype(weight.dtype))
    norms = torch.linalg.vector_norm(vectors, norm_type, dim=1, keepdim=True)
    above = (norms > max_norm).squeeze(1)
    scaled = vectors[above] * (max_norm / (norms[above] + 1e-7))
    # Write only if a row changes: after a write, a backward that saved the weight would fail.
    if len(scaled):
        write = Write([weight])
        weight.detach()[rows[above]] = scaled.to(weight.dtype)
        write.done([rows[above]])
