"""The items that each user has rated, as bags for an embedding layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...datasets import Ratings

# Weight of the lowest rating. The highest rating has weight 1, and a missing one has weight 0.
LEAST_WEIGHT = 0.2


class RatedItems(torch.nn.Module):
    """The items that each user has rated, with the ratings; every rank stores all users.

    Users and items are indexed in ascending order of ids. If a user has rated an item several
    times, the latest rating counts.

    Args:
        train: the known ratings, at least one; must not contain ratings to be predicted.
    """

    users: torch.Tensor  # int64 [u], sorted, distinct
    items: torch.Tensor  # int64 [i], sorted, distinct
    starts: torch.Tensor  # int64 [u + 1]: user i has entries starts[i] : starts[i + 1]
    columns: torch.Tensor  # int64 [n], ascending within a user: entry k is for items[columns[k]]
    ratings: torch.Tensor  # float32 [n]

    def __init__(self, train: Ratings) -> None:
        super().__init__()
        users, row = train.users.unique(return_inverse=True)
        items, column = train.items.unique(return_inverse=True)
        cells, cell = (row * len(items) + column).unique(return_inverse=True)
        by_time = train.timestamps.argsort(stable=True)
        # Find each user-item pair's latest rating; assigning by index might keep an earlier one.
        latest = torch.zeros_like(cells)
        place = torch.arange(len(by_time), device=cell.device)
        latest.scatter_reduce_(0, cell[by_time], place, "amax")
        counts = (cells // len(items)).bincount(minlength=len(users))
        self.register_buffer("users", users)
        self.register_buffer("items", items)
        self.register_buffer("starts", torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
        self.register_buffer("columns", cells % len(items))
        self.register_buffer("ratings", train.ratings[by_time[latest]])

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the bags of users.

        Args:
            rows: indices of users, int64 ``[n]``.

        Returns:
            ``(entries, offsets, bag)``, all int64. ``entries [e]`` are indices into `columns` and
            `ratings`. Those in ``entries[offsets[i]:offsets[i + 1]]`` belong to the user rows[i];
            for them, ``bag [e]`` contains i.
        """
        starts = self.starts[rows]
        counts = self.starts[rows + 1] - starts
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        bag = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), counts)
        place = torch.arange(len(bag), device=rows.device)
        return place + (starts - offsets[:-1])[bag], offsets, bag

    def scaled(self) -> torch.Tensor:
        """Return all ratings, scaled linearly to the range [0, 1], float32 ``[n]``.

        If all ratings are equal, all results are 1.
        """
        low, high = self.ratings.aminmax()
        if low == high:
            return torch.ones_like(self.ratings)
        return (self.ratings - low) / (high - low)

    def weights(self) -> torch.Tensor:
        """Return all ratings scaled to [0.2, 1], since 0 means unrated; float32 ``[n]``."""
        return LEAST_WEIGHT + (1 - LEAST_WEIGHT) * self.scaled()

    @classmethod
    def restored(cls, state: Mapping[str, torch.Tensor]) -> RatedItems:
        """Rebuild an object from its ``state_dict``."""
        one = torch.zeros(1)
        history = cls(Ratings(one.long(), one.long(), one, one))
        for name in history.state_dict():
            setattr(history, name, state[name])
        return history
