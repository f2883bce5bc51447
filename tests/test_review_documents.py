"""Documents of users and items have the right vocabulary, pieces and order."""

import pytest
import torch

from sparsekit.datasets import Ratings
from sparsekit.datasets.reviews import (
    Corpus,
    Documents,
    Reviews,
    Vocabulary,
    generated_reviews,
    reviews_of_films,
    split_reviews,
)


def ratings_of(*rows):
    """Return ratings from rows of (user, item, time)."""
    users, items, times = (torch.tensor(column) for column in zip(*rows, strict=True))
    return Ratings(users, items, torch.ones(len(rows)), times.double())


def test_selected_reviews_keep_texts_and_descriptions():
    ratings, described = ratings_of((1, 2, 3), (4, 5, 6), (7, 8, 9)), {2: ["x"]}
    texts, of_items = [["a"], ["b"], ["c"]], [["d"], ["e"], ["f"]]
    found = Reviews(ratings, texts, of_items, described)[torch.tensor([2, 0])]
    assert found.ratings.users.tolist() == [7, 1]
    assert (found.texts, found.of_items) == ([["c"], ["a"]], [["f"], ["d"]])
    assert found.descriptions == described
    found = Reviews(ratings, texts)[torch.tensor([1])]
    assert (found.texts, found.of_items, found.descriptions) == ([["b"]], None, {})


def test_the_latest_reviews_are_tested_on():
    rows = [(0, item, 100 - item) for item in range(9)]
    train, test = split_reviews(ratings_of(*rows, (1, 5, 0)))
    assert test.tolist() == [0]  # a fifth of nine, rounded down
    assert train.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(map(len, split_reviews(ratings_of(*rows), 0.5))) == [5, 4]
    with pytest.raises(ValueError, match=r"test_fraction must be in \[0, 1\), got 1"):
        split_reviews(ratings_of(*rows), 1)


def test_of_several_reviews_of_an_item_only_the_latest_is_used():
    train, test = split_reviews(ratings_of((0, 1, 9), (0, 2, 5), (0, 1, 3), (0, 2, 6)), 0.5)
    assert (train.tolist(), test.tolist()) == ([3], [0])


def test_words_are_numbered_by_count_and_then_by_code_point():
    vocabulary = Vocabulary([["b", "a", "c", "c"], ["b", "a", "d", "É", "É", "c"]])
    assert vocabulary.words == ["c", "a", "b", "É"]
    assert len(vocabulary) == 6
    assert vocabulary(["c", "d", "É"]) == [2, 1, 5]
    assert Vocabulary([["b", "a", "b", "b"], ["d", "d"]], 1, most=2).words == ["b", "d"]


def test_documents_are_cut_padded_and_without_one_author():
    pieces = {7: [(1, [10, 11]), (2, [12]), (1, [13])], 3: [(5, [20])], 5: []}
    owners, without = torch.tensor([[7, 7, 7, 3, 3, 5, 4, 9], [1, 2, 0, 5, 0, 0, 0, 0]])
    documents = Documents(pieces, 3)
    assert documents(owners, without).tolist() == [
        [12, 0, 0], [10, 11, 13], [10, 11, 12], [0, 0, 0], [20, 0, 0],
        [0, 0, 0], [0, 0, 0], [0, 0, 0],
    ]  # fmt: skip
    assert documents(owners[:0], without[:0]).shape == (0, 3)
    nothing = Documents({}, 3)(owners, without)
    assert nothing.shape == (8, 3)
    assert not nothing.any()


def test_a_document_keeps_what_fills_it_without_any_author():
    pieces = [(author, [10 * author + i for i in range(3)]) for author in range(1, 6)]
    documents = Documents({0: pieces}, 2)
    assert documents.words.tolist() == [10, 11, 12, 20, 21]
    found = documents(torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 9]))
    assert found.tolist() == [[20, 21], [10, 11], [10, 11]]


def test_a_corpus_has_the_latest_first_after_descriptions():
    train = ratings_of((0, 10, 5), (0, 11, 7), (1, 10, 6))
    texts, of_items = [["a"], ["b"], ["c"]], [["d"], ["a"], ["b"]]
    corpus = Corpus(Reviews(train, texts, of_items, {10: ["c", "c"]}), 4, min_count=1)
    a, b, c = corpus.vocabulary(["a", "b", "c"])
    assert (a, b, c) == (2, 3, 4)
    nobody = torch.tensor([-5, -5])
    assert corpus.users(torch.tensor([0, 1]), nobody).tolist() == [[b, a, 0, 0], [c, 0, 0, 0]]
    of_item = [[c, c, b, 1], [a, 0, 0, 0]]
    assert corpus.items(torch.tensor([10, 11]), nobody).tolist() == of_item
    users, items = corpus(torch.tensor([0, 1]), torch.tensor([10, 10]))
    assert users.tolist() == [[b, 0, 0, 0], [0, 0, 0, 0]]
    assert items.tolist() == [[c, c, b, 0], [c, c, 1, 0]]


def test_reviews_serve_both_documents_unless_items_have_words_of_their_own():
    train = ratings_of((0, 10, 5), (1, 10, 6), (1, 11, 4))
    corpus = Corpus(Reviews(train, [["a"], ["b"], ["a"]]))
    users, items = corpus(torch.tensor([5]), torch.tensor([10]))
    assert users.shape == items.shape == (1, 800)
    assert corpus.vocabulary.words == ["a"]  # b occurs only once
    assert items[0, :3].tolist() == [1, 2, 0]


def test_films_stand_for_reviews():
    films = {1: ["one"], 2: ["two"], 3: ["three"]}
    train = ratings_of((0, 1, 3), (0, 2, 1), (0, 3, 2), (5, 1, 0), (6, 9, 1), (6, 2, 0))
    written = reviews_of_films(train, films)
    assert written.texts == [["one"], ["two"], ["three"], ["one"], [], ["two"]]
    # The first film of a user has the words of the second one, if any.
    assert written.of_items == [["three"], ["three"], ["two"], [], ["two"], []]
    assert written.descriptions == films
    assert written.ratings is train


def test_generated_reviews_depend_on_the_seed_alone():
    found = generated_reviews(users=4, items=6, each=3, words=5)
    torch.manual_seed(1)
    with torch.device("meta"):  # stands in for cuda, since it is available anywhere
        again = generated_reviews(users=4, items=6, each=3, words=5)
    assert again.texts == found.texts
    assert generated_reviews(users=4, items=6, each=3, words=5, seed=1).texts != found.texts
    ratings = found.ratings
    pairs = list(zip(ratings.users.tolist(), ratings.items.tolist(), strict=True))
    assert len(set(pairs)) == len(found) == 12
    assert ratings.users.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert ratings.timestamps.tolist() == list(range(12))
    for (user, item), stars, text in zip(pairs, ratings.ratings.tolist(), found.texts, strict=True):
        assert text[:2] == [f"of{user}x{item}", f"stars{stars:.0f}"]
        assert len(text) == 5
    scores = set(generated_reviews().ratings.ratings.tolist())
    assert scores == {1, 2, 3, 4, 5}
    assert len(generated_reviews()) == 30 * 8
