"""Replays follow changes in place, and all that they would not follow makes a capture invalid."""

import deferred_errors
import pytest
import torch
from captured_steps import STEPS, Trained, assert_same
from graphs import HostGraph, host_graphs

from sparsekit import checkpoint, optim
from sparsekit.optim import fuse_in_backward
from sparsekit.train import CapturedStep


@pytest.fixture
def graphs():
    with host_graphs():
        yield


def replaced(module, name):
    value = getattr(module, name)
    if isinstance(value, torch.nn.Parameter):
        value.data = value.data.clone()
    else:
        module._buffers[name] = value.clone()


def group_of(trained):
    return trained.optimizer.param_groups[0]


def first_weight(trained):
    return trained.model.layers[0].weight


def state_of(trained):
    return trained.optimizer.state[first_weight(trained)]


def other_optimizer(trained):
    trained.handle.remove()
    fuse_in_backward(optim.SGD(trained.model.parameters(), lr=0.1), trained.model)


# Changes that make a capture invalid, each with the words of its error.
CHANGES = {
    "weight": (
        lambda t: replaced(t.model.layers[1], "weight"),
        "the memory or shape of weight of group.layers.t1",
    ),
    "buffer": (lambda t: replaced(t.model.layers[0].table, "size"), "size of group.layers.t0"),
    "seed": (lambda t: replaced(t.model.layers[0], "seed"), "seed of group.layers.t0"),
    "module": (lambda t: setattr(t.model, "head", torch.nn.Linear(24, 1)), "head of the model"),
    "assigned": (
        lambda t: t.model.load_state_dict(t.model.state_dict(), assign=True),
        "weight of group.layers.t0",
    ),
    "dtype": (lambda t: t.model.head.double(), "of weight of head"),
    "mode": (lambda t: t.model.eval(), "training of the model"),
    "option": (lambda t: setattr(t.model.layers[2], "insert", False), "an option of group.layers"),
    "betas": (lambda t: group_of(t).update(betas=(0.5, 0.9)), "betas of optimizer 0, a LazyAdam"),
    "eps": (lambda t: group_of(t).update(eps=0.1), "eps of optimizer 0"),
    "decay": (lambda t: group_of(t).update(weight_decay=0.1), "weight_decay of optimizer 0"),
    "number": (lambda t: group_of(t).update(lr=0.5), "lr of optimizer 0"),
    "tensor": (lambda t: group_of(t).update(lr=torch.tensor(0.5)), "lr of optimizer 0"),
    "states": (
        lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
        "state of optimizer 0",
    ),
    "state of a parameter": (
        lambda t: t.optimizer.state.update({first_weight(t): {**state_of(t)}}),
        "state of optimizer 0",
    ),
    "state tensor": (
        lambda t: state_of(t).update(exp_avg=state_of(t)["exp_avg"].clone()),
        "exp_avg of optimizer 0",
    ),
    "keys of states": (  # as when a load has given rows other keys, and states do not follow yet
        lambda t: state_of(t).update(keys=t.model.layers[0].table.keys()),
        "state of optimizer 0",
    ),
    "shape": (
        lambda t: setattr(t.model.head.weight, "data", t.model.head.weight.data[:, :3]),
        "the memory or shape of weight of head",
    ),
    "parameters": (
        lambda t: t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
        "param_groups of optimizer 0",
    ),
    "detached": (lambda t: t.handle.remove(), "update_in_backward of weight of group.layers.t0"),
    "late": (
        lambda t: setattr(t.model.layers[0].weight, "before_read", print),
        "before_read of weight of group.layers.t0",
    ),
    "attached": (other_optimizer, "update_in_backward of weight of group.layers.t0"),
}


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_a_capture_invalid(change):
    trained = Trained(3)
    trained.run(steps=5)
    make, named = CHANGES[change]
    make(trained)
    before, replays = trained.contents(), HostGraph.replays
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^CapturedStep: .*{named}.* a new CapturedStep$"):
            trained.run(5, 1)
    assert_same(before, trained.contents())
    assert HostGraph.replays == replays


