"""Pretrained vectors written to a weight are kept, and writes that would be lost are refused."""

import copy

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit import TableFullError, nn, optim

from .bags import single, vectors

WRITES = {
    "zeros_": lambda layer: torch.nn.init.zeros_(layer.weight),
    "constant_ of 0": lambda layer: torch.nn.init.constant_(layer.weight, 0),
    "fill_ of 0": lambda layer: layer.weight.detach().fill_(0),
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
    with pytest.raises(RuntimeError, match="weight was written to"):
        vectors(copy.deepcopy(layer), [1, 2])
    assert len(layer.table) == 0
    layer.reset_parameters()
    assert same_bits(vectors(layer, [1, 2]), vectors(single(), [1, 2]))


def _ones_at(layer, rows):
    with torch.no_grad():
        layer.weight[rows] = 1


BESIDE = {
    "ones_": lambda layer: torch.nn.init.ones_(layer.weight),
    "zeros_": lambda layer: torch.nn.init.zeros_(layer.weight),
    "row that comes next": lambda layer: _ones_at(layer, len(layer.table)),
    "rows that come last": lambda layer: _ones_at(layer, slice(-9, None)),
}


def _restored(layer):
    other = single()
    other.load_state_dict(layer.state_dict())
    return other


ROWS_WITH_KEYS = {
    "looked up": lambda: (layer := single(), vectors(layer, [1, 2]))[0],
    "evaluated": lambda: (layer := single(), vectors(layer, [1]), vectors(layer.eval(), [1]))[0],
    "copied": lambda: copy.deepcopy(ROWS_WITH_KEYS["looked up"]()),
    "loaded": lambda: _restored(ROWS_WITH_KEYS["looked up"]()),
    "stepped": lambda: _stepped(optim.SGD),
    "stepped by torch": lambda: _stepped(torch.optim.SGD),
    "from_pretrained": lambda: nn.Embedding.from_pretrained(torch.ones(3, 5), num_embeddings=300),
}


def _stepped(kind):
    layer = single()
    layer((torch.tensor([1, 2]), torch.arange(3))).sum().backward()
    kind(layer.parameters(), lr=0.1).step()
    return layer


def _look_up(layer):
    keys = torch.tensor([1, 7])
    return layer(keys) if isinstance(layer, nn.Embedding) else vectors(layer, [1, 7])


@pytest.mark.parametrize("rows", ROWS_WITH_KEYS)
@pytest.mark.parametrize("write", BESIDE)
def test_values_of_rows_without_a_key_are_refused_beside_some_that_have_one(rows, write):
    layer = ROWS_WITH_KEYS[rows]()
    keys = layer.table.keys()
    BESIDE[write](layer)
    for one in (layer, layer, copy.deepcopy(layer)):
        with pytest.raises(RuntimeError, match=r"weight was written to .* initializer.*assign"):
            _look_up(one)
    assert layer.table.keys().equal(keys)
    layer.reset_parameters()
    _look_up(layer)


@pytest.mark.parametrize("rows", ROWS_WITH_KEYS)
def test_writes_to_rows_with_keys_are_kept(rows):
    layer = ROWS_WITH_KEYS[rows]().train()
    size = len(layer.table)
    with torch.no_grad():
        layer.weight.mul_(2)
        layer.weight[:size] = 3
        assert (_look_up(layer)[0] == 3).all()
        layer.weight[len(layer.table) - 1] = 4
        assert (_look_up(layer)[1] == 4).all()
        torch.nn.init.zeros_(layer.weight[: len(layer.table)][1:])
        _look_up(layer)


def test_zeros_where_vectors_start_from_zeros():
    layer = single(embedding_initializer=nn.Constant(0.0))
    for keys in ([1], [1, 2]):
        torch.nn.init.zeros_(layer.weight)
        assert (vectors(layer, keys) == 0).all()


@pytest.mark.parametrize("kind", [optim.LazyAdam, torch.optim.Adam])
def test_optimizers_may_move_rows_without_a_key(kind):
    layer = single()
    vectors(layer, [1])
    layer.weight.grad = torch.ones_like(layer.weight)
    kind(layer.parameters(), lr=0.1).step()
    for one in (layer, copy.deepcopy(layer), _restored(layer)):
        assert bool(one.weight[3:].any())
        one.assign(torch.tensor([1]), torch.ones(1, 5))
        with torch.no_grad():
            one.weight.mul_(2)
        assert same_bits(vectors(one, [2]), vectors(single(), [2]))


def test_a_copy_of_rows_that_an_optimizer_moved_before_any_key():
    layer = single()
    layer.weight.grad = torch.ones_like(layer.weight)
    optim.SGD(layer.parameters(), lr=0.1).step()
    assert same_bits(vectors(copy.deepcopy(layer), [2]), vectors(single(), [2]))


def test_own_writes_of_zeros_are_no_such_write():
    layer = single()
    layer.assign(torch.tensor([1, 2]), torch.zeros(2, 5))
    assert (vectors(layer, [1, 2]) == 0).all()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    layer((torch.tensor([1]), torch.arange(2))).sum().mul(0).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    assert (vectors(layer, [1, 2]) == 0).all()


@pytest.mark.parametrize("kind", [optim.LazyAdam, optim.Adam, optim.SGD])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_known_to_be_no_such_write(kind, fused):
    """An optimizer step is not mistaken for a manual write, which would make lookups check rows."""
    layer = single()
    optimizer = kind(layer.parameters(), lr=0.1)
    if fused:
        optim.fuse_in_backward(optimizer, layer)
    for keys in ([1, 2], [2, 3], [1, 3]):
        layer((torch.tensor(keys), torch.arange(3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert layer.weight._version == layer.weight.noted_version
    limited = nn.Embedding(300, 5, max_norm=0.01)
    for _ in range(2):
        limited(torch.tensor([1, 2]))
        assert limited.weight._version == limited.weight.noted_version


def test_averages_may_come_before_keys():
    model = single()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert same_bits(vectors(averaged.module, [1]), vectors(single(), [1]))
    vectors(model, [1])
    averaged.update_parameters(model)
    vectors(averaged.module, [1, 2])


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
        # Key 1 has this row, so the row may be written by hand.
        torch.nn.init.ones_(layer.weight[:1])
        assert (vectors(layer, [1]) == 1).all()
        assert (vectors(copy.deepcopy(layer), [1]) == 1).all()
    moved = single()
    optimizer = optim.LazyAdam(moved.parameters())
    # Give every row a gradient, as a penalty on the whole weight would.
    moved.weight.grad = torch.ones_like(moved.weight)
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


@pytest.mark.parametrize("of", [lambda w: w, lambda w: w.data], ids=["", "data"])
def test_averages_by_other_hands_are_refused_where_keys_come_late(of):
    """Averaging by other libraries raises: they would average rows of later keys with zeros."""
    model = single()
    vectors(model, [1])
    averaged = copy.deepcopy(model).eval()
    vectors(model, [1, 2])
    with torch.no_grad():
        of(averaged.weight).mul_(0.9).add_(of(model.weight), alpha=0.1)
    with pytest.raises(RuntimeError, match=r"written to past its 1 keys.* weight\[1:\]"):
        vectors(averaged, [1])
    with torch.no_grad():
        averaged.weight[1:] = 0
    vectors(averaged, [1, 2])
