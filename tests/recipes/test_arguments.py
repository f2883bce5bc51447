"""Models have their documented defaults and initial weights, and refuse arguments by name."""

import inspect
import math

import pytest
import torch

from sparsekit import models, nn
from sparsekit.datasets import Ratings
from sparsekit.hashing import SplitHashEncoder
from sparsekit.recipes.autoencoder import command as autoencoder
from sparsekit.recipes.clicks import command as clicks
from sparsekit.recipes.clicks.dense import stack, tables
from sparsekit.recipes.deepconn import command as deepconn
from sparsekit.recipes.ratings import command as ratings
from sparsekit.recipes.wide import command as wide

DEFAULTS = {
    models.DLRM: {"rows": None, "dim": 16, "bottom": (512, 256), "top": (1024, 1024, 512, 256)}
    | {"cross_layers": 3, "cross_rank": 512, "seed": 0},
    models.DeepFM: {"rows": None, "dim": 16, "deep": (400, 400, 400), "seed": 0},
    models.Autoencoder: {"dim": 64, "layers": 1, "dropout": 0.8, "negatives": 512, "seed": 0}
    | {"source": ""},
    models.Autoencoder.optimizers: {"lr": 0.005},
    models.DenseAutoencoder: {"seed": 0, "source": ""},
    models.DenseAutoencoder.optimizers: {"lr": 0.03},
    models.DeepCoNN: {"length": 800, "dim": 50, "filters": 10, "hidden": 64, "placement": "single"}
    | {"seed": 0},
    models.DeepCoNN.optimizer: {"lr": 1e-4},
    models.RatingModel: {"dim": 32, "capacity": None, "history_size": 32, "seed": 0},
    models.WideModel: {"buckets": None, "loss": "bce", "seed": 0},
    models.WideModel.optimizer: {"name": "adam", "batch_size": 1},
    models.QuantileBuckets.fit: {"count": 32},
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda function: function.__qualname__)
def test_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    assert given == DEFAULTS[function]


def ones():
    one = torch.ones(1)
    return Ratings(one.long(), one.long(), one, one.double())


def autoencoder_with(**options):
    return models.Autoencoder(models.RatedItems(ones()), **options)


def dlrm_with(**options):
    return models.DLRM(["a"], 1, rows=5, dim=2, bottom=[2], top=[2], **options)


def wide_with(**options):
    model = models.WideModel(SplitHashEncoder({"a": 40}))
    return model.optimizer(**options)


@pytest.mark.parametrize(
    ("make", "model", "argument", "low", "high"),
    [
        (dlrm_with, "DLRM", "cross_layers", 0, 1000),
        (dlrm_with, "DLRM", "cross_rank", 1, 2**31 - 1),
        (autoencoder_with, "Autoencoder", "dim", 1, 2**20),
        (autoencoder_with, "Autoencoder", "layers", 0, 1000),
        (autoencoder_with, "Autoencoder", "negatives", 1, 2**31 - 1),
        (lambda words: models.DeepCoNN(words, 6), "DeepCoNN", "words", 2, 2**31 - 1),
        (lambda length: models.DeepCoNN(9, length), "DeepCoNN", "length", 4, 2**31 - 1),
        (wide_with, "WideModel", "batch_size", 1, 2**31 - 1),
    ],
)
def test_numbers_out_of_range(make, model, argument, low, high):
    for value in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"^{model}: {argument} must be .*{low}.*got {value}"):
            make(**{argument: value})
    make(**{argument: low})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.DeepCoNN(9, 6, placement="both"), "^DeepCoNN: placement must be .*'both'"),
        (
            lambda: models.DeepCoNN(9, 6, placement="split"),
            "placement 'split' needs 2 ranks, there",
        ),
        (lambda: models.WideModel(SplitHashEncoder({"a": 40}), loss="l1"), "^WideModel: loss must"),
        (lambda: wide_with(name="sgd2"), "^WideModel: name must be .*'sgd2'"),
        (
            lambda: autoencoder_with(dropout=1.0),
            r"^Autoencoder: dropout must be in \[0, 1\), got 1",
        ),
        (lambda: autoencoder_with(dropout=-0.1), r"^Autoencoder: dropout must be .*, got -0.1"),
        (lambda: stack([3, 0], None, last_relu=True), r"must be >= 1, got \[3, 0\]"),
    ],
)
def test_other_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("command", "name", "load", "fit"),
    [
        (ratings, "_train", "load_ratings", "_fit_and_report"),
        (wide, "_train", "load_people", "_fit_and_report"),
        (autoencoder, "_train", "load_ratings", "_fit_and_report"),
        (deepconn, "_train", "_load", "_fit_and_report"),
    ],
)
def test_a_command_runs_on_ranks(monkeypatch, command, name, load, fit):
    calls = []
    monkeypatch.setattr(command.ranks, "train", lambda *args: calls.append(args) or 7)

    class Arguments:
        placement, ranks = "single", 2
        recs = save = data = dim = original = log = checkpoint = None

    args = Arguments()
    assert getattr(command, name)(args) == 7
    assert calls == [(args, getattr(command, load), getattr(command, fit))]
    assert clicks._load is not clicks._fit_and_report


