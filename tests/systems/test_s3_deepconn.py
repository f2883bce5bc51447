"""S3, DeepCoNN on two ranks, meets its requirements.

tests/test_cli_deepconn.py runs the commands.
"""

import os
import subprocess
import sys

import pytest
import torch
from ranks.pool import Ranks

from sparsekit.datasets import Ratings
from sparsekit.datasets.reviews import (
    PADDING,
    UNKNOWN,
    Corpus,
    Documents,
    Vocabulary,
    generated_reviews,
    reviews_of_films,
    split_reviews,
)
from sparsekit.models import DeepCoNN
from sparsekit.recipes.deepconn.model import PLACEMENTS, TOWERS
from sparsekit.train.profile import profiled

# The sizes are small, but there are several filters, and ranks have uneven shares of documents.
WORDS, LENGTH, BATCH = 50, 9, 5
DIM, FILTERS, HIDDEN = 6, 4, 3
SPREAD = [p for p in PLACEMENTS if p != "single"]


@pytest.fixture(scope="module")
def two():
    pool = Ranks(2)
    yield pool
    pool.close()


def small_model(placement="single"):
    sizes = {"dim": DIM, "filters": FILTERS, "hidden": HIDDEN}
    return DeepCoNN(WORDS, LENGTH, placement=placement, seed=3, **sizes)


def some_batch(seed=0):
    """Return ratings and documents with repeated words, unknown words and padding."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.randint(1, WORDS, (2, BATCH, LENGTH), generator=generator)
    documents[0, :, 6:] = PADDING
    documents[1, 0] = UNKNOWN
    ratings = torch.randint(1, 6, (BATCH,), generator=generator).float()
    return documents[0], documents[1], ratings


def trained(rank, placement, steps=0):
    """Train; return ratings, this rank's gradients and weights, and the vectors of all words."""
    model = small_model(placement)
    optimizer = model.optimizer(lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model.losses(*some_batch(step)).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    users, items, ratings = some_batch(steps)
    found = model(users, items)
    (found - ratings).square().mean().backward()
    dense = {name: p.grad for name, p in model.named_parameters() if name != "words.weight"}
    weights = {n: p.detach() for n, p in model.named_parameters() if n != "words.weight"}
    gradient = model.words.weight.grad.coalesce()
    rows = gradient.indices()[0]
    ranks = 1 if placement == "single" else 2
    words = (rows * ranks + rank if ranks == 2 else rows).tolist()
    of_words = dict(zip(words, gradient.values(), strict=True))
    vectors = model.words.vectors(torch.arange(WORDS)).detach()
    return found.detach(), dense, of_words, weights, vectors


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * max(1, other.abs().max().item()))


def test_the_shapes_above():
    model = DeepCoNN(1000)
    assert model.words.embedding_dim == 50
    assert model.flat == 7970
    for tower in TOWERS:
        assert model.convolutions[tower].weight.shape == (10, 50, 3)
        assert model.dense[tower].weight.shape == (64, 7970)
    documents = torch.randint(1, 1000, (2, 800))
    vectors = model.words(documents)
    assert vectors.shape == (2, 800, 50)
    features = model._features("user", vectors)
    assert features.shape == (2, 7970)
    assert model._dense("user", features).shape == (2, 64)
    assert model(documents, documents).shape == (2,)


def test_a_rating_is_the_dot_product_of_towers_as_torch_computes_them():
    model = small_model()
    users, items, ratings = some_batch()
    vectors = []
    for tower, documents in zip(TOWERS, (users, items), strict=True):
        words = torch.nn.functional.embedding(documents, model.words.vectors(torch.arange(WORDS)))
        windows = words.unfold(1, 3, 1).flatten(2)  # [n, length - 2, dim * 3]
        convolution = model.convolutions[tower]
        found = windows @ convolution.weight.flatten(1).T + convolution.bias
        found = found.tanh().transpose(1, 2)
        found = torch.maximum(found[:, :, :-1], found[:, :, 1:]).reshape(BATCH, -1)
        dense = model.dense[tower]
        vectors.append((found @ dense.weight.T + dense.bias).clamp(min=0))
    expected = (vectors[0] * vectors[1]).sum(1)
    assert expected.abs().max() > 0
    close(model(users, items), expected)
    close(model.losses(users, items, ratings), (expected - ratings) ** 2)
    assert model.optimizer().param_groups[0]["lr"] == 1e-4


