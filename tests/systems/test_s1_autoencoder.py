"""S1, an autoencoder recommender on several ranks, meets its requirements.

Slow measurements are in ``benchmarks/systems/autoencoder.py``.
"""

import io
import math

import numpy as np
import pytest
import torch

from sparsekit import cli
from sparsekit.datasets import Ratings, read_ratings
from sparsekit.models import (
    Autoencoder,
    DenseAutoencoder,
    RatedItems,
    load_recommender,
    popular,
    recommend,
)
from sparsekit.optim import RMSProp
from sparsekit.train import Trainer
from sparsekit.train.metrics import ndcg_at_k, precision_at_k, recall_at_k

USERS = 943  # as in MovieLens-100K; no tested number of ranks divides it
ITEMS = 120
KINDS = {"sparse": Autoencoder, "original": DenseAutoencoder}


def make_ratings(users=USERS, items=ITEMS, each=8, seed=0):
    """Return ratings from 1 to 5; each user likes a third of the items. Ids are far apart."""
    draw = torch.Generator().manual_seed(seed)
    user = torch.arange(users).repeat_interleave(each)
    item = torch.rand(users, items, generator=draw).argsort(1)[:, :each].reshape(-1)
    liked = (user + item) % 3 == 0
    rating = torch.where(liked, 4, 1) + torch.randint(0, 2, item.shape, generator=draw)
    time = torch.randperm(len(user), generator=draw).double()
    return Ratings(user * 10**12 - 7, item * 10**10 + 3, rating.float(), time)


def make_model(kind, ratings=None):
    settings = {"dim": 8, "negatives": 40} if kind == "sparse" else {}
    return KINDS[kind](RatedItems(ratings or make_ratings()), seed=3, **settings)


def fit(model, epochs, batch_size, seed=5, loss_fn=None):
    """Train a model; return the history."""
    trainer = Trainer(
        model,
        loss_fn or (lambda _, batch: (model.losses(batch[0]), 0.0)),
        model.optimizers(),
        seed=seed,
        stream=io.StringIO(),
    )
    rows = torch.arange(len(model.history.users))
    return trainer.fit((rows,), epochs=epochs, global_batch_size=batch_size)


# TF's RMSProp


def test_tf_rmsprop_equals_a_numpy_reference_to_1e_12():
    draw = np.random.default_rng(0)
    shapes = [(7, 3), (3,), (3, 5)]
    weights = [draw.normal(size=shape) for shape in shapes]
    parameters = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
    optimizer = RMSProp(parameters, lr=0.03, form="tensorflow")
    means = [np.ones(shape) for shape in shapes]
    for step in range(200):
        for i, parameter in enumerate(parameters):
            # Gradients have all sizes: eps matters for tiny ones once the average has decayed.
            g = draw.normal(size=shapes[i]) * 10.0 ** draw.uniform(-12, 2, shapes[i])
            parameter.grad = torch.tensor(g if step < 150 else g * 0)
            g = parameter.grad.numpy()
            means[i] = 0.9 * means[i] + 0.1 * g * g
            weights[i] = weights[i] - 0.03 * g / np.sqrt(means[i] + 1e-10)
        optimizer.step()
        for parameter, expected in zip(parameters, weights, strict=True):
            assert np.abs(parameter.detach().numpy() - expected).max() <= 1e-12
    # torch starts its accumulator at 0 and adds eps outside: its first step is ten times as large.
    other = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    other.grad = torch.ones_like(other)
    torch.optim.RMSprop([other], lr=0.03, alpha=0.9).step()
    assert abs(other.item()) > 3 * 0.03 / math.sqrt(1 + 1e-10)


def test_the_original_steps_with_it():
    (optimizer,) = make_model("original").optimizers()
    (group,) = optimizer.param_groups
    assert isinstance(optimizer, RMSProp)
    assert (group["form"], group["lr"], group["alpha"], group["eps"]) == (
        "tensorflow", 0.03, None, None
    )  # fmt: skip
    assert len(group["params"]) == 8


# Ranks


def weights_of(model):
    """Return the item weights of all ranks, followed by the dense weights."""
    if isinstance(model, DenseAutoencoder):
        items = model.vectors(0, ITEMS).detach()
    else:
        keys = model.history.items
        layers = model.embeddings.layers
        items = torch.cat([layers[name].vectors(keys) for name in ("rated", "scored")], 1)
    dense = [p.detach().reshape(-1) for name, p in model.named_parameters() if "embed" not in name]
    return items, torch.cat(dense)


