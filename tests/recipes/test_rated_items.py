"""RatedItems returns the items that users have rated as bags."""

import torch

from sparsekit.datasets import Ratings
from sparsekit.models import RatedItems


def test_of_two_ratings_the_latest_counts():
    users, items = torch.tensor([1, 1, 1, 2]), torch.tensor([9, 9, 4, 9])
    values, times = torch.tensor([5.0, 2.0, 3.0, 1.0]), torch.tensor([7.0, 8.0, 1.0, 2.0])
    history = RatedItems(Ratings(users, items, values, times.double()))
    entries, offsets, bag = history(torch.tensor([1, 0]))
    assert history.items[history.columns[entries]].tolist() == [9, 4, 9]
    assert history.ratings[entries].tolist() == [1, 3, 2]
    assert offsets.tolist() == [0, 1, 3]
    assert bag.tolist() == [0, 1, 1]
    values.fill_(3.0)
    alone = RatedItems(Ratings(users, items, values, times.double()))
    assert alone.weights().tolist() == alone.scaled().tolist() == [1, 1, 1]
