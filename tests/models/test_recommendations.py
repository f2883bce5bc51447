"""The best items of each user."""

import torch

from sparsekit.datasets import Ratings
from sparsekit.models import Recommendations


def test_hits_are_of_items_that_were_recommended():
    scores = torch.tensor([[2.0, 1.0, -torch.inf], [1.0, -torch.inf, -torch.inf]])
    best = Recommendations(torch.tensor([3, 8]), torch.tensor([[5, 6, 7], [6, 5, 5]]), scores)
    users, items = torch.tensor([3, 3, 8, 3, 9]), torch.tensor([5, 7, 5, 5, 6])
    test = Ratings(users, items, torch.ones(5), torch.arange(5.0).double())
    hits, relevant = best.hits(test)
    assert hits.tolist() == [[True, False, False], [False] * 3]
    assert relevant.tolist() == [2, 1]
