"""The wide model computes scores and losses, trains, reads rows of a matrix, and can be saved."""

import io

import numpy as np
import pytest
import torch

from sparsekit import optim
from sparsekit.hashing import SplitHashEncoder
from sparsekit.models import QuantileBuckets, WideModel
from sparsekit.recipes.wide.model import select_rows
from sparsekit.train import Trainer
from sparsekit.train.metrics import auc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")

LENGTHS = {"city": 300, "day": 7, "age": 50}


def make_data(n, seed=0):
    """Return data about people; the label depends on the city and the age."""
    draw = np.random.default_rng(seed)
    city, day, age = (draw.integers(0, high, n) for high in (100, 7, 90))
    labels = (city % 3 == 0) | (age > 60)
    columns = {
        "city": [f"city {c}" for c in city],
        "day": day,
        "age": [None if a == 5 else str(a) for a in age],
    }
    return columns, torch.from_numpy(labels).float()


def make_model(**settings):
    buckets = QuantileBuckets({"age": range(3, 90, 3)})
    return WideModel(SplitHashEncoder(LENGTHS), buckets, **settings)


def train(model, optimizer, epochs=8, batch_size=50, n=1000):
    columns, labels = make_data(n)
    matrix = model.encode(columns)
    return Trainer(
        model,
        lambda _, batch: (model.losses(select_rows(matrix, batch[0]), batch[1]), 0.0),
        [model.optimizer(optimizer, batch_size)],
        stream=io.StringIO(),
    ).fit((torch.arange(n), labels), epochs=epochs, batch_size=batch_size)


def test_dim_and_scores_are_those_of_two_dense_layers():
    model = make_model()
    width = model.encoder.width
    assert width == 72 + 32 + 32
    assert model.dim == int(width**0.3) == 4
    columns, _ = make_data(20)
    matrix = model.encode(columns)
    assert matrix.layout == torch.sparse_csr
    dense = matrix.to_dense().double()
    hidden = dense @ model.weights().double()
    expected = hidden @ model.head.weight.double().T + model.head.bias.double()
    assert model(matrix).shape == (20,)
    assert (model(matrix) - expected[:, 0]).abs().max() < 1e-6
    of_scipy = model.encoder.encode({**columns, **model.buckets(columns)}, to="scipy")
    assert torch.equal(model(of_scipy), model(matrix))


def test_numbers_are_hashed_by_their_bucket():
    model = make_model()
    rest = {"city": ["x"] * 5, "day": [1] * 5}
    rows = model.encode({**rest, "age": ["30", "32", "33", "?", None]}).to_dense()
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[3], rows[4])
    assert len(rows.unique(dim=0)) == 3


def test_losses_and_probabilities():
    columns, labels = make_data(9)
    for loss in ("bce", "mse"):
        model = make_model(loss=loss)
        with torch.no_grad():
            model.head.weight.mul_(20)
        matrix = model.encode(columns)
        scores = model(matrix)
        p = torch.sigmoid(scores)
        if loss == "bce":
            expected = -(labels * p.log() + (1 - labels) * (1 - p).log())
        else:
            assert scores.min() < 0
            p, expected = scores.clamp(0, 1), (scores - labels) ** 2
        torch.testing.assert_close(model.losses(matrix, labels), expected)
        torch.testing.assert_close(model.probabilities(matrix), p)


def test_the_seed_decides_where_it_starts():
    columns, _ = make_data(9)
    torch.manual_seed(1)
    first = make_model(seed=3)
    torch.manual_seed(2)
    matrix = first.encode(columns)
    assert torch.equal(first(matrix), make_model(seed=3)(matrix))
    assert not torch.equal(first(matrix), make_model(seed=4)(matrix))


@pytest.mark.parametrize("loss", ["bce", "mse"])
@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_it_learns(optimizer, loss):
    model = make_model(loss=loss)
    first, *_, last = train(model, optimizer, epochs=20)
    assert last.loss < 0.75 * first.loss
    columns, labels = make_data(500, seed=1)
    with torch.no_grad():
        assert auc(model.probabilities(model.encode(columns)), labels) > 0.8


