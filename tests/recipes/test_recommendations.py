"""Recommendation of the best items to each user."""

import torch

from sparsekit.datasets import Ratings
from sparsekit.models import Autoencoder, RatedItems, Recommendations, recommend
from sparsekit.recipes.autoencoder import recommendations


def test_hits_are_of_items_that_were_recommended():
    scores = torch.tensor([[2.0, 1.0, -torch.inf], [1.0, -torch.inf, -torch.inf]])
    best = Recommendations(torch.tensor([3, 8]), torch.tensor([[5, 6, 7], [6, 5, 5]]), scores)
    users, items = torch.tensor([3, 3, 8, 3, 9]), torch.tensor([5, 7, 5, 5, 6])
    test = Ratings(users, items, torch.ones(5), torch.arange(5.0).double())
    hits, relevant = best.hits(test)
    assert hits.tolist() == [[True, False, False], [False] * 3]
    assert relevant.tolist() == [2, 1]


def test_pieces_of_users_and_items_make_no_difference(monkeypatch):
    users = torch.tensor([1, 1, 2, 3, 4, 4, 5, 6, 7]) * 10
    items = torch.tensor([1, 2, 3, 4, 5, 6, 7, 1, 2])
    history = RatedItems(Ratings(users, items, torch.ones(9), torch.arange(9.0).double()))
    model = Autoencoder(history, dim=4, seed=1)
    whole = recommend(model, 3)
    monkeypatch.setattr(recommendations, "USERS", 3)
    monkeypatch.setattr(recommendations, "ITEMS", 2)
    pieces = recommend(model, 3)
    assert pieces.users.tolist() == whole.users.tolist() == sorted(set(users.tolist()))
    assert pieces.items.tolist() == whole.items.tolist()
    torch.testing.assert_close(pieces.scores, whole.scores)
    rated = {(user, item) for user, item in zip(users.tolist(), items.tolist(), strict=True)}
    assert rated.isdisjoint((user, item) for user, item, _ in whole.rows())
    assert len(list(whole.rows())) == 3 * 7
