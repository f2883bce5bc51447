"""Layers in an EmbeddingGroup may have any name, even one that torch's containers reject."""

import copy
import pickle

import pytest
import torch

import sparsekit
from sparsekit import EmbeddingBag, EmbeddingGroup
from sparsekit.nn.any_names import LayersByName, name_in_state

from .keyed import Keyed

NAMES = ["user.id", "type", "user", "user%2Eid", "keys", "training", "a.table.b", "é.ß", "_modules"]
ODD = ("forward", "T_destination", "%", "..", "items", "a b", "layers")
IDS = torch.tensor([[1, 10**18], [1, 5]])


def group_of(names=NAMES):
    return EmbeddingGroup(
        {name: EmbeddingBag(9, 4, mode="sum", name=f"<{name}>") for name in names}
    )


def test_any_name_is_looked_up_and_trained():
    group = group_of()
    out = group(dict.fromkeys(NAMES, IDS))
    assert list(out) == NAMES
    for name in NAMES:
        assert torch.equal(out[name], group.layers[name](IDS)), name
    sum(out.values()).sum().backward()
    before = out["user.id"].sum()
    sparsekit.optim.SGD(group.parameters(), lr=0.1).step()
    assert group.layers["user.id"](IDS).sum() < before
    keyed = Keyed(NAMES, torch.arange(2 * len(NAMES)), torch.arange(2 * len(NAMES) + 1), None)
    assert list(group(keyed)) == NAMES


def test_states_load():
    group, other = group_of(), group_of()
    out = group(dict.fromkeys(NAMES, IDS))
    state = group.state_dict()
    assert "layers.user%2Eid.weight" in state
    assert "layers.%74ype.weight" in state
    assert "layers.user.weight" in state
    assert other.load_state_dict(state) == torch.nn.modules.module._IncompatibleKeys([], [])
    for twin in (other, copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert all(torch.equal(twin.eval()(dict.fromkeys(NAMES, IDS))[n], out[n]) for n in NAMES)


def test_torch_finds_them():
    group = group_of()
    for name, module in group.named_modules():
        assert group.get_submodule(name) is module
    weights = {name: torch.zeros_like(weight) for name, weight in group.named_parameters()}
    group(dict.fromkeys(NAMES, IDS))
    out = torch.func.functional_call(group, weights, (dict.fromkeys(NAMES, IDS),))
    assert not any(out[name].any() for name in NAMES)


@pytest.mark.parametrize("name", [*NAMES, *ODD])
def test_a_container_gives_names_back(name):
    layers, module = LayersByName(), torch.nn.Linear(1, 1)
    assert "." not in name_in_state(name)
    layers[name] = module
    assert layers[name] is module
    assert name in layers
    assert list(layers) == list(layers.keys()) == [name]
    assert list(layers.items()) == [(name, module)]
    layers[name] = other = torch.nn.Linear(1, 1)
    assert layers.pop(name) is other
    assert len(layers) == 0


def test_names_of_a_state_differ():
    names = {*NAMES, *ODD}
    assert len({name_in_state(name) for name in names}) == len(names)


def test_plain_names_are_as_they_were():
    for name in ("user", "user_id", "0", "Type", "user-id", "ä"):
        assert name_in_state(name) == name


def test_an_empty_name_is_refused():
    with pytest.raises(ValueError, match="a name that is none"):
        group_of([""])


def test_two_layers_of_one_name_are_refused():
    a, b = (EmbeddingBag(9, dim, name="clicks") for dim in (4, 8))
    with pytest.raises(ValueError, match=r"layers\['x'\] and layers\['y'\] .* name='clicks'"):
        EmbeddingGroup({"x": a, "other": EmbeddingBag(9, 4), "y": b})
    # One layer under two names is looked up as one table.
    out = EmbeddingGroup({"x": a, "y": a})({"x": IDS, "y": IDS})
    assert torch.equal(out["x"], out["y"])