def train_and_recommend(rank, kind, path=None):
    """Train a model; return its weights, the loss of each epoch, and recommendations."""
    model = make_model(kind)
    history = fit(model, 2, 157)  # 943 = 6 * 157 + 1: some ranks have no sample of the last batch
    best = recommend(model, 4)
    if path is not None:
        model.save(path)
    return *weights_of(model), [epoch.loss for epoch in history], best.items, best.scores


@pytest.mark.parametrize("kind", KINDS)
def test_1_2_and_3_ranks_give_the_same_weights_on_943_users(ranks, kind, tmp_path):
    start = weights_of(make_model(kind))
    one = train_and_recommend(0, kind)
    moved = [
        (before - after).abs().max().item() for before, after in zip(start, one[:2], strict=True)
    ]
    assert min(moved) > 1e-3
    for *weights, losses, best, scores in ranks(train_and_recommend, kind, tmp_path / "model.pt"):
        for found, expected, by in zip(weights, one[:2], moved, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * by + 5e-7)
        assert losses == pytest.approx(one[2], rel=1e-5)
        assert best.shape == (USERS, 4)
        torch.testing.assert_close(scores, one[4], rtol=0, atol=1e-4)
    # A model saved on several ranks recommends the same items on one rank.
    loaded = recommend(load_recommender(tmp_path / "model.pt"), 4)
    assert torch.equal(loaded.users, make_model(kind).history.users)
    torch.testing.assert_close(loaded.scores, scores, rtol=0, atol=1e-6)


# Epochs and losses


@pytest.mark.parametrize("kind", KINDS)
def test_each_batch_is_used_once_per_epoch(kind):
    model = make_model(kind)
    seen = []

    def record(_, batch):
        seen.append(batch[0])
        return model.losses(batch[0]), 0.0

    fit(model, 2, 250, loss_fn=record)
    assert [len(rows) for rows in seen] == [250, 250, 250, 193] * 2
    epochs = torch.cat(seen).view(2, USERS)
    assert torch.equal(epochs.sort(1).values, torch.arange(USERS).expand(2, -1))
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_reported_loss_is_the_global_mean(kind):
    """The reported loss is the mean of all users' losses, for any batch size."""
    model = make_model(kind)
    losses = []

    def record(_, batch):
        of_batch = model.losses(batch[0])
        losses.append(of_batch.detach())
        return of_batch, 0.0

    (epoch,) = fit(model, 1, 250, loss_fn=record)
    expected = torch.cat(losses).double().mean().item()
    assert epoch.loss == pytest.approx(expected, rel=1e-9)
    mean_of_means = sum(batch.double().mean().item() for batch in losses) / 4
    assert mean_of_means != pytest.approx(expected, rel=1e-5)


def test_the_original_loss_is_over_all_cells():
    model = make_model("original")
    rows = torch.tensor([5, 0, 940])
    matrix = torch.zeros(USERS, ITEMS)
    ratings = make_ratings()
    user = torch.searchsorted(model.history.users, ratings.users)
    item = torch.searchsorted(model.history.items, ratings.items)
    matrix[user, item] = (ratings.ratings - 1) / 4
    with torch.no_grad():
        hidden = matrix[rows]
        for weight, bias in zip(model.weights, model.biases, strict=True):
            hidden = 1 / (1 + torch.exp(-(hidden @ weight + bias)))
        torch.testing.assert_close(model(rows), hidden)
        expected = ((hidden - matrix[rows]) ** 2).mean(1)
        torch.testing.assert_close(model.losses(rows), expected)
    assert [tuple(weight.shape) for weight in model.weights] == [
        (ITEMS, 10), (10, 5), (5, 10), (10, ITEMS)
    ]  # fmt: skip
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert start.mean().item() == pytest.approx(0, abs=0.1)
    assert start.std().item() == pytest.approx(1, abs=0.1)


# The masked loss


def lookup(model, name, item):
    return model.embeddings.layers[name].vectors(model.history.items[item : item + 1])[0].double()


def plain_loss(model, row, kept, drawn):
    """Compute one user's loss with plain loops; a rating r has the weight r / 5."""
    ratings = make_ratings(30, 20, 6)
    mine = (ratings.users == model.history.users[row]).nonzero()[:, 0]
    columns = torch.searchsorted(model.history.items, ratings.items[mine]).tolist()
    weight = dict(zip(columns, (ratings.ratings[mine].double() / 5).tolist(), strict=True))
    bag = [column for column in sorted(weight) if column in kept]
    code = model.bias.detach().double()
    if bag:
        norm = math.sqrt(sum(weight[j] ** 2 for j in bag))
        code = code + sum(weight[j] * lookup(model, "rated", j) for j in bag) / norm
    code = torch.tanh(code)
    for linear in model.hidden:
        code = torch.tanh(linear.weight.double() @ code + linear.bias.double())

    def score(item):
        vector = lookup(model, "scored", item)
        return (vector[0] + vector[1:] @ code).item()

    chance = 1 - (1 - 1 / 20) ** model.negatives
    total = sum(math.exp(score(i)) for i in weight)
    total += sum(math.exp(score(i)) / chance for i in drawn if i not in weight)
    mean = sum(w * score(i) for i, w in weight.items()) / sum(weight.values())
    return math.log(total) - mean