def test_ftrl_weighs_its_penalties_against_sums_of_gradients():
    """A step on the mean loss with scaled settings equals a step on the sum with l1 = l2 = 1."""
    model, other = make_model(), make_model()
    penalties = {"params": [other.embedding.weight], "l1": 1.0, "l2": 1.0}
    groups = [penalties, {"params": list(other.head.parameters())}]
    columns, labels = make_data(64)
    matrix = model.encode(columns)
    of_mean, of_sum = model.optimizer("ftrl", 64), optim.Ftrl(groups, lr=0.2)
    for _ in range(10):
        for each, optimizer, losses in (
            (model, of_mean, model.losses(matrix, labels).mean()),
            (other, of_sum, other.losses(matrix, labels).sum()),
        ):
            each.zero_grad()
            losses.backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (model.weights() == 0).any()
    assert (model.weights() != 0).any()


@pytest.mark.parametrize("batch_size", [8, 64])
def test_ftrl_does_not_get_stuck_where_all_weights_are_zero(batch_size):
    model = make_model()
    first, *_, last = train(model, "ftrl", epochs=20, batch_size=batch_size, n=400)
    assert (model.head.weight != 0).all()
    assert last.loss < 0.75 * first.loss


def test_adam_has_the_settings_of_the_original():
    optimizer = make_model().optimizer("adam", 7)
    assert isinstance(optimizer, optim.Adam)
    assert optimizer.param_groups[0]["lr"] == 0.002


def test_selected_rows_are_those_of_the_dense_matrix():
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(9, 30, generator=generator)
    dense[torch.rand(9, 30, generator=generator) < 0.7] = 0
    dense[4] = 0
    matrix = dense.to_sparse_csr()
    for rows in ([], [4], [8, 0, 4, 4, 8, 2], list(range(9))):
        at = torch.tensor(rows, dtype=torch.int64)
        found = select_rows(matrix, at)
        assert found.layout == torch.sparse_csr
        assert found.shape == (len(rows), 30)
        assert torch.equal(found.to_dense(), dense[at])


@pytest.mark.parametrize("optimizer", ["adam", "ftrl"])
def test_save_and_load_round_trips(tmp_path, optimizer):
    buckets = QuantileBuckets({"age": [20.5, 40]})
    encoder = SplitHashEncoder(LENGTHS, 1, salts={"day": 2**64 - 1}, signed=True)
    model = WideModel(encoder, buckets, loss="mse", seed=5)
    train(model, optimizer, epochs=1, n=60)
    model.save(tmp_path / "model.pt")
    loaded = WideModel.load(tmp_path / "model.pt", LENGTHS)
    assert loaded.loss == "mse"
    assert vars(loaded.encoder) == vars(encoder)
    columns, _ = make_data(30, seed=2)
    with torch.no_grad():
        expected = model(model.encode(columns))
        assert torch.equal(loaded(loaded.encode(columns)), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_files_that_are_refused(tmp_path):
    make_model().save(tmp_path / "model.pt")
    for lengths, message in (
        ({**LENGTHS, "day": 8}, "feature 'day' was saved with length 7, but .* has 8"),
        ({}, r"features \['city', 'day', 'age'\], .* has \[\]"),
        ({"city": 300}, r"features \['city', 'day', 'age'\], in this order"),
    ):
        with pytest.raises(ValueError, match=rf"model\.pt: .*{message}"):
            WideModel.load(tmp_path / "model.pt", lengths)
    (tmp_path / "other").write_bytes(b"else")
    with pytest.raises(ValueError, match=r"other: no model that"):
        WideModel.load(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        WideModel.load(tmp_path / "missing")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_model(loss="l1"), "loss must be one of bce, mse; got 'l1'"),
        (lambda: make_model().optimizer("sgd"), "name must be one of adam, ftrl; got 'sgd'"),
        (lambda: make_model().optimizer("ftrl", 0), r"batch_size must be in \[1, .*got 0"),
        (
            lambda: WideModel(SplitHashEncoder({"a": 7}), QuantileBuckets({"b": [1]})),
            r"buckets has \['b'\], which encoder lacks",
        ),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=f"WideModel: {message}"):
        make()