@pytest.mark.parametrize("placement", SPREAD)
@pytest.mark.parametrize("steps", [0, 4])
def test_placements_give_equal_outputs_and_gradients(two, placement, steps):
    ratings, dense, of_words, weights, vectors = trained(0, "single", steps)
    seen_dense, seen_words = {}, {}
    for found in two(trained, placement, steps):
        close(found[0], ratings)
        for name, gradient in found[1].items():
            assert name not in seen_dense, "a layer is on one rank"
            close(gradient, dense[name])
            close(found[3][name], weights[name])
            seen_dense[name] = gradient
        seen_words |= found[2]
        close(found[4], vectors)
    assert seen_dense.keys() == dense.keys()
    assert seen_words.keys() == of_words.keys()
    for word, gradient in of_words.items():
        close(seen_words[word], gradient)
    assert max(g.abs().max() for g in dense.values()) > 1e-3


def layers_here(rank, placement):
    model = small_model(placement)
    return list(model.convolutions), list(model.dense)


def test_split_has_a_tower_on_each_rank_and_alternating_every_second_layer(two):
    assert two(layers_here, "split") == [(["user"], ["user"]), (["item"], ["item"])]
    assert two(layers_here, "alternating") == [(["item"], ["user"]), (["user"], ["item"])]


def bytes_of_steps(rank, placement, trace=None):
    """Return the bytes of each exchange in two profiled steps, and the profiler's table."""
    model = small_model(placement)
    optimizer = model.optimizer()

    def step():
        optimizer.zero_grad()
        model.losses(*some_batch()).mean().backward()
        optimizer.step()

    step()
    with profiled(trace) as profile:
        step()
        step()
    moved = {op.name: op.bytes_moved for op in profile.ops if op.bytes_moved}
    return moved, profile


def test_profile_reports_calls_time_share_and_bytes_of_each_op(two, tmp_path):
    _, profile = bytes_of_steps(0, "single", tmp_path / "single.json")
    ops = {op.name: op for op in profile.ops}
    assert ops["aten::convolution_backward"].calls == 2 * len(TOWERS)
    assert all(op.seconds >= 0 for op in profile.ops)
    assert sum(op.share for op in profile.ops) == pytest.approx(1)
    seconds = [op.seconds for op in profile.ops]
    assert seconds == sorted(seconds, reverse=True)
    header, *lines = profile.table(5).splitlines()
    assert header.split() == ["op", "calls", "time", "share", "bytes", "moved"]
    assert len(lines) == 5 + 2
    assert str(profile) == profile.table()
    assert lines[0].split()[0].startswith(profile.ops[0].name[:40])
    assert "aten::" in (tmp_path / "single.json").read_text()
    for moved, of_rank in two(bytes_of_steps, "alternating", tmp_path / "two.json"):
        assert of_rank.ranks == 2
        ops = {op.name: op for op in of_rank.ops}
        assert ops["aten::convolution_backward"].calls == 2 * len(TOWERS)
        assert moved.keys() == {"exchange: towers", "exchange: layers"}
        assert ops["exchange: towers"].seconds > 0
    for name in ("two.json", "two.rank1.json"):
        assert "exchange: towers" in (tmp_path / name).read_text()