@pytest.mark.parametrize("layers", [0, 2])
def test_the_masked_loss_counts_rated_and_drawn_items_only(layers):
    history = RatedItems(make_ratings(30, 20, 6))
    model = Autoencoder(history, dim=4, layers=layers, negatives=5, dropout=0.5, seed=1)
    for name in ("rated", "scored"):  # use larger values than the initial ones
        layer = model.embeddings.layers[name]
        draw = torch.Generator().manual_seed(2)
        layer.assign(history.items, torch.randn(20, layer.embedding_vec_size, generator=draw))
    rows = torch.tensor([7, 0, 29, 7])
    entries, _, bag = history(rows)
    kept, drawn = model._draw(entries)
    model.steps -= 1
    with torch.no_grad():
        losses = model.losses(rows)
        again = model.losses(rows)
    left = [history.columns[entries[kept & (bag == i)]].tolist() for i in range(len(rows))]
    expected = [
        plain_loss(model, row, bag, drawn.tolist())
        for row, bag in zip(rows.tolist(), left, strict=True)
    ]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert losses[0] == losses[3]
    assert not torch.equal(losses, again)  # the draws differ
    assert 0 < kept.sum() < len(kept)
    assert 1 < len(drawn) <= 5


def test_a_rating_of_1_is_told_apart_from_unrated():
    ratings = make_ratings(30, 20, 6)
    history = RatedItems(ratings)
    weights, cells = history.weights(), history.scaled()
    assert weights.tolist() == pytest.approx((history.ratings / 5).tolist())
    assert cells.tolist() == pytest.approx(((history.ratings - 1) / 4).tolist())
    assert (history.ratings == 1).any()
    # Compare the codes of a user with and without the ratings of 1. By default the codes differ;
    # with the original's settings they are equal.
    user = ratings.users[ratings.ratings == 1][0]
    rest = RatedItems(ratings[(ratings.users != user) | (ratings.ratings > 1)])
    assert torch.equal(rest.items, history.items)
    row = int((history.users == user).nonzero())
    assert rest.users[row] == user
    for kind, same in (("sparse", False), ("original", True)):
        codes = []
        for each in (history, rest):
            model = KINDS[kind](each, seed=1).eval()
            codes.append(model.encode(torch.tensor([row])).detach())
        assert torch.allclose(*codes, atol=1e-6) == same


def test_inputs_and_outputs_stay_sparse():
    """Each item has a row on one rank only, and no step makes a tensor of size users x items."""
    history = RatedItems(make_ratings(400, 3000, 5))
    model = Autoencoder(history, dim=4, negatives=10)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else [out]:
                if isinstance(each, torch.Tensor):
                    largest = max(largest, each.numel())
            return out

    with Watch():
        model.losses(torch.arange(400)).mean().backward()
    # A batch has 1,200,000 cells; the vectors in use have 2,010 * 5 elements.
    assert 400 * 10 <= largest < 40_000
    assert model.embeddings.layers["scored"].weight.shape == (len(history.items), 5)


# Recommendations


@pytest.fixture
def data(tmp_path):
    ratings = make_ratings(60, 30, 10)
    path = tmp_path / "ratings.tsv"
    columns = (ratings.users, ratings.items, ratings.ratings, ratings.timestamps)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    path.write_text("".join(f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows))
    return path


