"""Baselines for rating models."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ...datasets import Ratings

# Candidates for the damping. On MovieLens-100K, the best values are well within this range.
DAMPINGS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SWEEPS = 30


def rmse(predictions: torch.Tensor, ratings: torch.Tensor) -> float:
    """Compute the root mean squared error between two tensors ``[n]`` in float64."""
    return (predictions.double() - ratings.double()).square().mean().sqrt().item()


@dataclass(frozen=True, eq=False)
class BiasBaseline:
    """Predicts rating = mean + user bias + item bias; an unknown user or item has bias 0.

    Attributes:
        mean: mean of all training ratings.
        low, high: range of the training ratings; predictions are clamped to it.
        user_ids, item_ids: int64 ``[u]`` and ``[i]``, sorted and distinct.
        user_bias, item_bias: float64 ``[u]`` and ``[i]``.
        damping: damping used for the users' biases and for the items' biases, one number each.
    """

    mean: float
    low: float
    high: float
    user_ids: torch.Tensor
    user_bias: torch.Tensor
    item_ids: torch.Tensor
    item_bias: torch.Tensor
    damping: tuple[float, float]

    def predict(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Predict ratings, float64 ``[n]``, for pairs of ids, int64 ``[n]`` each."""
        prediction = self.mean + _find(self.user_ids, self.user_bias, users)
        return (prediction + _find(self.item_ids, self.item_bias, items)).clamp(self.low, self.high)


def _find(ids: torch.Tensor, values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    at = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    return torch.where(ids[at] == wanted, values[at], 0.0)


def fit_bias_baseline(train: Ratings, damping: tuple[float, float] | None = None) -> BiasBaseline:
    """Fit the biases by least squares, with a penalty of ``damping * bias^2`` for each bias.

    The penalty has the same effect as adding ``damping`` zeros to the residuals of each bias.

    Args:
        train: the training ratings, at least one.
        damping: damping for the users' biases and damping for the items' biases. With None, the
            best pair is chosen: biases are fitted on the earliest four fifths of each user's
            ratings, and the error is measured on the latest fifth. Then the biases are fitted on
            all ratings.
    """
    if damping is None:
        damping = _choose_damping(train)
    ratings = train.ratings.double()
    user_ids, user, user_count = train.users.unique(return_inverse=True, return_counts=True)
    item_ids, item, item_count = train.items.unique(return_inverse=True, return_counts=True)
    residuals = ratings - ratings.mean()
    user_bias = ratings.new_zeros(len(user_ids))  # same dtype and device as ratings
    item_bias = ratings.new_zeros(len(item_ids))
    # Alternate: fit the items' biases exactly, given the users' biases, then the reverse.
    for _ in range(SWEEPS):
        sums = torch.zeros_like(item_bias).index_add_(0, item, residuals - user_bias[user])
        item_bias = sums / (item_count + damping[1])
        sums = torch.zeros_like(user_bias).index_add_(0, user, residuals - item_bias[item])
        user_bias = sums / (user_count + damping[0])
    low, high = ratings.aminmax()
    return BiasBaseline(
        ratings.mean().item(),
        low.item(),
        high.item(),
        user_ids,
        user_bias,
        item_ids,
        item_bias,
        damping,
    )


def _choose_damping(train: Ratings) -> tuple[float, float]:
    earlier, latest = train.split_by_time(0.2)
    if len(latest) == 0:
        return DAMPINGS[3], DAMPINGS[3]

    def error(pair: tuple[float, float]) -> float:
        baseline = fit_bias_baseline(earlier, pair)
        return rmse(baseline.predict(latest.users, latest.items), latest.ratings)

    return min(itertools.product(DAMPINGS, DAMPINGS), key=error)