# Initial weights


@pytest.mark.parametrize("last_relu", [False, True])
def test_a_stack(last_relu):
    layers = stack([300, 200, 100], torch.Generator().manual_seed(0), last_relu=last_relu)
    kinds = [type(layer).__name__ for layer in layers]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU"][: 4 if last_relu else 3]
    for layer, (before, after) in zip(layers[::2], [(300, 200), (200, 100)], strict=True):
        assert layer.weight.shape == (after, before)
        assert layer.weight.std().item() == pytest.approx((2 / (before + after)) ** 0.5, rel=0.05)
        assert not layer.bias.any()


def test_tables_of_features():
    group = tables(["b", "a"], {"a": 3, "b": 4}, 5, 1)
    assert list(group.features) == ["b", "a"]
    assert group.output == "concatenated"
    layers = group.layers
    assert [(layers[name].capacity, layers[name].name) for name in "ba"] == [(4, "b"), (3, "a")]
    for layer in layers.values():
        assert (layer.combiner, layer.slot_num, layer.embedding_vec_size) == ("sum", 1, 5)
        assert layer.initializer == nn.Uniform(-0.01, 0.01)
    assert int(layers["a"].seed) != int(layers["b"].seed)
    again = tables(["b", "a"], 3, 5, 1)
    assert [int(again.layers[n].seed) for n in "ab"] == [int(layers[n].seed) for n in "ab"]
    assert int(tables(["b"], 3, 5, 2).layers["b"].seed) != int(layers["b"].seed)


def test_widths_of_dlrm_and_deepfm():
    dlrm = models.DLRM(["a", "b"], 3, rows=5, dim=4, bottom=[6, 7], top=[8], cross_rank=2)

    def shapes(layers):
        return [tuple(layer.weight.shape) for layer in layers if hasattr(layer, "weight")]

    assert shapes(dlrm.bottom) == [(6, 3), (7, 6), (4, 7)]
    assert isinstance(dlrm.bottom[-1], torch.nn.ReLU)
    assert shapes(dlrm.top) == [(8, 12), (1, 8)]
    assert not isinstance(dlrm.top[-1], torch.nn.ReLU)
    assert shapes(dlrm.cross.down) == [(2, 12)] * 3
    assert shapes(dlrm.cross.up) == [(12, 2)] * 3
    big = models.DLRM(["a"], 0, rows=5, dim=300, top=[2], cross_layers=1, cross_rank=200)
    assert big.cross.down[0].weight.std().item() == pytest.approx(math.sqrt(2 / 500), rel=0.05)
    assert big.cross.down[0].bias is None
    deepfm = models.DeepFM(["a", "b"], 300, rows=5, dim=4, deep=[6])
    assert shapes(deepfm.deep) == [(6, 308), (1, 6)]
    assert not isinstance(deepfm.deep[-1], torch.nn.ReLU)
    assert deepfm.linear.weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert not deepfm.linear.bias.any()
    assert [layer.embedding_vec_size for layer in deepfm.embeddings.layers.values()] == [5, 5]


@pytest.mark.parametrize("model", [models.DLRM, models.DeepFM])
def test_prefetch_is_of_the_bags(model, monkeypatch):
    made = model(["a"], 1, rows=5, dim=2)
    calls = []
    monkeypatch.setattr(made.embeddings, "prefetch", calls.append)

    class Batch:
        sparse = "bags"

    made.prefetch(Batch)
    assert calls == ["bags"]


def test_layers_of_deepconn():
    model = models.DeepCoNN(21, 10, dim=4, filters=3, hidden=5)
    assert (model.words.capacity, model.words.embedding_vec_size) == (21, 4)
    assert (model.words.padding_key, model.words.gradient_reduction) == (0, "mean")
    assert model.words.initializer == nn.Uniform(-0.5, 0.5)
    for tower in ("user", "item"):
        assert tuple(model.convolutions[tower].weight.shape) == (3, 4, 3)
        assert tuple(model.dense[tower].weight.shape) == (5, model.flat)
    assert not torch.equal(*(model.dense[tower].weight for tower in ("user", "item")))