@pytest.mark.parametrize("arguments", [[], ["--original"]])
def test_the_command_writes_recs_tsv(data, tmp_path, capsys, arguments):
    """Lines contain user, item and score, by user and descending score, without rated items."""
    model, recs, same = (tmp_path / name for name in ("model.pt", "recs.tsv", "same.tsv"))
    train = ["train", "autoencoder", "--data", str(data), "--ranks", "1", "--epochs", "3"]
    train += ["--save", str(model), "--recs", str(same), *arguments]
    assert cli.main(train) == 0
    output = capsys.readouterr().out
    assert "epoch 3/3  loss " in output
    assert "test P@10   recall@10     NDCG@10\npopularity" in output
    assert cli.main(["recommend", str(model), "--out", str(recs), "--show", "4"]) == 0
    shown = capsys.readouterr().out.splitlines()
    text = recs.read_text()
    assert text == same.read_text()
    assert text.endswith("\n")
    rows = [line.split("\t") for line in text.splitlines()]
    assert {len(row) for row in rows} == {3}
    users, items, scores = zip(*rows, strict=True)
    users, items, scores = list(map(int, users)), list(map(int, items)), list(map(float, scores))
    known, _ = read_ratings(data).split_by_time()
    assert users == sorted(users)
    assert set(users) == set(known.users.tolist())
    assert max(users.count(user) for user in set(users)) == 10
    assert set(items) <= set(known.items.tolist())
    seen = set(zip(known.users.tolist(), known.items.tolist(), strict=True))
    pairs = list(zip(users, items, strict=True))
    assert seen.isdisjoint(pairs)
    assert len(set(pairs)) == len(pairs)
    for i in range(1, len(rows)):
        assert users[i] > users[i - 1] or scores[i] <= scores[i - 1]
    assert shown[0] == f"{recs}: {len(rows)} items for 60 users"
    assert [line.split()[:2] for line in shown[2:]] == [row[:2] for row in rows[:4]]


def brute_force(hits, relevant, k):
    """Return precision, recall and NDCG, computed in loops."""
    values = []
    for row, count in zip(hits, relevant, strict=True):
        if count == 0:
            continue
        found = sum(row[:k])
        gain = sum(1 / math.log2(i + 2) for i, hit in enumerate(row[:k]) if hit)
        best = sum(1 / math.log2(i + 2) for i in range(min(k, count)))
        values.append((found / k, found / count, gain / best))
    return [sum(column) / len(values) for column in zip(*values, strict=True)]


@pytest.mark.parametrize("k", [1, 3, 10])
def test_precision_recall_and_ndcg_equal_brute_force(k):
    draw = np.random.default_rng(k)
    hits = draw.random((200, 10)) < draw.random((200, 1)) ** 2
    relevant = hits.sum(1) + draw.integers(0, 8, 200) * (draw.random(200) < 0.7)
    assert (relevant == 0).any()
    arguments = torch.tensor(hits), torch.tensor(relevant), k
    found = [metric(*arguments) for metric in (precision_at_k, recall_at_k, ndcg_at_k)]
    assert found == pytest.approx(brute_force(hits, relevant, k), rel=1e-12)


@pytest.mark.parametrize("k", [3, 25])
def test_recommendations_and_hits_equal_brute_force(k, monkeypatch):
    """Items are scored 7 at a time and users in parts; for k = 25 no user has enough items."""
    monkeypatch.setattr("sparsekit.recipes.autoencoder.recommendations.ITEMS", 7)
    monkeypatch.setattr("sparsekit.recipes.autoencoder.recommendations.USERS", 8)
    ratings = make_ratings(30, 20, 6)
    train, test = ratings.split_by_time(0.4)
    # Add unknown items and users, and repeat a rating.
    test.users[5:7], test.items[6:8] = 5, 1
    test = test[torch.tensor([*range(len(test)), 0])]
    model = Autoencoder(RatedItems(train), dim=4, seed=1).train()
    best = recommend(model, k)
    assert model.training
    assert all(len(layer.table) == 0 for layer in model.embeddings.layers.values())
    rows = list(best.rows())
    history = model.history
    with torch.no_grad():
        scores = (
            model.eval()
            .score(model.encode(torch.arange(30)), model.vectors(0, len(history.items)))
            .tolist()
        )
    counts = {item: int((train.items == item).sum()) for item in history.items.tolist()}
    hits, relevant = best.hits(test)
    popular_hits, same = popular(history, k).hits(test)
    assert torch.equal(relevant, same)
    at = 0
    for u, user in enumerate(history.users.tolist()):
        seen = set(train.items[train.users == user].tolist())
        wanted = set(test.items[test.users == user].tolist())
        left = [i for i in history.items.tolist() if i not in seen]
        place = {item: i for i, item in enumerate(history.items.tolist())}
        order = sorted(left, key=lambda item: -scores[u][place[item]])[:k]
        mine, at = rows[at : at + len(order)], at + len(order)
        assert [row[:2] for row in mine] == [(user, item) for item in order]
        assert [row[2] for row in mine] == pytest.approx(
            [scores[u][place[item]] for item in order], abs=1e-6
        )
        assert int(relevant[u]) == len(wanted)
        expected = [item in wanted for item in order]
        assert hits[u].tolist() == expected + [False] * (k - len(order))
        order = sorted(left, key=lambda item: (-counts[item], item))[:k]
        expected = [item in wanted for item in order]
        assert popular_hits[u].tolist() == expected + [False] * (k - len(order))
    assert at == len(rows) == len(best)
