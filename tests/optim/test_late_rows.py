"""Late rows catch up even if only the layer, or only the optimizer, is copied or saved."""

import copy
import io
import pickle

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit import optim

from .cases import ALL_ROWS
from .test_catch_up import Twins

pytestmark = pytest.mark.usefixtures("engine")


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_copy_of_the_layer_alone(name, way):
    twins = Twins(name)
    twins.steps(12)
    copied = COPIES[way](twins.layer)
    torch.testing.assert_close(copied.weight, twins.dense, **twins.close)
    twins.step(12)
    twins.check_all()


@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_state_of_the_optimizer_alone(name):
    twins = Twins(name)
    twins.steps(5)
    states = [copy.deepcopy(o.state_dict()) for o in (twins.ours, twins.theirs)]
    twins.steps(5, 12)
    for optimizer, state in zip((twins.ours, twins.theirs), states, strict=True):
        optimizer.load_state_dict(state)
    torch.testing.assert_close(twins.layer.weight.detach(), twins.dense.detach(), **twins.close)
    twins.steps(12, 20)
    twins.check_all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_new_key_after_a_dense_gradient_under_momentum(nesterov):
    def layer_of():
        return sparsekit.All2AllDenseEmbedding(
            20, 3, 1, 1, dynamic_input=True, dtype=torch.float64, name="new keys"
        )

    layer, settings = layer_of(), {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    layer(torch.tensor([1]))
    dense = torch.nn.Parameter(layer.weight.detach().clone())
    ours = optim.SGD([layer.weight], mode="catch_up", **settings)
    theirs = torch.optim.SGD([dense], **settings)
    for weight in (layer.weight, dense):
        weight.grad = torch.ones_like(weight)  # like the gradient of a penalty on all rows
    for step in range(10):
        ours.step()
        theirs.step()
        keys = torch.tensor([1, 7] if step >= 5 else [1])
        if step == 5:  # the row has moved, but its new key starts from the key's initial vector
            with torch.no_grad():
                dense[1] = layer_of().eval()(torch.tensor([7]))[0]
        found = layer(keys)
        torch.testing.assert_close(found, dense[: len(keys)], rtol=0, atol=1e-12)
        ours.zero_grad()
        theirs.zero_grad()
        (found**2).sum().backward()
        (dense[: len(keys)] ** 2).sum().backward()
    assert same_bits(layer.table.keys(), torch.tensor([1, 7]))
    ours.catch_up(layer.weight)
    torch.testing.assert_close(layer.weight[:2], dense[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["Adam", "SGD catch_up"])
def test_a_row_that_misses_more_steps_than_there_is_room_for_at_first(name):
    twins = Twins(name)
    twins.step(0)
    for step in range(1, 70):  # at first there is room for 64 steps
        twins.step(step, torch.tensor([0]))
    twins.check_all()
