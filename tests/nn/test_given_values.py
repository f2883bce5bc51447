"""Values that a weight is given: pretrained vectors are kept, what would be lost is refused."""

import copy

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit import TableFullError, nn, optim

from .bags import single, vectors

WRITES = {
    "constant_": lambda layer: torch.nn.init.constant_(layer.weight, 7.0),
    "xavier_uniform_": lambda layer: torch.nn.init.xavier_uniform_(layer.weight),
    "data": lambda layer: layer.weight.data.normal_(),
    "copy_": lambda layer: layer.weight.data.copy_(torch.ones_like(layer.weight)),
    "one row": lambda layer: layer.weight.data[200].fill_(1),
    "loop": lambda layer: layer.apply(
        lambda m: [torch.nn.init.ones_(p) for p in m.parameters(recurse=False)]
    ),
    "loaded": lambda layer: layer.load_state_dict(
        layer.state_dict() | {"weight": torch.ones_like(layer.weight)}
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_values_that_a_new_key_would_undo_are_refused(write, training):
    layer = single().train(training)
    WRITES[write](layer)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layer: weight was .* initializer.*assign\(keys"):
            vectors(layer, [1, 2])
    assert len(layer.table) == 0
    torch.nn.init.zeros_(layer.weight)
    assert same_bits(vectors(layer, [1, 2]), vectors(single(), [1, 2]))


def test_evaluation_before_does_not_hide_them():
    layer = single()
    vectors(layer.eval(), [1])
    torch.nn.init.ones_(layer.weight)
    with pytest.raises(RuntimeError, match="weight was written to"):
        vectors(layer.train(), [1])


def test_a_refused_call_before_does_not_hide_them():
    layer = single(max_vocabulary_size_per_gpu=3)
    with pytest.raises(TableFullError):
        vectors(layer, [1, 2, 3, 4])
    torch.nn.init.ones_(layer.weight)
    with pytest.raises(RuntimeError, match="weight was written to"):
        vectors(layer, [1])


def test_what_is_no_such_write():
    for layer in (
        copy.deepcopy(single()),
        single().double(),
        single(embedding_initializer=nn.Constant(7.0)),
    ):
        layer.load_state_dict(layer.state_dict())
        vectors(layer, [1])
        torch.nn.init.ones_(layer.weight)  # of a row in use, and others
        assert (vectors(layer, [1]) == 1).all()
        assert (vectors(copy.deepcopy(layer), [1]) == 1).all()
    moved = single()
    optimizer = optim.LazyAdam(moved.parameters())
    moved.weight.grad = torch.ones_like(moved.weight)  # a penalty on the whole weight
    optimizer.step()
    assert same_bits(vectors(moved, [1]), vectors(single(), [1]))
    rows = single(use_hashtable=False)
    torch.nn.init.constant_(rows.weight, 7.0)
    assert (vectors(rows, [1]) == 7).all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", [{}, {"use_hashtable": False}], ids=str)
def test_assigned_vectors(settings, training):
    layer = single(**settings)
    vectors(layer, [5, 6])
    layer.train(training)
    keys = torch.tensor([9, 5, 0])
    values = torch.arange(15.0).view(3, 5) + 1
    layer.assign(keys, values)
    assert same_bits(vectors(layer, [9, 5, 0]), values.double())
    assert same_bits(vectors(layer, [6]), vectors(single(**settings), [6]))
    layer.train()
    layer((keys, torch.arange(4))).sum().backward()
    optim.SGD(layer.parameters(), lr=1).step()
    assert same_bits(vectors(layer, [9, 5, 0]), values.double() - 1)


def test_bad_assignments_change_nothing():
    layer = single(max_vocabulary_size_per_gpu=3)
    vectors(layer, [5, 6])
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    ones = torch.ones(2, 5)
    for keys, values, error, message in [
        ([1, 2, 3], ones, ValueError, r"layer: vectors must have shape \(3, 5\), got \(2, 5\)"),
        ([1, 2], ones.int(), TypeError, "layer: vectors must be"),
        ([1.0, 2.0], ones, TypeError, "layer: keys must be"),
        ([1, 2], ones, TableFullError, "layer: .* 2 new keys"),
        ([1, 2], ones.to("meta"), ValueError, "vectors on meta"),
    ]:
        with pytest.raises(error, match=message):
            layer.assign(torch.tensor(keys), values)
        assert all(same_bits(value, before[name]) for name, value in layer.state_dict().items())
    assert isinstance(layer, sparsekit.DistributedEmbedding)


def test_a_state_without_keys_is_looked_at_again():
    layer, written = single(), single()
    vectors(layer, [1])
    torch.nn.init.ones_(written.weight)
    layer.load_state_dict(written.state_dict())
    with pytest.raises(RuntimeError, match="weight was written to"):
        vectors(layer, [1])
