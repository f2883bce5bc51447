"""Recommends to each user the unrated items with the highest scores."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..._replacing import replacing
from ...datasets import Ratings
from ...errors import check_int
from ...train.metrics import gather
from .. import saved
from .dense_model import DenseAutoencoder
from .model import Autoencoder
from .rated_items import RatedItems

# Maximum numbers of users and of items to score at a time.
USERS = 256
ITEMS = 4096


# A model that can recommend items.
Recommender = Autoencoder | DenseAutoencoder


@dataclass(frozen=True, eq=False)
class Recommendations:
    """The items recommended to each user, best first.

    Attributes:
        users: ids of the users, int64 ``[u]``, in ascending order.
        items: ids of the items, int64 ``[u, k]``.
        scores: floating-point ``[u, k]``, in descending order; -inf if fewer than k items are left
            to recommend to a user.
    """

    users: torch.Tensor
    items: torch.Tensor
    scores: torch.Tensor

    def __len__(self) -> int:
        return int(self.scores.isfinite().sum())

    def rows(self) -> Iterator[tuple[int, int, float]]:
        """Yield user, item and score for each recommendation, by user, then by descending score."""
        columns = self.users.tolist(), self.items.tolist(), self.scores.tolist()
        for user, items, scores in zip(*columns, strict=True):
            for item, score in zip(items, scores, strict=True):
                if score > -math.inf:
                    yield user, item, score

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a line per recommendation: user, item and score, separated by tabs; no header.

        Raises:
            OSError: the file cannot be written; an existing file is left unchanged.
        """
        with replacing(path) as part, part.open("w", encoding="utf-8") as file:
            for user, item, score in self.rows():
                file.write(f"{user}\t{item}\t{score:.6f}\n")

    def hits(self, test: Ratings) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the recommendations with later ratings.

        Returns:
            ``(hits, relevant)`` for `sparsekit.train.metrics.precision_at_k`. ``hits``, bool ``[u,
            k]``, is True if the user has rated the item in ``test``. ``relevant``, int64 ``[u]``,
            is the number of distinct items that the user has rated in ``test``, including items
            that nobody has rated before.
        """
        row = torch.searchsorted(self.users, test.users).clamp(max=len(self.users) - 1)
        known = self.users[row] == test.users
        found = torch.cat([test.items[known], self.items.reshape(-1)])
        items, number = found.unique(return_inverse=True)
        of_test, of_best = number.split([int(known.sum()), self.items.numel()])
        # Encode each pair of user and item as one integer.
        wanted = (row[known] * len(items) + of_test).unique()
        first = torch.arange(len(self.users), device=row.device)[:, None] * len(items)
        hits = torch.isin(first + of_best.view_as(self.items), wanted)
        relevant = torch.bincount(wanted // len(items), minlength=len(self.users))
        return hits & self.scores.isfinite(), relevant


@torch.no_grad()
def recommend(model: Recommender, k: int = 10) -> Recommendations:
    """Find the k items with the highest scores for each user in the model's history.

    Candidates are the items in the history that the user has not rated. At most 256 x 4096 scores
    are in memory at a time. A collective: each rank computes the results for some users, and all
    ranks return the whole result.

    Raises:
        TypeError, ValueError: k is not an int in [1, 2^20].
    """
    k = check_int("recommend", "k", k, 1, 2**20)
    users, rank, ranks = len(model.history.users), 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    device = model.history.users.device
    mine = torch.arange(users, device=device).tensor_split(ranks)[rank]
    # Lookups are collectives, so split the users into the same number of parts on every rank.
    parts = mine.tensor_split(math.ceil(math.ceil(users / ranks) / USERS))
    training = model.training
    model.train(False)
    try:
        codes = [model.encode(rows) for rows in parts]

        def scorer(begin: int, end: int) -> Callable[[int], torch.Tensor]:
            vectors = model.vectors(begin, end)
            return lambda part: model.score(codes[part], vectors)

        best = _best(model.history, parts, k, scorer)
    finally:
        model.train(training)
    columns, scores = (gather(torch.cat(found)) for found in zip(*best, strict=True))
    return Recommendations(model.history.users, model.history.items[columns], scores)


def popular(history: RatedItems, k: int = 10) -> Recommendations:
    """Recommend the items with the most ratings, as a baseline; ties go to the lowest id."""
    counts = torch.bincount(history.columns, minlength=len(history.items))
    # Score items by their position in the sorted order, so that no two scores are equal.
    order = counts.argsort(descending=True, stable=True)
    scores = torch.empty(len(order), dtype=torch.float64, device=order.device)
    scores[order] = -torch.arange(len(order), dtype=torch.float64, device=order.device)
    parts = torch.arange(len(history.users), device=order.device).split(USERS)
    best = _best(
        history,
        parts,
        k,
        lambda begin, end: lambda part: scores[begin:end].expand(len(parts[part]), -1),
    )
    columns, values = (torch.cat(found) for found in zip(*best, strict=True))
    return Recommendations(history.users, history.items[columns], values)


def load_recommender(path: str | os.PathLike[str]) -> Recommender:
    """Load a saved `Autoencoder` or `DenseAutoencoder`.

    Raises:
        ValueError: the file does not contain such a model.
        OSError: the file cannot be read.
    """
    state = saved.read(path, Autoencoder.FORMAT, DenseAutoencoder.FORMAT)
    if state["format"] == Autoencoder.FORMAT:
        return Autoencoder.restored(state)
    return DenseAutoencoder.restored(state)


def _best(
    history: RatedItems,
    parts: tuple[torch.Tensor, ...],
    k: int,
    scorer: Callable[[int, int], Callable[[int], torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each part's best columns and their scores, ``[n, k]`` each.

    Args:
        history: the ratings; items that a user has rated are excluded.
        parts: subsets of the users, each an int64 tensor ``[n]`` of indices.
        k: number of items for each user.
        scorer: ``scorer(begin, end)(i)`` returns the scores ``[n, end - begin]`` of parts[i].
    """
    device = history.users.device

    def none(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = torch.zeros(len(rows), k, dtype=torch.int64, device=device)
        return columns, torch.full((len(rows), k), -math.inf, device=device)

    best = [none(rows) for rows in parts]
    for begin in range(0, len(history.items), ITEMS):
        end = min(begin + ITEMS, len(history.items))
        scores_of = scorer(begin, end)
        for i, rows in enumerate(parts):
            scores = _without_rated(history, rows, scores_of(i), begin, end)
            columns = torch.arange(begin, end, device=device).expand_as(scores)
            columns = torch.cat([best[i][0], columns], 1)
            # Use a stable sort, so that ties go to the lowest id, however the items are split.
            scores, place = torch.sort(
                torch.cat([best[i][1], scores], 1), dim=1, descending=True, stable=True
            )
            best[i] = columns.gather(1, place[:, :k]), scores[:, :k]
    return best


def _without_rated(
    history: RatedItems, rows: torch.Tensor, scores: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Return the scores ``[n, end - begin]``, with -inf for items that the user has rated."""
    entries, _, row = history(rows)
    column = history.columns[entries]
    here = (begin <= column) & (column < end)
    places = row[here], column[here] - begin
    return scores.index_put(places, scores.new_tensor(-math.inf))
