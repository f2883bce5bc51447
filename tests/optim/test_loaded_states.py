"""Optimizers load or refuse states of unusual forms."""

import copy

import pytest
import torch

import sparsekit
from sparsekit import optim

from .cases import make, run, start


def table(capacity=20):
    layer = sparsekit.Embedding(capacity, 2, name="t")
    layer(torch.tensor([5, -6]))
    return layer


def state_of(optimizer, layer):
    layer(torch.tensor([5, -6])).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_torchs_sgd_counts_as_one_step():
    weight = torch.nn.Parameter(start().detach())
    theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    run(theirs, weight, [torch.ones_like(weight)])
    ours = optim.SGD([weight])
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[weight]["step"].dtype == torch.int64
    assert ours.state[weight]["step"] == 1


def test_each_group_gets_the_states_of_its_own_parameters():
    sizes = [(2, 3), (4, 3), (2, 3)]
    weights, others = ([start(shape=shape) for shape in sizes] for _ in range(2))
    ours, again = (
        optim.LazyAdam([{"params": each[:1]}, {"params": each[1:], "lr": 0.5}])
        for each in (weights, others)
    )
    for i, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, i)
    ours.step()
    rates = [torch.tensor(0.25), torch.tensor(0.25)]
    for group, rate in zip(again.param_groups, rates, strict=True):
        group["lr"] = rate
    again.load_state_dict(ours.state_dict())
    for weight, other in zip(weights, others, strict=True):
        assert torch.equal(ours.state[weight]["exp_avg"], again.state[other]["exp_avg"])
    assert all(group["lr"] is rate for group, rate in zip(again.param_groups, rates, strict=True))
    assert torch.equal(torch.stack(rates), torch.tensor([1e-3, 0.5]))


def test_a_momentum_that_torch_has_not_begun_is_zero():
    weight = start()
    ours = make("SGD momentum", [weight])
    state = ours.state_dict()
    state["state"][0] = {"momentum_buffer": None}
    ours.load_state_dict(state)
    assert not ours.state[weight]["momentum_buffer"].any()


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 0), (7,)])
@pytest.mark.parametrize("name", ["LazyAdam per row", "Adam", "SGD momentum"])
def test_parameters_of_any_shape(name, shape):
    weight, other = start(shape=shape), start(shape=shape)
    optimizer, again = make(name, [weight]), make(name, [other])
    run(optimizer, weight, [torch.ones_like(weight)] * 2)
    again.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state[weight].items():
        assert torch.equal(value, again.state[other][key]), key


@pytest.mark.parametrize(
    "keys", [None, [5, -6], torch.tensor([5, -6]).int(), torch.tensor([[5, -6]]), torch.tensor(5)]
)
def test_keys_of_another_form_are_unknown(keys):
    layer = table()
    optimizer = optim.LazyAdam(layer.parameters())
    state = state_of(optimizer, layer)
    state["state"][0]["keys"] = keys
    optimizer.load_state_dict(state)
    assert optimizer.state[layer.weight]["keys"] is None


def test_keys_that_have_kept_their_rows_need_not_be_kept():
    layer = table()
    optimizer = optim.LazyAdam(layer.parameters())
    state = state_of(optimizer, layer)
    layer(torch.tensor([7]))
    optimizer.load_state_dict(state)
    assert "keys" not in optimizer.state[layer.weight]


def test_loaded_keys_are_a_copy():
    layer, other = table(), sparsekit.Embedding(20, 2)
    other(torch.tensor([-6, 5]))
    optimizer = optim.LazyAdam(other.parameters())
    state = copy.deepcopy(state_of(optim.LazyAdam(layer.parameters()), layer))
    optimizer.load_state_dict(state)
    state["state"][0]["keys"].zero_()
    assert optimizer.state[other.weight]["keys"].tolist() == [5, -6]


def test_one_number_for_a_whole_table_is_refused():
    layer = table()
    optimizer = optim.LazyAdam(layer.parameters())
    state = state_of(optimizer, layer)
    for name in ("exp_avg", "exp_avg_sq"):
        state["state"][0][name] = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"exp_avg must have shape \(20, 2\), got \(\)"):
        optimizer.load_state_dict(state)


def test_a_table_without_memory_has_no_rows_in_use():
    weight = start()
    optimizer = make("LazyAdam", [weight])
    run(optimizer, weight, [torch.ones_like(weight)])
    large = sparsekit.nn.EmbeddingWeight(torch.empty(30, 5, device="meta"))
    of_large = make("LazyAdam", [large])
    of_large.load_state_dict(optimizer.state_dict())
    assert of_large.state[large]["exp_avg"].shape == (30, 5)


def test_row_counts_up_to_the_step_are_loaded():
    layer = table()
    optimizer = optim.LazyAdam(layer.parameters(), bias_correction="per_row")
    state = state_of(optimizer, layer)
    assert state["state"][0]["row_step"].tolist() == [1, 1] + [0] * 18
    optimizer.load_state_dict(state)
    assert optimizer.state[layer.weight]["row_step"].dtype == torch.int32
