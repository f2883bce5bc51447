"""References to replaced layers or weights elsewhere in the model are replaced as well."""

import collections
import functools
import types
import warnings

import pytest
import torch
from torch import nn

from sparsekit import replace_embeddings

from .test_replace_embeddings import TAGS, batch_of, model_of, sgd

Regularised = collections.namedtuple("Regularised", ["name", "weight"])


def defaulted(weight):
    def penalty(scale=1.0, of=weight):
        return of

    return penalty


def by_name(weight):
    def penalty(*, of=weight):
        return of

    return penalty


def unset(weight):
    def read(known=True):
        return weight if known else later

    if weight is None:
        later = weight
    return read


# For each way to keep a weight outside the modules of a model: how to store it there, how to read
# it from there, and its name in messages.
KEPT = {
    # deepctr-torch does this.
    "lists": (lambda m: [([m.tags.weight], 0.0, 1e-5)], lambda k: k[0][0][0], "[0][0][0]"),
    "pairs": (
        lambda m: [("tags.weight", m.tags.weight), ("twice", m.tags.weight)],
        lambda k: k[1][1] if k[0][1] is k[1][1] else None,
        "[0][1] and kept[1][1]",
    ),
    "named tuple": (
        lambda m: Regularised("tags", m.tags.weight), lambda k: k.weight, "[1]"),
    "dict": (lambda m: {"tags": [m.tags.weight]}, lambda k: k["tags"][0], "['tags'][0]"),
    "object": (lambda m: types.SimpleNamespace(of=m.tags.weight), lambda k: k.of, ".of"),
    "closure": (
        lambda m: (lambda weight: lambda: weight)(m.tags.weight), lambda k: k(), ""),
    "closure not yet whole": (lambda m: unset(m.tags.weight), lambda k: k(), ""),
    "default": (lambda m: defaulted(m.tags.weight), lambda k: k(), ".__defaults__[1]"),
    "default by name": (lambda m: by_name(m.tags.weight), lambda k: k(), ".__kwdefaults__['of']"),
    "layer": (lambda m: [m.tags], lambda k: k[0].weight, "[0]"),
    "hidden module": (lambda m: [nn.Sequential(m.tags)], lambda k: k[0][0].weight, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_what_a_model_keeps_beside_its_modules_follows(case, capsys):
    keep, read, name = KEPT[case]
    model = model_of()
    model.kept = keep(model)
    model.again = model.kept  # the same object under two names
    (done,) = replace_embeddings(model, "tags", extra_rows=3)
    assert read(model.kept) is read(model.again) is model.tags.weight
    assert f"kept{name}" in " and ".join(done.rebound)
    assert f"33 rows, also in {' and '.join(done.rebound)}\n" in capsys.readouterr().out
    assert model.kept is not done.old


def test_a_regulariser_goes_on_acting():
    curves = []
    for swap in (False, True):
        model = model_of()
        model.regularised = [([layer.weight for layer in model.embeddings.values()], 0.1)]
        if swap:
            replace_embeddings(model, extra_rows=9, verbose=False)
        optimizer = sgd(model, swap)[0]
        found = []
        for step in range(10):
            batch = batch_of(step)
            penalty = sum(w * x.square().sum() for x_, w in model.regularised for x in x_)
            loss = model(batch).square().mean() + penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        curves.append(found)
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)


def tied_out_of_sight(model):
    model.kept = [nn.Linear(8, TAGS)]
    model.kept[0].weight = model.tags.weight


# References to a weight that cannot be replaced, and the reference's name in the message.
STUCK = {
    "set": (lambda m: setattr(m, "kept", {m.tags.weight}), "kept's element"),
    "frozen set": (lambda m: setattr(m, "kept", frozenset([m.tags.weight])), "kept's element"),
    "key": (lambda m: setattr(m, "kept", {m.tags.weight: 0.1}), "kept's key"),
    "keyword": (
        lambda m: setattr(m, "kept", functools.partial(print, file=m.tags.weight)),
        "kept.keywords['file']",
    ),
    "function of a partial": (
        lambda m: setattr(m, "kept", functools.partial(defaulted(m.tags.weight))),
        "kept.func.__defaults__",
    ),
    "tuple in a set": (lambda m: setattr(m, "kept", {(m.tags.weight, 1)}), "kept's element[0]"),
    "partial": (lambda m: setattr(m, "kept", functools.partial(print, m.tags.weight)), "kept.args"),
    "method": (lambda m: setattr(m, "kept", m.tags.extra_repr), "kept.__self__"),
    "view": (lambda m: setattr(m, "kept", [m.tags.weight.data[3:]]), "kept[0]"),
    "buffer": (lambda m: m.register_buffer("b", m.tags.weight.data), "_buffers['b']"),
    "tied out of sight": (tied_out_of_sight, "kept[0]._parameters['weight']"),
    "optimizer": (
        lambda m: setattr(m, "kept", torch.optim.SGD(m.parameters(), lr=0.1)),
        "kept.param_groups[0]['params'][2]",
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_what_cannot_follow_is_a_reason_to_leave(case):
    model = model_of()
    STUCK[case][0](model)
    before = model.tags
    (done,) = replace_embeddings(model, "tags", verbose=False)
    assert done.new is None
    assert model.tags is before
    assert done.reason.startswith(STUCK[case][1])
    assert done.reason.endswith("cannot be given another")
    # The other layers can be swapped, except under an optimizer of all parameters.
    (other,) = replace_embeddings(model, "history", verbose=False)
    assert (other.new is None) == (case == "optimizer")


def test_what_a_model_keeps_may_lead_in_circles_or_far(monkeypatch):
    monkeypatch.setattr("sparsekit.nn.references._MOST_OBJECTS", 3000)
    model = model_of()
    model.kept = [model, [[] for _ in range(3000)], list(range(10**5))]
    model.kept.append(model.kept)
    model.last = [[{"tags": model.tags.weight}]]  # found although the lists come first
    with pytest.warns(UserWarning, match="more than 3,000 objects, of which the rest was not"):
        replace_embeddings(model, verbose=False)
    assert model.last[0][0]["tags"] is model.tags.weight


class Refusing(nn.Module):
    def __setattr__(self, name, value):
        if name == "last" and hasattr(self, name):
            raise TypeError("frozen")
        super().__setattr__(name, value)


def test_a_model_that_refuses_a_layer_is_as_it_was():
    model = Refusing()
    model.first, model.last = nn.Embedding(5, 2), nn.Embedding(5, 2)
    model.kept = [model.first, model.last.weight]
    before = [model.first, model.last, *model.kept]
    with pytest.raises(TypeError, match="frozen"):
        replace_embeddings(model, verbose=False)
    after = [model.first, model.last, *model.kept]
    assert all(one is other for one, other in zip(before, after, strict=True))


class Next(nn.Module):
    """Model with a softmax over all items, like recbole's SASRec."""

    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(20, 4)
        self.other = nn.Embedding(20, 4)
        self.plan = types.SimpleNamespace(weight=0.1)
        nn.init.ones_(self.item.weight)
        self.reset()

    def reset(self):
        nn.init.zeros_(self.other.weight)

    def forward(self, seen):
        return self.item(seen) @ self.item.weight.T

    def scores(self):
        return [self.item.weight for _ in range(2)]

    def penalty(self):
        # `plan` is not a layer. A SimpleNamespace is unhashable, so it cannot be a dict's key.
        return self.plan.weight


@pytest.mark.parametrize("options", [{"extra_rows": 5}, {}])
def test_code_that_reads_a_weight_is_warned_of(options):
    model = nn.ModuleDict({"next": Next()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replace_embeddings(model, verbose=False, **options)
    said = [str(warning.message) for warning in caught]
    if not options:  # the weight still has the shape that the code expects
        assert said == []
        return
    (one,) = said
    reads = "Next.forward reads item.weight and Next.scores reads item.weight"
    assert one.startswith(f"replace_embeddings: {reads}, which now")
    assert "25 rows for 20 ids" in one
    assert caught[0].filename == __file__


class Derived(Next):
    def product(self, seen):
        other = self.other
        return seen @ other.weight.T + self.other.weight.sum()


def test_methods_of_base_classes_and_of_several_layers_are_named():
    model = nn.ModuleDict({"next": Derived()})
    with pytest.warns(UserWarning, match="reads") as caught:
        replace_embeddings(model, extra_rows=1, verbose=False)
    said = [str(warning.message).partition(", which now")[0] for warning in caught]
    of_item, of_other = (text.removeprefix("replace_embeddings: ") for text in said)
    assert of_item == "Derived.forward reads item.weight and Derived.scores reads item.weight"
    assert of_other == "Derived.product reads other.weight"


def test_tensors_without_memory_are_passed_over():
    model = model_of()
    model.kept = [torch.ones(2, 2).to_sparse(), torch.empty(0), torch.ones(2, device="meta")]
    (done,) = replace_embeddings(model, "tags", verbose=False)
    assert done.new is model.tags
