"""split_embedding_variable_from_others separates tables from other parameters."""

import copy
import io
import pickle

import pytest
import torch

import sparsekit
from sparsekit import split_embedding_variable_from_others as split


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.users = sparsekit.DistributedEmbedding("sum", 10, 3, 1, 1)
        self.plain = torch.nn.Embedding(4, 3, sparse=True)
        self.tower = torch.nn.Sequential(
            sparsekit.All2AllDenseEmbedding(10, 3, 1, 1, use_hashtable=False),
            torch.nn.Linear(3, 1),
        )


SPARSE = ["users.weight", "tower.0.weight"]
DENSE = ["first.weight", "first.bias", "plain.weight", "tower.1.weight", "tower.1.bias"]


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_load_state_dict(model):
    other = Model()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


COPIES = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch_save": through_torch_save,
    "load_state_dict": through_load_state_dict,
    "double": torch.nn.Module.double,
    "frozen": lambda model: model.requires_grad_(False),
}
FORMS = {
    "module": lambda model: model,
    "parameters": lambda model: model.parameters(),
    "list": lambda model: list(model.parameters()),
    "named_parameters": lambda model: model.named_parameters(),
}


def same(parameters, expected):
    return [id(p) for p in parameters] == [id(p) for p in expected]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", COPIES)
def test_exact_partition_in_order(form, way):
    model = COPIES[way](Model())
    sparse, dense = split(FORMS[form](model))
    named = dict(model.named_parameters())
    assert same(sparse, [named[name] for name in SPARSE])
    assert same(dense, [named[name] for name in DENSE])
    assert len(sparse) + len(dense) == len(named)


def test_order_is_that_of_the_input():
    parameters = list(Model().parameters())[::-1]
    sparse, dense = split(parameters)
    kept = [[p for p in parameters if any(p is q for q in part)] for part in (sparse, dense)]
    assert same(sparse, kept[0])
    assert same(dense, kept[1])


def test_single_layer_and_nothing():
    layer = sparsekit.DistributedEmbedding("sum", 10, 3, 1, 1)
    assert same(split(layer)[0], [layer.weight])
    assert split(layer)[1] == []
    assert split([]) == ([], [])
    assert split(torch.nn.ReLU()) == ([], [])


@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle", "torch_save"])
def test_tied_modules_stay_tied_and_count_once(way):
    model = Model()
    model.items = model.users
    model.tower[1].bias = model.first.bias
    model = COPIES[way](model)
    assert model.items is model.users
    sparse, dense = split(model)
    assert same(sparse, [model.users.weight, model.tower[0].weight])
    assert len(dense) == len(DENSE) - 1


def test_one_weight_in_two_layers_counts_once():
    one, other = (sparsekit.DistributedEmbedding("sum", 10, 3, 1, 1) for _ in range(2))
    other.weight = one.weight
    assert same(split(torch.nn.ModuleList([one, other]))[0], [one.weight])


def test_both_optimizers_together_train_everything():
    model = Model()
    sparse, dense = split(model)
    optimizers = [sparsekit.optim.LazyAdam(sparse, lr=0.1), torch.optim.Adam(dense[:2], lr=0.1)]
    before = copy.deepcopy(model)
    keys = torch.tensor([[[5]], [[8]]])
    model.first(model.users(keys)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert (model.users.weight[:2] != before.users.weight[:2]).all()
    assert not torch.equal(model.first.weight, before.first.weight)
    assert torch.equal(model.tower[0].weight, before.tower[0].weight)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (lambda: Model().users.weight, "put it in a list"),
        (lambda: [Model().users], "item 0 is no parameter but a DistributedEmbedding"),
        (lambda: [Model().first.bias, {"params": []}], "item 1 is no parameter but a dict"),
        (lambda: Model().state_dict(), "item 0 is no parameter but a str"),
    ],
)
def test_what_is_no_parameter(argument, message):
    with pytest.raises(TypeError, match=f"^split_embedding_variable_from_others.*{message}"):
        split(argument())
