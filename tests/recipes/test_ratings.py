"""Tests of the rating model and its baselines."""

import io
import itertools

import pytest
import torch

from sparsekit.datasets import Ratings
from sparsekit.models import RatingModel, UserHistory, fit_bias_baseline, rmse
from sparsekit.optim import LazyAdam, split_embedding_variable_from_others
from sparsekit.recipes.ratings import model as ratings
from sparsekit.recipes.ratings.baselines import DAMPINGS
from sparsekit.train import Trainer

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def make_ratings(rows: list[tuple[int, int, float]]) -> Ratings:
    """Return ratings from rows of (user, item, rating) in chronological order."""
    users, items, values = zip(*rows, strict=True)
    times = torch.arange(len(rows), dtype=torch.float64)
    return Ratings(torch.tensor(users), torch.tensor(items), torch.tensor(values).float(), times)


def low_rank(num_users: int = 80, num_items: int = 50, seed: int = 0) -> Ratings:
    """Return 30% of the elements of a rank-2 matrix with biases as ratings; ids are far apart."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    truth = (
        3 + 0.3 * (draw(num_users, 1) + draw(num_items)) + draw(num_users, 2) @ draw(2, num_items)
    )
    user, item = (torch.rand(num_users, num_items, generator=generator) < 0.3).nonzero().T
    order = torch.randperm(len(user), generator=generator)
    user, item = user[order], item[order]
    times = torch.arange(len(user), dtype=torch.float64)
    return Ratings(user * 10**15 - 10**16, item * -(7**20), truth[user, item], times)


# History


def bags(history: UserHistory, users: list[int], without: list[int]) -> list[list[int]]:
    values, offsets = history(torch.tensor(users), torch.tensor(without))
    assert offsets[0] == 0
    assert offsets[-1] == len(values)
    return [bag.tolist() for bag in values.tensor_split(offsets[1:-1])]


def test_history_is_the_latest_items_without_the_target():
    train = make_ratings(
        [(5, 1, 0), (INT64_MIN, 9, 0), (5, 2, 0), (5, INT64_MAX, 0), (5, 3, 0), (7, 1, 0)]
    )
    history = UserHistory(train, max_items=3)
    wanted = [(5, 8), (5, INT64_MAX), (5, 1), (INT64_MIN, 9), (7, 2), (6, 8), (INT64_MAX, 8)]
    users, without = map(list, zip(*wanted, strict=True))
    assert bags(history, users, without) == [
        [2, INT64_MAX, 3],
        [2, 3],
        [2, INT64_MAX, 3],
        [],
        [1],
        [],
        [],
    ]


def test_history_goes_by_time_not_by_position():
    train = make_ratings([(1, 10, 0), (1, 20, 0), (1, 30, 0)])
    reordered = Ratings(train.users, train.items, train.ratings, torch.tensor([3.0, 1.0, 2.0]))
    assert bags(UserHistory(reordered, 2), [1], [0]) == [[30, 10]]


def test_history_equals_a_plain_one():
    train = low_rank()
    history = UserHistory(train, max_items=7)
    expected = []
    for user, item in zip(train.users.tolist(), train.items.tolist(), strict=True):
        latest = train.items[train.users == user][-7:].tolist()
        expected.append([other for other in latest if other != item])
    assert bags(history, train.users.tolist(), train.items.tolist()) == expected


# The model


@pytest.fixture
def model() -> RatingModel:
    return RatingModel(low_rank(), dim=4, capacity=200, history_size=5, seed=1)


def tables(model: RatingModel) -> torch.nn.ModuleDict:
    return model.embeddings.layers


def lookup(layer, key: int) -> torch.Tensor:
    """Return the vector of a key in the table."""
    assert layer.table is not None
    return layer.weight[layer.table.find(torch.tensor([key]))[0]]


def test_the_default_device_is_not_that_of_generators_or_data():
    train = low_rank()
    with torch.device("meta"):  # stands in for cuda, since it is available anywhere
        UserHistory(train)(train.users, train.items)
        baseline = fit_bias_baseline(train)
        users = RatingModel(train).embeddings.layers["user"].to_empty(device="cpu")
    assert torch.equal(users.seed, RatingModel(train).embeddings.layers["user"].seed)
    assert torch.equal(
        baseline.predict(train.users, train.items),
        fit_bias_baseline(train).predict(train.users, train.items),
    )


def test_predictions_and_losses_follow_the_formula(model):
    train = low_rank()
    torch.nn.init.normal_(model.project.weight, generator=torch.Generator().manual_seed(0))
    losses, penalty = model.losses(train.users, train.items, train.ratings)
    predictions = model(train.users, train.items)
    values, offsets = model.history(train.users, train.items)
    penalties = []
    for n in range(len(train)):
        user = lookup(tables(model).user, int(train.users[n]))
        item = lookup(tables(model).item, int(train.items[n]))
        bag = values[offsets[n] : offsets[n + 1]].tolist()
        rated = sum(lookup(tables(model).rated, key) for key in bag) / len(bag) ** 0.5
        rated = model.project.weight @ rated
        score = model.mean + user[0] + item[0] + item[1:] @ (user[1:] + rated)
        torch.testing.assert_close(losses[n], (score - train.ratings[n]).square())
        torch.testing.assert_close(predictions[n], score)
        penalties.append(
            ratings.L2_VECTORS * (user[1:].square().sum() + item[1:].square().sum())
            + ratings.L2_RATED * rated.square().sum()
            + ratings.L2_BIASES * (user[0].square() + item[0].square())
        )
    torch.testing.assert_close(penalty, torch.stack(penalties))


def test_tables_hold_the_raw_ids(model):
    train = low_rank()
    model(train.users, train.items)
    assert set(tables(model).user.table.keys().tolist()) == set(train.users.tolist())
    assert set(tables(model).item.table.keys().tolist()) == set(train.items.tolist())
    assert set(tables(model).rated.table.keys().tolist()) <= set(train.items.tolist())
    sizes = model.table_sizes()
    assert sizes["user"] == len(train.users.unique())
    assert sizes["item"] == len(train.items.unique())


def test_the_target_is_not_in_its_own_history(model):
    train = low_rank()[torch.arange(40)]
    item = train.items[-1:]
    scores = model(train.users[-1:], item)  # this rating is also in the history of its user
    scores.sum().backward()
    assert tables(model).rated.table.find(item).tolist() == [-1]


def test_unseen_ids_are_predicted_and_not_inserted(model):
    train = low_rank()
    model(train.users, train.items)
    before = model.table_sizes()
    model.eval()
    strangers = torch.tensor([INT64_MIN, INT64_MAX, 0, -1])
    predictions = model(strangers, strangers.flip(0))
    torch.testing.assert_close(predictions, train.ratings.mean().expand(4), atol=0.2, rtol=0)
    assert model.table_sizes() == before


def test_predictions_stay_in_the_range_of_train(model):
    train = low_rank()
    with torch.no_grad():
        model(train.users, train.items)
        tables(model).item.weight.mul_(1000)
        predictions = model(train.users, train.items)
    assert predictions.min() == train.ratings.min()
    assert predictions.max() == train.ratings.max()


def test_equal_ids_of_users_and_items_start_apart(model):
    model(torch.tensor([5]), torch.tensor([5]))
    assert not torch.equal(lookup(tables(model).user, 5), lookup(tables(model).item, 5))


def train_model(data: Ratings, seed: int, epochs: int = 15) -> RatingModel:
    model = RatingModel(data, dim=8, capacity=200, seed=seed)
    sparse, dense = split_embedding_variable_from_others(model)
    assert {id(p) for p in dense} == {id(model.mean), id(model.project.weight)}
    optimizers = [LazyAdam(sparse, lr=0.03), torch.optim.Adam(dense, lr=1e-3)]
    trainer = Trainer(
        model, lambda _, batch: model.losses(*batch), optimizers, seed=seed, stream=io.StringIO()
    )
    trainer.fit((data.users, data.items, data.ratings), epochs=epochs, batch_size=64)
    return model.eval()


def test_learns_what_biases_cannot():
    train, test = low_rank().split_by_time()
    model = train_model(train, seed=0)
    baseline = fit_bias_baseline(train)
    error = rmse(model(test.users, test.items), test.ratings)
    assert error < 0.7 * rmse(baseline.predict(test.users, test.items), test.ratings)


def test_seeded_training_gives_the_same_bits():
    train = low_rank()
    one, same, other = (train_model(train, seed, epochs=2) for seed in (3, 3, 4))
    for name, value in one.state_dict().items():
        if not name.endswith(("buckets", "hash_seed")):  # key positions may differ
            assert torch.equal(value, same.state_dict()[name]), name
    for name in tables(one):
        assert torch.equal(tables(one)[name].table.keys(), tables(same)[name].table.keys())
    assert not torch.equal(tables(one).user.weight, tables(other).user.weight)


# Baselines


def test_rmse():
    assert rmse(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0])) == pytest.approx(4.5**0.5)


def test_biases_of_a_complete_matrix_are_found_exactly():
    user_bias = {-4: -1.0, 2**40: 0.25, 9: 0.75}
    item_bias = {0: 0.5, INT64_MAX: -0.5}
    pairs = list(itertools.product(user_bias, item_bias))
    data = make_ratings([(u, i, 3 + user_bias[u] + item_bias[i]) for u, i in pairs])
    baseline = fit_bias_baseline(data, damping=(0.0, 0.0))
    assert dict(zip(baseline.user_ids.tolist(), baseline.user_bias.tolist(), strict=True)) == (
        pytest.approx(user_bias)
    )
    assert dict(zip(baseline.item_ids.tolist(), baseline.item_bias.tolist(), strict=True)) == (
        pytest.approx(item_bias)
    )
    predicted = baseline.predict(torch.tensor([-4, 9, 1]), torch.tensor([0, 1, INT64_MIN]))
    assert predicted.tolist() == pytest.approx([2.5, 3.75, 3])


def test_biases_minimise_the_damped_squared_error():
    data = low_rank()
    baseline = fit_bias_baseline(data, damping=(3.0, 0.5))
    user = torch.searchsorted(baseline.user_ids, data.users)
    item = torch.searchsorted(baseline.item_ids, data.items)
    biases = [baseline.user_bias.requires_grad_(), baseline.item_bias.requires_grad_()]
    residual = data.ratings.double() - baseline.mean - biases[0][user] - biases[1][item]
    damped = 3.0 * biases[0].square().sum() + 0.5 * biases[1].square().sum()
    for gradient in torch.autograd.grad(residual.square().sum() + damped, biases):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-3, rtol=0)


def test_damping_is_the_best_on_the_latest_part_of_train():
    train = low_rank()
    earlier, latest = train.split_by_time(0.2)
    errors = {
        pair: rmse(
            fit_bias_baseline(earlier, pair).predict(latest.users, latest.items), latest.ratings
        )
        for pair in itertools.product(DAMPINGS, DAMPINGS)
    }
    assert fit_bias_baseline(train).damping == min(errors, key=errors.__getitem__)


def test_damping_without_anything_to_choose_by():
    baseline = fit_bias_baseline(make_ratings([(1, 1, 4.0), (2, 1, 2.0)]))
    assert baseline.predict(torch.tensor([1, 2]), torch.tensor([1, 1])).tolist() == [
        pytest.approx(3 + 1 / 5),
        pytest.approx(3 - 1 / 5),
    ]
