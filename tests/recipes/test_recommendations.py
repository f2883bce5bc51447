"""The best items are recommended to each user."""

import argparse

import pytest
import torch

from sparsekit.cli.common import UsageError
from sparsekit.datasets import DatasetUnavailableError, Ratings
from sparsekit.models import (
    Autoencoder,
    DenseAutoencoder,
    RatedItems,
    RatingModel,
    Recommendations,
    load_recommender,
    popular,
    recommend,
)
from sparsekit.recipes.autoencoder import recommend as command
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


def test_places_without_an_item_are_not_counted_or_written(tmp_path):
    scores = torch.tensor([[2.0, 0.1234567], [1.0, -torch.inf]])
    best = Recommendations(torch.tensor([3, 8]), torch.tensor([[5, 6], [7, 0]]), scores)
    assert len(best) == 3
    assert [row[:2] for row in best.rows()] == [(3, 5), (3, 6), (8, 7)]
    best.write(tmp_path / "recs.tsv")
    text = "3\t5\t2.000000\n3\t6\t0.123457\n8\t7\t1.000000\n"
    assert (tmp_path / "recs.tsv").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def history_of(*pairs):
    users, items = torch.tensor(pairs).T
    count = len(pairs)
    return RatedItems(Ratings(users, items, torch.ones(count), torch.arange(count).double()))


HISTORY = history_of((1, 10), (1, 20), (2, 30), (3, 30), (3, 20), (4, 40))


def test_what_is_popular_is_the_same_for_all_but_for_what_they_know():
    best = popular(HISTORY, 3)
    assert best.users.tolist() == [1, 2, 3, 4]
    assert [row[:2] for row in best.rows()] == [
        (1, 30), (1, 40), (2, 20), (2, 10), (2, 40), (3, 10), (3, 40), (4, 20), (4, 30), (4, 10)
    ]  # fmt: skip
    assert popular(HISTORY).items.shape == (4, 10)


class Constant:
    """A recommender that gives the same score to all items."""

    history, source, training = HISTORY, "", True

    def encode(self, rows):
        assert not self.training
        return torch.ones(len(rows), 1, requires_grad=True) * 1.0

    def vectors(self, begin, end):
        return torch.ones(end - begin, 1)

    def score(self, codes, vectors):
        return codes @ vectors.T

    def train(self, mode=True):
        self.training = mode


def test_equal_scores_are_in_the_order_of_ids():
    model = Constant()
    best = recommend(model)
    assert best.items.shape == (4, 10)
    assert [row[:2] for row in best.rows()][:4] == [(1, 30), (1, 40), (2, 10), (2, 20)]
    assert not best.scores.requires_grad
    assert model.training


def test_a_model_is_in_its_mode_again_after_an_error(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    for training in (True, False):
        model = Constant()
        model.train(training)
        model.vectors = fail
        with pytest.raises(ZeroDivisionError):
            recommend(model, 1)
        assert model.training == training


@pytest.mark.parametrize(("source", "titled"), [("MovieLens-100K", True), ("mine", False)])
def test_the_command_writes_the_best_items(tmp_path, monkeypatch, capsys, source, titled):
    loaded, model = [], Constant()
    model.source = source
    monkeypatch.setattr(command, "load_recommender", lambda path: loaded.append(path) or model)
    monkeypatch.setattr(command, "movielens_100k_titles", lambda: {30: "Film"})
    threads = torch.get_num_threads()
    monkeypatch.setattr(command, "set_threads", loaded.append)
    out = tmp_path / "recs.tsv"
    args = argparse.Namespace(snapshot=None, model="saved", out=str(out), k=99, show=2)
    assert command._recommend(args) == 0
    assert loaded == [None, "saved"]
    lines = out.read_text().splitlines()
    assert lines[:3] == ["1\t30\t1.000000", "1\t40\t1.000000", "2\t10\t1.000000"]
    assert len(lines) == 10
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{out}: 10 items for 4 users"
    assert printed[2:] == [f"   1    30  1.0000{'  Film' * titled}", "   1    40  1.0000"]
    args.k, args.show = 1, 0
    command._recommend(args)
    assert capsys.readouterr().out == f"{out}: 4 items for 4 users\n"
    assert torch.get_num_threads() == threads


def test_titles_that_cannot_be_had_are_left_out(tmp_path, monkeypatch, capsys):
    def unavailable():
        raise DatasetUnavailableError("no network")

    model = Constant()
    model.source = "MovieLens-100K"
    monkeypatch.setattr(command, "load_recommender", lambda path: model)
    monkeypatch.setattr(command, "movielens_100k_titles", unavailable)
    monkeypatch.setattr(command, "set_threads", lambda threads: None)
    args = argparse.Namespace(snapshot=None, model="saved", out=str(tmp_path / "x"), k=1, show=1)
    assert command._recommend(args) == 0
    assert capsys.readouterr().out.splitlines()[1] == "user  item   score"


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file or directory"), ValueError("why")]
)
def test_a_model_that_cannot_be_loaded(tmp_path, monkeypatch, error):
    def fail(path):
        raise error

    monkeypatch.setattr(command, "load_recommender", fail)
    args = argparse.Namespace(snapshot=None, model="saved", out=str(tmp_path / "x"), k=1, show=1)
    message = "^why$" if isinstance(error, ValueError) else "^saved: .*o such file"
    with pytest.raises(UsageError, match=message):
        command._recommend(args)
    args.model = str(tmp_path)
    with pytest.raises(UsageError, match=f"^{tmp_path}: is a folder; needed is the file that"):
        command._recommend(args)
    (tmp_path / "same").touch()
    args.model = args.out = str(tmp_path / "same")
    with pytest.raises(UsageError, match=r"--out .*same: is the file that is read"):
        command._recommend(args)
    args.out = str(tmp_path / "no" / "x")
    with pytest.raises(UsageError, match=r"--out .*: cannot write into"):
        command._recommend(args)


@pytest.mark.parametrize("k", [0, 2**20 + 1, 1.0])
def test_a_wrong_number_of_items_is_refused(k):
    with pytest.raises((TypeError, ValueError), match="recommend: k must be"):
        recommend(Constant(), k)


def test_models_that_recommend_are_loaded(tmp_path):
    for kind in (Autoencoder, DenseAutoencoder):
        kind(HISTORY, seed=2, source="here").save(tmp_path / "model")
        loaded = load_recommender(tmp_path / "model")
        assert isinstance(loaded, kind)
        assert loaded.source == "here"
        best = recommend(kind(HISTORY, seed=2), 2)
        assert recommend(loaded, 2).items.tolist() == best.items.tolist()
        torch.testing.assert_close(recommend(loaded, 2).scores, best.scores)
    RatingModel(Ratings(*torch.ones(3, 1).long(), torch.ones(1)), capacity=9).save(
        tmp_path / "model"
    )
    message = "needed is 'sparsekit autoencoder 1' or 'sparsekit dense autoencoder 1'"
    with pytest.raises(ValueError, match=message):
        load_recommender(tmp_path / "model")
