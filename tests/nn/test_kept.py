"""A layer or group keeps its lookup plan between calls, and renews it when needed."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch.nn.utils import parametrize

from sparsekit import DistributedEmbedding, EmbeddingGroup, optim
from sparsekit.lookup import PlanCache, remember
from sparsekit.nn import Constant
from tests.nn.keyed import Keyed

KEYS = torch.tensor([3, 9, 3, 10**15]).view(4, 1, 1)


def layer(name="kept", **options):
    options = {"seed": 1, "name": name} | options
    return DistributedEmbedding("sum", 20, 4, 1, 1, **options)


def group(**options):
    return EmbeddingGroup({"a": layer("a"), "b": layer("b")}, **options)


def inputs(step=0, batch=4):
    keys = {name: (torch.arange(batch) + 5 * step + i) % 20 for i, name in enumerate("ab")}
    return Keyed(list(keys), torch.cat(list(keys.values())), torch.arange(2 * batch + 1))


def called(made):
    """Call the layer, so that it keeps a plan; return the layer."""
    made(KEYS)
    return made


def test_a_setting_that_changes_counts_from_the_next_call():
    made = called(layer())
    made.initializer = Constant(7.0)
    assert (made(KEYS + 1)[:2] == 7).all()
    assert not (made(KEYS) == 7).any()


def test_a_layer_in_another_dtype():
    made = called(layer()).to(torch.float64)
    made.load_state_dict(layer().double().state_dict())
    assert made(KEYS).dtype == torch.float64
    other = called(layer())
    other.load_state_dict(called(layer(dtype=torch.bfloat16)).state_dict(), assign=True)
    assert other(KEYS).dtype == torch.bfloat16


def test_one_of_two_layers_in_another_dtype():
    both = group()
    both(inputs())
    both.layers["a"].to(torch.float64)
    out = both(inputs())
    assert (out["a"].dtype, out["b"].dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("shape", [(19, 4), (20, 3), (20, 5)])
@pytest.mark.parametrize("training", [True, False])
def test_a_weight_of_another_shape_is_refused(training, shape):
    made = called(layer()).train(training)
    made(KEYS)
    made.weight.data = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"^kept: weight must be contiguous and of shape \(20, 4"):
        made(KEYS)


def test_another_weight_for_one_call():
    made = called(layer()).eval()
    expected = made(KEYS)
    twice = {"weight": 2 * made.weight.detach()}
    assert torch.equal(torch.func.functional_call(made, twice, (KEYS,)), 2 * expected)
    assert torch.equal(made(KEYS), expected)


class Twice(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_parametrized_weight():
    made = called(layer()).eval()
    expected = made(KEYS).detach()
    parametrize.register_parametrization(made, "weight", Twice())
    assert torch.equal(made(KEYS), 2 * expected)


def test_a_state_that_is_loaded_in_place_of_tensors():
    made, other = called(layer()), layer(seed=2)
    other(KEYS - 1)
    made.load_state_dict(other.state_dict(), assign=True)
    made.eval(), other.eval()
    assert torch.equal(made(KEYS - 1), other(KEYS - 1))


def test_a_layer_is_freed_with_its_last_reference():
    made = called(layer())
    weight, gone = weakref.ref(made.weight), weakref.ref(made)
    gc.disable()
    try:
        del made
        assert gone() is None
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_begins_anew(make):
    made = called(layer())
    copied = make(made)
    assert copied.plan_cache is not made.plan_cache
    copied.weight = torch.nn.Parameter(torch.full_like(made.weight, 5.0))
    assert (copied(KEYS) == 5).all()
    assert not (made(KEYS) == 5).any()
    both = group(output="concatenated")
    both(inputs())
    copied = make(both)
    assert torch.equal(copied(inputs(1)), both(inputs(1)))


def test_another_layer_in_a_group():
    both = group(output="concatenated")
    before = both(inputs()).detach()
    both.layers["b"] = layer("other", seed=2)
    after = both(inputs())
    assert torch.equal(after[:, :4], before[:, :4])
    assert torch.equal(
        after[:, 4:], layer("other", seed=2)(inputs().values()[4:].view(4, 1, 1))[:, 0]
    )


def test_batches_of_ever_other_sizes():
    both, apart = group(output="concatenated"), group()
    for batch in range(1, 80):
        out = both(inputs(batch=batch))
        of_each = apart(inputs(batch=batch))
        assert torch.equal(out, torch.cat([of_each["a"], of_each["b"]], 1))
        keys = inputs(batch=batch).values()[:batch]
        assert torch.equal(both.layers["a"](keys.view(batch, 1, 1))[:, 0], of_each["a"])
    (tables,) = [both._plan_cache.plan_for(both._tables())]
    assert 0 < len(tables.derived) <= 64
    assert 0 < len(tables.batches[0].features) <= 64


def test_what_is_kept_is_bounded():
    values = {}
    for form in range(1000):
        remember(values, form, form)
        assert values[form] == form
        assert len(values) <= 64


def test_tables_are_kept_until_an_attribute_is_set():
    made, cache = called(layer()), PlanCache()
    tables = cache.plan_for([made])
    assert cache.plan_for([made]) is tables
    made.eval()
    assert cache.plan_for([made]) is not tables
    assert cache.plan_for([made, made]) is not cache.plan_for([made])


@pytest.mark.parametrize("how", ["remove", "drop"])
def test_an_optimizer_that_is_detached_before_the_backward(how):
    both = group(output="concatenated")
    expected = copy.deepcopy(both)
    expected(inputs()).sum().backward()
    optimizer = optim.LazyAdam(both.parameters())
    handle = optim.fuse_in_backward(optimizer, both)
    out = both(inputs())
    if how == "remove":
        handle.remove()
    del optimizer
    gc.collect()
    out.sum().backward()
    for mine, theirs in zip(both.parameters(), expected.parameters(), strict=True):
        assert mine.grad.is_coalesced()
        assert torch.equal(mine.grad.to_dense(), theirs.grad.to_dense())


def test_one_of_two_layers_is_detached_before_the_backward():
    both = group(output="concatenated")
    expected = copy.deepcopy(both)
    expected(inputs()).sum().backward()
    optimizer = optim.SGD(both.parameters(), lr=1.0)
    optim.fuse_in_backward(optimizer, both)
    out = both(inputs())
    before = both.layers["b"].weight.detach().clone()
    both.layers["a"].weight.update_in_backward = None
    out.sum().backward()
    a, b = (expected.layers[name].weight.grad.to_dense() for name in "ab")
    assert torch.equal(both.layers["a"].weight.grad.to_dense(), a)
    assert both.layers["b"].weight.grad is None
    assert torch.equal(both.layers["b"].weight, before - b)


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_a_frozen_layer_beside_one_that_is_updated_in_backward(frozen):
    both = group(output="concatenated")
    expected = copy.deepcopy(both)
    optimizer = optim.SGD(both.parameters(), lr=1.0)
    optim.fuse_in_backward(optimizer, both)
    both.layers[frozen].weight.requires_grad_(False)
    both(inputs()).sum().backward()
    expected(inputs()).sum().backward()
    for name, layer in expected.layers.items():
        step = 0 if name == frozen else layer.weight.grad.to_dense()
        assert torch.equal(both.layers[name].weight, layer.weight - step)
