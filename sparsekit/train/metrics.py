"""Metrics of a binary classification, exact, and over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

# Probabilities of 0 and 1 count as being this far inside, or one wrong sample is an infinite loss.
MARGIN = 1e-7


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: how often a positive sample has the higher score; a tie is half.

    Exact: the rank statistic of Mann and Whitney, in float64.

    Args:
        scores: ``[n]``, of any real dtype; their order is all that counts.
        labels: ``[n]``, 0 or 1.

    Raises:
        ValueError: other shapes or labels, a NaN, or samples of one label only.
    """
    _check(scores, labels)
    positives = int((labels > 0).sum())
    pairs = positives * (len(labels) - positives)
    if pairs == 0:
        raise ValueError(f"auc needs samples of both labels, got {positives} of {len(labels)}")
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    # Numbered from 1 in rising order; equal ones share the mean of their numbers.
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2
    above = ranks[place[labels > 0]].sum().item() - positives * (positives + 1) / 2
    return above / pairs


def log_loss(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean binary cross entropy in nats, in float64.

    Args:
        probabilities: of label 1, ``[n]`` in [0, 1]; taken as at least 1e-7 from either end.
        labels: ``[n]``, 0 or 1; at least one.

    Raises:
        ValueError: other shapes, labels or probabilities, or no sample.
    """
    _check(probabilities, labels)
    if len(labels) == 0 or probabilities.min() < 0 or probabilities.max() > 1:
        raise ValueError("log_loss needs at least one sample, and probabilities in [0, 1]")
    p = probabilities.double().clamp(MARGIN, 1 - MARGIN)
    return -torch.where(labels > 0, p.log(), (1 - p).log()).mean().item()


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The tensors of all ranks, one behind the other, on each of them.

    Without torch.distributed it is the tensor itself.

    Args:
        tensor: ``[n]``, of one dtype on all ranks and of any length on each; on a device of which
            the group's backend takes tensors.
        group: None means the default group.
    """
    if not dist.is_initialized() or (size := dist.get_world_size(group)) == 1:
        return tensor
    lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size)]
    dist.all_gather(lengths, torch.full_like(lengths[0], len(tensor)), group)
    counts = [int(length) for length in lengths]
    # Backends gather equal shapes only.
    padded = tensor.new_zeros(max(counts))
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _check(values: torch.Tensor, labels: torch.Tensor) -> None:
    if values.dim() != 1 or values.shape != labels.shape:
        raise ValueError(
            f"expected two tensors [n], got shapes {tuple(values.shape)} and {tuple(labels.shape)}"
        )
    if values.isnan().any():
        raise ValueError(f"{int(values.isnan().sum())} of {len(values)} values are NaN")
    if not ((labels == 0) | (labels == 1)).all():
        raise ValueError("labels must be 0 or 1")
