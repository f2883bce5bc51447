"""torch optimizers without sparse gradients raise before any change and name one of sparsekit's."""

import re

import pytest
import torch

import sparsekit

REFUSING = ["Adadelta", "Adafactor", "Adam", "Adamax", "AdamW", "ASGD", "Muon", "NAdam", "RAdam"]


def with_gradient():
    layer = sparsekit.Embedding(9, 2, name="t")
    layer(torch.arange(3)).sum().backward()
    return layer, torch.nn.Parameter(torch.ones(2, 2))


@pytest.mark.parametrize("name", [*REFUSING, "RMSprop", "Rprop", "SGD"])
def test_which_of_ours_to_use(name):
    layer, dense = with_gradient()
    dense.grad = torch.ones(2, 2)
    keywords = {"lr": 0.1, "weight_decay": 0.1} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)([dense, layer.weight], **keywords)
    with pytest.raises(TypeError, match=rf"^torch\.optim\.{name} does not take") as caught:
        optimizer.step()
    (ours,) = re.findall(r"use sparsekit\.optim\.(\w+)", str(caught.value))
    getattr(sparsekit.optim, ours)([dense, layer.weight])
    assert torch.equal(dense, torch.ones(2, 2))


@pytest.mark.parametrize("name", ["Adam", "SparseAdam"])
@pytest.mark.parametrize("by_name", [False, True])
def test_which_of_ours_to_use_where_a_closure_computes_the_gradients(name, by_name):
    """The error is the same with a closure, which trainers such as Lightning pass to `step`."""
    layer, dense = sparsekit.Embedding(9, 2, name="t"), torch.nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(torch.optim, name)([layer.weight, dense])
    before = layer(torch.arange(3)).detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.arange(3)).sum() + dense.sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=rf"^torch\.optim\.{name} does not .* use sparsekit\.optim"):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert torch.equal(layer(torch.arange(3)), before)
    assert torch.equal(dense, torch.ones(2, 2))
    # The gradients of the previous step do not matter, and `step` returns the loss of the closure.
    taken = layer.weight.grad if name == "SparseAdam" else dense.grad
    weight = layer.weight if name == "SparseAdam" else dense

    def other():
        optimizer.zero_grad()
        weight.grad = taken
        return 5.0

    assert optimizer.step(other) == 5.0
    assert not torch.equal(weight, torch.ones(2, 2))


@pytest.mark.parametrize("name", ["SparseAdam", "Adagrad", "SGD", "momentum"])
def test_those_that_take_them_do(name):
    layer, _ = with_gradient()
    before = layer.weight.detach().clone()
    if name == "momentum":
        optimizer = torch.optim.SGD([layer.weight], lr=0.1, momentum=0.9)
    else:
        optimizer = getattr(torch.optim, name)([layer.weight], lr=0.1)
    optimizer.step()
    assert (layer.weight != before).any(1).sum() == 3


def test_sparse_adam_beside_a_dense_part_does_not_lead_back_to_adam():
    layer, dense = with_gradient()
    dense.grad = torch.ones(2, 2)
    before = layer.weight.detach().clone()
    with pytest.raises(TypeError, match=r"shape \(2, 2\); use sparsekit\.optim\.LazyAdam"):
        torch.optim.SparseAdam([layer.weight, dense]).step()
    assert torch.equal(layer.weight, before)
    # Without a table, torch raises its own error.
    with pytest.raises(RuntimeError, match="does not support dense"):
        torch.optim.SparseAdam([dense]).step()


def test_dense_gradients_are_left_to_torch():
    layer, _ = with_gradient()
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.Adam([layer.weight]).step()
    other = torch.nn.Embedding(9, 2, sparse=True)
    other(torch.arange(3)).sum().backward()
    # Without a table, torch raises its own error.
    with pytest.raises(RuntimeError, match="consider SparseAdam"):
        torch.optim.Adam([other.weight]).step()