@pytest.mark.usefixtures("graphs")
def test_a_tensor_of_more_than_two_dimensions():
    trained = Trained()
    trained.model.register_buffer("cube", torch.ones(2, 2, 2))
    trained.run(steps=5)
    trained.run(5, 1)
    trained.model.cube.data = trained.model.cube.clone()
    with pytest.raises(RuntimeError, match="the memory or shape of cube of the model has changed"):
        trained.run(6, 1)


@pytest.mark.usefixtures("graphs")
def test_a_rate_that_is_a_number_must_stay_the_same():
    trained = Trained(lr=0.5)
    trained.run(steps=5)
    group_of(trained)["lr"] = 0.25
    with pytest.raises(RuntimeError, match=r"lr of optimizer 0.* make lr a tensor on the device"):
        trained.run(5, 1)
    group_of(trained)["lr"] = 0.5
    trained.run(5, 1)


@pytest.mark.usefixtures("graphs")
def test_a_setting_that_changes_within_a_list():
    trained = Trained(betas=[0.9, 0.99])
    trained.run(steps=5)
    group_of(trained)["betas"] = [0.9, 0.99]  # an equal one is no change
    trained.run(5, 1)
    trained = Trained(betas=[0.9, 0.99])
    trained.run(steps=5)
    group_of(trained)["betas"][0] = 0.5
    with pytest.raises(RuntimeError, match=r"^CapturedStep: betas of optimizer 0, a LazyAdam has"):
        trained.run(5, 1)


@pytest.mark.usefixtures("graphs")
def test_an_optimizer_of_torch_beside_the_one_of_the_tables():
    found = []
    for captured in (True, False):
        trained = Trained(captured=False)
        dense = torch.optim.SGD(trained.model.head.parameters(), lr=0.1)
        trained.handle.remove()
        trained.optimizer = optim.LazyAdam([trained.model.layers[0].weight], lr=trained.lr)
        fuse_in_backward(trained.optimizer, trained.model)

        def step(keys, labels, trained=trained, dense=dense):
            dense.zero_grad()
            result = trained.step(keys, labels)
            dense.step()
            return result

        optimizers = [trained.optimizer, dense]
        trained.captured = CapturedStep(step, trained.model, optimizers) if captured else step
        found.append((trained.run(), trained.contents()))
        if captured:
            (group,) = dense.param_groups
            group["params"][0] = torch.nn.Parameter(group["params"][0].detach().clone())
            with pytest.raises(RuntimeError, match="params of optimizer 1, a SGD has changed"):
                trained.run(STEPS, 1)
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.usefixtures("graphs")
def test_checks_that_are_turned_on():
    library = deferred_errors.library()
    for captured in (True, False):
        trained = Trained()
        trained.run(steps=5 if captured else 3)
        library.sparsekit_set_checked(1)
        try:
            with pytest.raises(RuntimeError, match=r"^CapturedStep: with sparsekit.checked on"):
                trained.run(5, 1)
        finally:
            library.sparsekit_set_checked(0)
        trained.run(5, 1)


IN_PLACE = {
    "load_state_dict": lambda trained, saved: trained.model.load_state_dict(saved),
    "reset": lambda trained, saved: [layer.reset_parameters() for layer in trained.model.layers],
    "a layer's vectors": lambda trained, saved: trained.model.head.weight.data.mul_(0.5),
    "rate": lambda trained, saved: trained.lr.fill_(0.125),
    "checkpoint": lambda trained, saved: checkpoint.load(trained.model, saved),
}


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("change", IN_PLACE)
def test_changes_in_place_are_followed(tmp_path, change, tables):
    found = []
    for captured in (True, False):
        with host_graphs():
            trained = Trained(tables, captured=captured)
            trained.run(steps=2)
            if change == "checkpoint":
                saved = checkpoint.save(trained.model, tmp_path / str(captured))
            else:
                saved = {k: v.clone() for k, v in trained.model.state_dict().items()}
            trained.run(2, 4)
            IN_PLACE[change](trained, saved)
            losses = trained.run(6, 4)
            found.append((losses, trained.contents()))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])
