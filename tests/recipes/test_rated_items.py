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


def test_ratings_are_scaled_and_bags_may_be_asked_for_in_any_order():
    users, items = torch.tensor([7, 3, 3, 7, 9]), torch.tensor([2, 8, 2, 5, 8])
    values = torch.tensor([1.0, 5.0, 2.0, 3.0, 4.0])
    history = RatedItems(Ratings(users, items, values, torch.arange(5).double()))
    assert history.users.tolist() == [3, 7, 9]
    assert history.items.tolist() == [2, 5, 8]
    assert history.ratings.tolist() == [2, 5, 1, 3, 4]
    assert history.scaled().tolist() == [0.25, 1, 0, 0.5, 0.75]
    torch.testing.assert_close(history.weights(), torch.tensor([0.4, 1, 0.2, 0.6, 0.8]))
    entries, offsets, bag = history(torch.tensor([2, 0, 2]))
    assert (entries.tolist(), offsets.tolist()) == ([4, 0, 1, 4], [0, 1, 3, 4])
    assert bag.tolist() == [0, 1, 1, 2]
    assert [part.tolist() for part in history(torch.tensor([], dtype=torch.int64))] == [[], [0], []]
    again = RatedItems.restored(history.state_dict())
    for name, value in history.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
