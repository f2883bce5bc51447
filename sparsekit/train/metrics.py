"""Computes metrics of binary classification and ranking exactly, over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Evaluate = Callable[[torch.nn.Module], dict[str, float]]

# Probabilities are clamped to [MARGIN, 1 - MARGIN], since 0 or 1 could give an infinite loss.
MARGIN = 1e-7


def evaluated(model: torch.nn.Module, evaluate: Evaluate) -> dict[str, float]:
    """Call ``evaluate`` with the model in evaluation mode, without gradients; return its result."""
    model.eval()
    with torch.no_grad():
        metrics = evaluate(model)
    model.train()
    return metrics


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the area under the ROC curve.

    This is the probability that a positive sample has a higher score than a negative one; a tie
    counts as half. The result is exact: the rank statistic of Mann and Whitney in float64.

    Args:
        scores: ``[n]``, of any real dtype; only the order of scores matters.
        labels: ``[n]``, 0 or 1.

    Raises:
        ValueError: shapes or labels are wrong, a score is NaN, or all samples have the same label.
    """
    _check(scores, labels)
    positives = int((labels > 0).sum())
    pairs = positives * (len(labels) - positives)
    if pairs == 0:
        raise ValueError(f"auc needs samples of both labels, got {positives} of {len(labels)}")
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    # Rank the scores from 1 in ascending order; tied scores get their mean rank.
    ranks = (2 * counts.cumsum(0) - counts + 1).double() / 2
    above = ranks[place[labels > 0]].sum().item() - positives * (positives + 1) / 2
    return above / pairs


def log_loss(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean binary cross entropy in nats, in float64.

    Args:
        probabilities: probabilities of label 1, ``[n]`` in [0, 1]; clamped to [1e-7, 1 - 1e-7].
        labels: ``[n]``, 0 or 1; n must be at least 1.

    Raises:
        ValueError: shapes, labels or probabilities are wrong, or there are no samples.
    """
    _check(probabilities, labels)
    if len(labels) == 0 or probabilities.min() < 0 or probabilities.max() > 1:
        raise ValueError("log_loss needs at least one sample, and probabilities in [0, 1]")
    p = probabilities.double().clamp(MARGIN, 1 - MARGIN)
    return -torch.where(labels > 0, p.log(), (1 - p).log()).mean().item()


def precision_at_k(hits: torch.Tensor, relevant: torch.Tensor, k: int) -> float:
    """Return the fraction of relevant items among the first k, averaged over users.

    On several ranks, `gather` the arguments from all ranks first.

    Args:
        hits: whether each recommended item is relevant, bool ``[users, m]`` with m >= k, best item
            first. If a user has fewer than k recommended items, pad with False.
        relevant: number of relevant items for each user, recommended or not, integer ``[users]``.
            Users without relevant items are left out of the mean.
        k: number of items to consider, >= 1.

    Raises:
        ValueError: shapes or numbers are wrong, a user has more hits than relevant items, or no
            user is left.
    """
    found, _ = _of_users(hits, relevant, k)
    return (found.sum(1).double() / k).mean().item()


def recall_at_k(hits: torch.Tensor, relevant: torch.Tensor, k: int) -> float:
    """Return the fraction of a user's relevant items that are in the first k, averaged over users.

    Takes the arguments of `precision_at_k` and raises the same errors.
    """
    found, count = _of_users(hits, relevant, k)
    return (found.sum(1).double() / count).mean().item()


def ndcg_at_k(hits: torch.Tensor, relevant: torch.Tensor, k: int) -> float:
    """Return the normalized discounted cumulative gain of the first k items, averaged over users.

    If the i-th item, counted from 1, is relevant, its gain is ``1 / log2(i + 1)``. The sum of gains
    is divided by the sum for the best order, with all relevant items first. Source: Järvelin and
    Kekäläinen, "Cumulated gain-based evaluation of IR techniques", TOIS 2002, with relevance 0 or
    1.

    Takes the arguments of `precision_at_k` and raises the same errors.
    """
    found, count = _of_users(hits, relevant, k)
    gains = 1 / torch.arange(2, k + 2, dtype=torch.float64, device=found.device).log2()
    best = gains.cumsum(0)[count.clamp(max=k) - 1]
    return ((found * gains).sum(1) / best).mean().item()


def _of_users(
    hits: torch.Tensor, relevant: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select users with relevant items; return their first k hits and numbers of relevant items."""
    if hits.dim() != 2 or hits.dtype != torch.bool or relevant.shape != hits.shape[:1]:
        raise ValueError(
            f"expected bool hits [users, m] and relevant [users], got {hits.dtype} "
            f"{tuple(hits.shape)} and {tuple(relevant.shape)}"
        )
    if not 1 <= k <= hits.shape[1]:
        raise ValueError(f"k must be in [1, {hits.shape[1]}], the columns of hits, got {k}")
    if (hits.sum(1) > relevant).any():
        raise ValueError("a user has more hits than relevant items")
    kept = relevant > 0
    if not kept.any():
        raise ValueError(f"none of {len(relevant)} users has anything relevant")
    return hits[kept, :k], relevant[kept]


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenate the tensors of all ranks; every rank gets the result.

    Without torch.distributed, this returns the tensor itself.

    Args:
        tensor: ``[n, ...]``, with the same dtype on all ranks; n may differ between ranks. It must
            be on a device that the group's backend supports.
        group: process group of the ranks; None is the default group.
    """
    if not dist.is_initialized() or (size := dist.get_world_size(group)) == 1:
        return tensor
    lengths = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size)]
    dist.all_gather(lengths, torch.full_like(lengths[0], len(tensor)), group)
    counts = [int(length) for length in lengths]
    # Pad the tensors, since backends can only gather equal shapes.
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
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
