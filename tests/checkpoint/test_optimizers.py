"""Optimizers load saved states that fit, and stay unchanged if a state does not fit."""

import copy

import pytest
import torch

import sparsekit
from sparsekit import checkpoint, optim
from sparsekit.checkpoint import CheckpointError

from .test_damage import put, rewritten


def stepped(module=None, kind=torch.optim.Adam, **settings):
    """Return a module and its optimizer; one parameter group has a custom setting."""
    module = module or torch.nn.Linear(2, 1)
    group = {"params": [*module.parameters()], "label": "dense", "extra": {"of": "the user"}}
    optimizer = kind([group | settings], lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict())


SETTINGS = {
    "lr": ([0.5, 1, torch.tensor(0.5)], ["fast", [0.1], {}, torch.ones(2)]),
    "betas": ([(0.5, 0.9), [0.5, 0.9]], [[0.9], (0.5, 0.9, 0.9), 0.5, "ab", [0.5, "b"]]),
    "amsgrad": ([True, 0], ["no", [True]]),
    "foreach": ([False, None], []),
    "label": (["sparse", ""], [5, ["sparse"], {}]),
    "extra": ([5, "x", None], []),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_group(tmp_path, name):
    """Saved settings are loaded if their types match the optimizer's; others raise an error."""
    module, optimizer = stepped()
    taken, refused = SETTINGS[name]
    for number, value in enumerate([*taken, *refused]):
        optimizer.param_groups[0][name] = value
        path = checkpoint.save(module, tmp_path / str(number), optimizer)
        other, loaded = stepped()
        before = repr(state_of(loaded))
        if number < len(taken):
            checkpoint.load(other, path, loaded)
            assert loaded.param_groups[0][name] == value
        else:
            with pytest.raises(CheckpointError, match=f"optimizers: .*{name} is "):
                checkpoint.load(other, path, loaded)
            assert repr(state_of(loaded)) == before


STATES = {
    "a number": ("step", 7, None),
    "one number": ("step", torch.tensor(7.0), None),
    "one in a list": ("step", torch.tensor([7.0]), r"step is \[1\], not \[\]"),
    "another shape": ("exp_avg", torch.ones(2, 1), r"exp_avg is \[2, 1\], not \[1, 2\]"),
    "another number": ("exp_avg", torch.ones(1, 3), r"exp_avg is \[1, 3\], not \[1, 2\]"),
    "no number": ("exp_avg", "x", ""),
}


@pytest.mark.parametrize("kind", STATES)
def test_states_of_a_parameter(tmp_path, kind):
    name, value, said = STATES[kind]
    module, optimizer = stepped()
    optimizer.state[module.weight][name] = value
    checkpoint.save(module, tmp_path / "a", optimizer)
    other, loaded = stepped()
    before = repr(state_of(loaded))
    if said is None:
        checkpoint.load(other, tmp_path / "a", loaded)
        assert loaded.state[other.weight][name] == value
    else:
        with pytest.raises(CheckpointError, match=f"optimizers: .*{said}"):
            checkpoint.load(other, tmp_path / "a", loaded)
        assert repr(state_of(loaded)) == before


ODD = {
    "groups": (("groups", [5]), "groups must be a list of objects"),
    "no groups": (("groups", {}), "groups must be a list of objects"),
    "params": (("groups", 0, "params", [5]), "params must be a list of names"),
    "a name": (("groups", 0, "params", "weight"), "params must be a list of names"),
    "states": (("state", []), "state must be an object of objects"),
    "a state": (("state", "bias", 5), "state must be an object of objects"),
    "one that is unknown": (("state", "other", {}), "KeyError"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_states_are_refused(tmp_path, kind):
    module, optimizer = stepped()
    checkpoint.save(module, tmp_path / "a", optimizer)
    (*path, value), said = ODD[kind]
    rewritten(tmp_path / "a", put("optimizers", 0, *path, value))
    before = repr(state_of(optimizer))
    with pytest.raises(CheckpointError, match=f"/a: is damaged: optimizers: .*{said}"):
        checkpoint.load(module, tmp_path / "a", optimizer)
    assert repr(state_of(optimizer)) == before


@pytest.mark.parametrize("fits", [True, False])
def test_hooks_run_once_and_only_of_what_is_loaded(tmp_path, fits):
    module, optimizer = stepped()
    checkpoint.save(module, tmp_path / "a", optimizer)
    calls = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after"))
    if fits:
        checkpoint.load(module, tmp_path / "a", optimizer)
    else:
        with pytest.raises(CheckpointError, match="no state of other"):
            checkpoint.load(module, tmp_path / "a", optimizer, state={"other": optimizer})
    assert calls == (["before", "after"] if fits else [])


class Refuses(torch.optim.SGD):
    def load_state_dict(self, state_dict):
        self.param_groups[0]["lr"] = 5.0
        raise ValueError("not this one")


def test_an_optimizer_that_refuses_halfway_is_left_alone(tmp_path):
    module, optimizer = stepped(kind=Refuses)
    checkpoint.save(module, tmp_path / "a", optimizer)
    with pytest.raises(CheckpointError, match=r"optimizers: .*not this one"):
        checkpoint.load(module, tmp_path / "a", optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


class Reordered(torch.nn.Linear):
    """Linear layer whose parameters have the same names in a different order."""

    def __init__(self):
        super().__init__(2, 1)
        self._parameters["weight"] = self._parameters.pop("weight")


def test_states_go_to_the_parameters_of_their_names(tmp_path):
    module, optimizer = stepped()
    checkpoint.save(module, tmp_path / "a", optimizer)
    other, loaded = stepped(Reordered())
    assert [name for name, _ in other.named_parameters()] == ["bias", "weight"]
    loaded.state.clear()
    checkpoint.load(other, tmp_path / "a", loaded)
    for name, parameter in module.named_parameters():
        theirs = loaded.state[other.get_parameter(name)]
        assert torch.equal(theirs["exp_avg"], optimizer.state[parameter]["exp_avg"]), name
    split = [{"params": [each]} for each in other.parameters()]
    with pytest.raises(CheckpointError, match=r"optimizer 0, Adam, has other parameters: in other"):
        checkpoint.load(other, tmp_path / "a", torch.optim.Adam(split))


def tables():
    model = torch.nn.ModuleDict({name: sparsekit.Embedding(9, 2, name=name) for name in "ab"})
    optimizers = [optim.Adagrad(layer.parameters(), lr=0.1) for layer in model.values()]
    for layer, optimizer in zip(model.values(), optimizers, strict=True):
        layer(torch.arange(3)).sum().backward()
        optimizer.step()
    return model, optimizers


def test_a_table_that_another_optimizer_trains(tmp_path):
    model, optimizers = tables()
    checkpoint.save(model, tmp_path / "a", optimizers)
    checkpoint.load(model, tmp_path / "a", optimizers)
    rewritten(tmp_path / "a", put("tables", "b", "optimizer", 0))
    with pytest.raises(CheckpointError, match=r"optimizers: .*table b is of 0"):
        checkpoint.load(model, tmp_path / "a", optimizers)


def test_fresh_states_are_those_of_the_tables_group(tmp_path):
    model, _ = tables()
    groups = [
        {"params": [*layer.parameters()], "initial_accumulator_value": value}
        for layer, value in zip(model.values(), (0.25, 0.5), strict=True)
    ]
    optimizer = optim.Adagrad(groups, lr=0.1)
    sum(layer(torch.arange(3)).sum() for layer in model.values()).backward()
    optimizer.step()
    checkpoint.load(model, checkpoint.save(model, tmp_path / "a", optimizer), optimizer)
    for layer, value in zip(model.values(), (0.25, 0.5), strict=True):
        (states,) = (each for each in optimizer.state[layer.weight].values() if each.dim())
        assert states[3:].unique().tolist() == [value]
        assert (states[:3] > value).all()


@pytest.mark.parametrize("kind", [optim.Adagrad, torch.optim.Adagrad])
def test_fresh_states_of_adagrad_are_the_saved_initial_value(tmp_path, kind):
    layer = sparsekit.Embedding(9, 2, name="ids")
    optimizer = kind(layer.parameters(), lr=0.1, initial_accumulator_value=0.25)
    layer(torch.arange(3)).sum().backward()
    optimizer.step()
    checkpoint.save(layer, tmp_path / "a", optimizer)
    loaded = kind(layer.parameters(), lr=0.1)  # the load replaces these settings by the saved ones
    checkpoint.load(layer, tmp_path / "a", loaded)
    (sums,) = (each for each in loaded.state[layer.weight].values() if each.dim())
    assert sums[3:].unique().tolist() == [0.25]
    assert (sums[:3] > 0.25).all()


def test_a_state_of_a_tables_rows_of_another_shape(tmp_path):
    layer = sparsekit.Embedding(9, 2, name="ids")
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)
    layer(torch.arange(3)).sum().backward()
    optimizer.step()
    optimizer.state[layer.weight]["exp_avg"] = torch.zeros(9)
    checkpoint.save(layer, tmp_path / "a", optimizer)
    said = r"LazyAdam keeps exp_avg, exp_avg_sq for each row, .* has exp_avg \[\], exp_avg_sq \[2\]"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(layer, tmp_path / "a", optimizer)


def test_a_table_without_a_step_has_made_none(tmp_path):
    model, optimizers = tables()
    checkpoint.save(model, tmp_path / "a", optimizers)
    rewritten(tmp_path / "a", lambda values: values["tables"]["a"]["settings"].clear())
    checkpoint.load(model, tmp_path / "a", optimizers)
    steps = [int(each.state[w]["step"]) for each in optimizers for w in each.state]
    assert steps == [0, 1]


@pytest.mark.parametrize("kind", [optim.LazyAdam, torch.optim.SparseAdam])
def test_a_state_that_was_only_asked_for(tmp_path, kind):
    layer = sparsekit.Embedding(9, 2, name="ids")
    optimizer = kind([*layer.parameters()], lr=0.1)
    assert not optimizer.state[layer.weight]  # reading the state has created an empty entry
    checkpoint.load(layer, checkpoint.save(layer, tmp_path / "a", optimizer), optimizer)
    layer(torch.arange(3)).sum().backward()
    optimizer.step()
    assert int(optimizer.state[layer.weight]["step"]) == 1


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, "1", None, {"$float": "nan"}])
@pytest.mark.parametrize("kind", [optim.Adagrad, torch.optim.Adagrad])
def test_steps_of_a_table(tmp_path, kind, step):
    layer = sparsekit.Embedding(9, 2, name="ids")
    optimizer = kind(layer.parameters(), lr=0.1)
    layer(torch.arange(3)).sum().backward()
    optimizer.step()
    checkpoint.save(layer, tmp_path / "a", optimizer)
    for taken in (0, 2**63 - 1):
        rewritten(tmp_path / "a", put("tables", "table", "settings", "step", taken))
        checkpoint.load(layer, tmp_path / "a", optimizer)
        assert int(optimizer.state[layer.weight]["step"]) == taken
    rewritten(tmp_path / "a", put("tables", "table", "settings", "step", step))
    if step == 1.0 and step is not True and kind is torch.optim.Adagrad:
        checkpoint.load(layer, tmp_path / "a", optimizer)  # torch keeps its step as a float
        return
    with pytest.raises(CheckpointError, match=r"optimizers: .*table table: step must be a number"):
        checkpoint.load(layer, tmp_path / "a", optimizer)