def test_bytes_of_alternating_exceed_those_of_split_and_single_moves_none(two):
    single, _ = bytes_of_steps(0, "single")
    split, alternating = (two(bytes_of_steps, placement)[0][0] for placement in SPREAD)
    assert sum(alternating.values()) > sum(split.values()) > sum(single.values()) == 0
    # Expected bytes of each layer's exchanges: 2 steps, 2 ranks, heads of 16 bytes.
    documents = BATCH * HIDDEN * 4
    padded = -(-documents // 16) * 16
    assert split["exchange: towers"] == 2 * 2 * (16 + padded)
    sizes = [BATCH * LENGTH * DIM * 4, BATCH * FILTERS * (LENGTH - 3) * 4]
    both_ways = sum(2 * (16 + -(-size // 16) * 16) for size in sizes)
    assert alternating["exchange: towers"] == 2 * 2 * (16 + padded + both_ways)
    assert split["exchange: layers"] == alternating["exchange: layers"] > 0


def fails_on_other_shapes(rank):
    model = small_model("split")
    users, items, _ = some_batch()
    try:
        model(users[: 3 + rank], items[: 3 + rank])
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ranks_with_other_batches_raise(two):
    for message in two(fails_on_other_shapes):
        assert "DeepCoNN's documents" in message


def test_spread_placements_need_two_ranks():
    with pytest.raises(ValueError, match="placement 'split' needs 2 ranks, there are 1"):
        small_model("split")
    with pytest.raises(ValueError, match="placement"):
        small_model("both")


@pytest.fixture(scope="module")
def reviews():
    return generated_reviews()


def test_the_target_review_is_never_in_its_own_documents(reviews):
    train, _ = split_reviews(reviews.ratings)
    written = reviews[train]
    corpus = Corpus(written, length=200, min_count=1)
    number = {word: i for i, word in enumerate(corpus.vocabulary.words, UNKNOWN + 1)}
    ratings = written.ratings
    users, items = corpus(ratings.users, ratings.items)
    for i in range(len(written)):
        user, item = ratings.users[i].item(), ratings.items[i].item()
        own = number[f"of{user}x{item}"]
        # Each review has one unique word: its documents must contain the unique words of all other
        # reviews, but not its own.
        for documents, same in ((users, ratings.users == user), (items, ratings.items == item)):
            others = set(same.nonzero()[:, 0].tolist()) - {i}
            names = [f"of{ratings.users[j]}x{ratings.items[j]}" for j in others]
            there = set(documents[i].tolist())
            assert own not in there
            assert {number[name] for name in names} <= there
            assert sum(documents[i] != PADDING) == sum(len(written.texts[j]) for j in others)


def test_a_test_pair_has_documents_of_the_train_part_only(reviews):
    train, test = split_reviews(reviews.ratings)
    corpus = Corpus(reviews[train], length=200, min_count=1)
    of_test = {f"of{u}x{i}" for u, i in pairs_of(reviews.ratings[test])}
    assert of_test
    assert of_test.isdisjoint(corpus.vocabulary.words)
    users, items = corpus(reviews.ratings.users[test], reviews.ratings.items[test])
    assert UNKNOWN not in users
    assert UNKNOWN not in items


def test_a_film_is_not_in_the_document_of_a_user_whose_rating_of_it_is_the_target():
    films = {item: [f"film{item}", "drama"] for item in range(4)}
    users, items = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 1, 3])
    train = Ratings(users, items, torch.ones(5), torch.arange(5.0).double())
    written = reviews_of_films(train, films)
    # A film's document contains the film that its user rated just before, or just after if it was
    # the first.
    assert [text[0] for text in written.of_items] == ["film1", "film0", "film1", "film3", "film1"]
    corpus = Corpus(written, length=8, min_count=1)
    words = ["", "?", *corpus.vocabulary.words]

    def read(document):
        return [words[word] for word in document.tolist() if words[word].startswith("film")]

    of_users, of_items = corpus(users, items)
    assert [read(d) for d in of_users] == [
        ["film2", "film1"],
        ["film2", "film0"],
        ["film1", "film0"],
        ["film3"],
        ["film1"],
    ]
    # The description comes first, then the words added by other users.
    assert read(of_items[1]) == ["film1", "film3"]
    assert read(of_items[3]) == ["film1", "film0"]


def pairs_of(ratings):
    return set(zip(ratings.users.tolist(), ratings.items.tolist(), strict=True))


@pytest.mark.parametrize("repeated", [False, True])
def test_held_out_pairs_are_disjoint(reviews, repeated):
    ratings = reviews.ratings
    # Repeat each pair at a later time: a split by rating would put some pairs into both parts.
    if repeated:
        again = [torch.cat([x, x]) for x in (ratings.users, ratings.items, ratings.ratings)]
        ratings = Ratings(*again, torch.arange(2.0 * len(ratings)).double())
    train, test = split_reviews(ratings)
    assert len(test) == 30  # one rating in eight of each user
    assert pairs_of(ratings[train]).isdisjoint(pairs_of(ratings[test]))
    assert pairs_of(ratings[train]) | pairs_of(ratings[test]) == pairs_of(ratings)
    if repeated:
        assert min(train.min(), test.min()) >= len(reviews), "the latest counts"


SHOW_WORDS = """
from sparsekit.datasets.reviews import Corpus, generated_reviews
print(Corpus(generated_reviews(), 20).vocabulary.words)
print(hash("word1"))
"""


def test_the_vocabulary_does_not_depend_on_pythonhashseed():
    here = os.environ.get("PYTHONHASHSEED")  # if this is unset, hashes are random
    environment = {**os.environ, "PYTHONHASHSEED": "2" if here == "1" else "1"}
    done = subprocess.run(
        [sys.executable, "-c", SHOW_WORDS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words, seeded = done.stdout.splitlines()
    assert int(seeded) != hash("word1")
    assert words == str(Corpus(generated_reviews(), 20).vocabulary.words)
    assert len(words) > 100


def test_words_are_numbered_by_count_and_then_by_code_point():
    vocabulary = Vocabulary([["b", "a", "c", "c"], ["b", "a", "d", "É", "É", "c"]])
    assert vocabulary.words == ["c", "a", "b", "É"]
    assert len(vocabulary) == 6
    assert vocabulary(["É", "d", "c", ""]) == [5, UNKNOWN, 2, UNKNOWN]
    assert Vocabulary([["b", "a", "b"]], min_count=1, most=1).words == ["b"]


def test_unknown_words_and_padding_have_rows_of_their_own():
    assert (PADDING, UNKNOWN) == (0, 1)
    corpus = Corpus(generated_reviews(), length=200, min_count=2)
    users, _ = corpus(torch.tensor([0, 10**12]), torch.tensor([0, 0]))
    assert (users[0] == UNKNOWN).any()  # words that occur only once
    assert (users[0] == PADDING).any()
    assert (users[1] == PADDING).all()  # an unknown user
    assert min(corpus.vocabulary(corpus.vocabulary.words)) == 2
    model = small_model()
    padding, unknown, word = model.words.vectors(torch.arange(3))
    assert (padding == 0).all()
    assert (unknown != 0).any()
    assert not torch.equal(unknown, word)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_gradient_of_padding_is_zero_and_that_of_unknown_words_is_not(two, placement):
    single = placement == "single"
    results = [trained(0, placement, 3)] if single else two(trained, placement, 3)
    of_words = {word: g for result in results for word, g in result[2].items()}
    assert PADDING not in of_words or not of_words[PADDING].any()
    assert of_words[UNKNOWN].any()
    for result in results:
        assert (result[4][PADDING] == 0).all()  # padding stays zero


def test_documents_are_cut_and_filled_up():
    pieces = {7: [(1, [2, 3]), (2, [4]), (1, [5]), (3, [6, 7, 8, 9])], 9: []}
    documents = Documents(pieces, 4)
    owners, without = torch.tensor([7, 7, 7, 9, 8]), torch.tensor([0, 1, 3, 0, 0])
    expected = [[2, 3, 4, 5], [4, 6, 7, 8], [2, 3, 4, 5], [0] * 4, [0] * 4]
    assert documents(owners, without).tolist() == expected
    assert documents(owners[:0], without[:0]).shape == (0, 4)


def test_documents_of_another_length_are_refused():
    users, items, _ = some_batch()
    with pytest.raises(ValueError, match=r"documents of items must be \[5, 9\], got \[5, 8\]"):
        small_model()(users, items[:, 1:])
    with pytest.raises(ValueError, match=r"documents of items must be \[5, 9\], got \[4, 9\]"):
        small_model()(users, items[1:])
