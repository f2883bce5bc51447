"""Click models refuse settings that do not allow training, and labels without an AUC."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sparsekit.cli.common import UsageError
from sparsekit.recipes.clicks import check
from sparsekit.recipes.clicks import config as settings
from sparsekit.recipes.clicks.config import DeepFMConfig, DLRMConfig, RunConfig
from sparsekit.recipes.clicks.dense import stack, tables

WHOLE = RunConfig(DLRMConfig())


def changed(config, **sections):
    for name, values in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **values)})
    return config


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"data": {"train": ("x",), "sparse": ("a",)}},
        {"data": {"train": ("x",), "format": "criteo"}},
        {"trainer": {"patience": 1}},  # the census data have a separate validation part
        {
            "data": {"train": ("x",), "sparse": ("a",), "validation": ("y",)},
            "trainer": {"patience": 1},
        },
        {"model": {"cross_layers": 0}},
        {"trainer": {"epochs": 1, "global_batch_size": 1, "accumulate": 1, "log_every": 1}},
        {"optimizer": {"lr": 1e-30, "dense_lr": 1e30}},
    ],
)
def test_settings_that_allow_training(sections):
    settings.check(changed(WHOLE, **sections))
    settings.check(RunConfig(DeepFMConfig()))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"format": "cvs"}},
            r"^data.format must be one of csv, .*, got cvs; did you mean",
        ),
        ({"optimizer": {"name": "x"}}, r"^optimizer\.name must be one of lazy_adam, adagrad, row"),
        ({"data": {"train": ("x", "y")}}, "^data.sparse must name the categorical columns of x: "),
        (
            {"data": {"train": ("x",), "sparse": ("a",)}, "trainer": {"patience": 1}},
            "^trainer.patience needs data.validation",
        ),
        ({"data": {"sparse": ("a", "b", "b")}}, "name the column 'b' twice$"),
        ({"data": {"dense": ("a",), "sparse": ("a",)}}, "name the column 'a' twice$"),
        ({"data": {"label": "c", "dense": ("c",)}}, "name the column 'c' twice$"),
        *(
            ({"trainer": {name: 0}}, rf"^trainer\.{name} must be >= 1, got 0$")
            for name in ("epochs", "global_batch_size", "accumulate", "log_every", "patience")
        ),
        *(
            ({"model": {name: 0}}, rf"^model\.{name} must be >= 1, got 0$")
            for name in ("rows", "dim", "cross_rank")
        ),
        *(
            ({"optimizer": {name: value}}, rf"^optimizer\.{name} must be > 0, got {value}$")
            for name in ("lr", "dense_lr", "lr_scale")
            for value in (0, -1.0, float("inf"), float("nan"))
        ),
    ],
)
def test_settings_that_do_not(sections, message):
    with pytest.raises(UsageError, match=message):
        settings.check(changed(WHOLE, **sections))


class Reader:
    """Stand-in for a reader: yields batches of labels."""

    def __init__(self, *labels):
        self.labels, self.calls = labels, []

    def limit_labels(self, *limits, between):
        self.calls.append(("limit_labels", *limits, between))

    def set_epoch(self, epoch):
        self.calls.append(("set_epoch", epoch))

    def __iter__(self):
        self.calls.append("iter")
        for label in self.labels:
            yield SimpleNamespace(label=None if label is None else torch.tensor(label).float())


FILES = {"train": ("a", "b"), "test": ("c",), "validation": ("d", "e")}
FILED = changed(WHOLE, data=FILES)


def test_the_first_batch_of_each_file_is_read_and_no_more():
    readers = {name: Reader([0.0]) for name in FILES}
    check.check_files(FILED, readers)
    for name, reader in readers.items():
        limits = ("limit_labels", 0, 1, name == "train")
        assert reader.calls == [limits, "iter", ("set_epoch", 0)]


@pytest.mark.parametrize(("name", "files"), [("train", "a, b"), ("test", "c")])
def test_files_without_rows(name, files):
    with pytest.raises(UsageError, match=rf"^data\.{name}: no rows in {files}$"):
        check.check_files(FILED, {name: Reader()})


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0, 0], [0]], "are 0, so there is no AUC"),
        ([[1], [1, 1]], "are 1, so there is no AUC"),
        ([[1, 1], [1, 0]], None),
        ([[0], [0, 1], None], None),
    ],
)
def test_patience_needs_labels_of_both_kinds(labels, message):
    stopping = changed(FILED, trainer={"patience": 1})
    readers = {"train": Reader([1]), "validation": Reader(*labels)}
    if message is None:
        check.check_files(stopping, readers)
    else:
        with pytest.raises(UsageError, match=rf"^trainer\.patience: all labels in d, e {message}"):
            check.check_files(stopping, readers)
    check.check_files(FILED, readers)


def test_labels_of_all_ranks_count(monkeypatch):
    monkeypatch.setattr(check, "sum_over_ranks", lambda here: [here[0] + 1, here[1] + 1])
    stopping = changed(FILED, trainer={"patience": 1})
    check.check_files(stopping, {"train": Reader([1]), "validation": Reader([0, 0])})


def test_stacks_and_tables():
    generator = torch.Generator().manual_seed(0)
    kinds = [[type(layer).__name__ for layer in stack((2, 3, 1), generator, last_relu=relu)]
             for relu in (True, False)]  # fmt: skip
    assert kinds == [["Linear", "ReLU", "Linear", "ReLU"], ["Linear", "ReLU", "Linear"]]
    first = stack((200, 100), generator, last_relu=False)[0]
    assert not first.bias.any()
    assert first.weight.std().item() == pytest.approx((2 / 300) ** 0.5, rel=0.05)
    with torch.device("meta"):  # stands in for cuda, since it is available anywhere
        group = tables(["a", "b"], {"a": 5, "b": 6}, 3, seed=1)
    assert [layer.capacity for layer in group.layers.values()] == [5, 6]
    layers = tables(["a", "b"], 5, 3, seed=1).layers
    a, b = (layers[name].vectors(torch.arange(4)) for name in "ab")
    assert not torch.equal(a, b)
    assert 0.005 < a.abs().max() <= 0.01
