"""After an interrupted call, an inserted key still starts from its initial vector."""

import copy
import functools
import pickle

import pytest
import torch
from conftest import same_bits
from interruptions import interrupt

import sparsekit
from sparsekit import TableFullError

from .bags import single, vectors

KNOWN, NEW = [5, -7, 2**63 - 1], [0, 9, -(2**63)]


def evaluated(layer):
    return vectors(layer.eval(), KNOWN + NEW)


def saved_and_loaded(layer):
    other = single()
    other.load_state_dict(layer.state_dict())
    return vectors(other, KNOWN + NEW)


WAYS = {
    "training": lambda layer: vectors(layer, KNOWN + NEW),
    "training on others": lambda layer: (vectors(layer, [77]), evaluated(layer))[1],
    "evaluation": evaluated,
    "state_dict": saved_and_loaded,
    "deepcopy": lambda layer: evaluated(copy.deepcopy(layer)),
    "pickle": lambda layer: evaluated(pickle.loads(pickle.dumps(layer))),
    "moved": lambda layer: evaluated(layer.double()),
    "interrupted again": lambda layer: (
        [interrupt(lambda: vectors(layer, [78]), moment) for moment in (100, 150, 200, 250)],
        evaluated(layer),
    )[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_keys_of_an_interrupted_call_have_their_initial_vectors(way):
    layer = single()
    vectors(layer, KNOWN)
    expected = evaluated(copy.deepcopy(layer))
    moment, inserted, call = 1, 0, copy.deepcopy(layer)
    while not interrupt(functools.partial(vectors, call, NEW), moment := moment + 5):
        if len(call.table) > len(KNOWN):  # otherwise the interrupt came before the insertion
            inserted += 1
            assert same_bits(WAYS[way](call), expected)
            assert call.table.keys()[: len(KNOWN + NEW)].tolist() == KNOWN + NEW
        call = copy.deepcopy(layer)
    assert inserted > 8


def test_a_refused_call_leaves_nothing_to_finish():
    layer = single(max_vocabulary_size_per_gpu=4)
    vectors(layer, KNOWN)
    with torch.no_grad():
        layer.weight[:3] = 7
    with pytest.raises(TableFullError):
        vectors(layer, NEW)
    assert (vectors(layer, KNOWN) == 7).all()
    assert (vectors(layer.eval(), KNOWN) == 7).all()


@pytest.mark.parametrize("assign", [False, True])
def test_a_load_drops_what_was_not_finished(assign):
    saved, layer = single(), single()
    vectors(saved, KNOWN)
    vectors(layer, KNOWN[:1])
    moment = 1
    while len(layer.table) == 1:
        interrupt(lambda: vectors(layer, NEW), moment)
        moment += 1
    with torch.no_grad():
        saved.weight[:3] = 7
    layer.load_state_dict(saved.state_dict(), assign=assign)
    assert (vectors(layer, KNOWN) == 7).all()


def test_a_row_that_moved_before_it_had_a_key_is_finished_too():
    layers = [single(), single()]
    optimizers = [
        sparsekit.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, mode="catch_up")
        for layer in layers
    ]
    for layer, optimizer in zip(layers, optimizers, strict=True):
        vectors(layer, KNOWN)
        # Give every row a gradient, as a penalty on the whole weight would.
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        for _ in range(3):
            optimizer.zero_grad()
            layer((torch.tensor(KNOWN), torch.arange(4))).sum().backward()
            optimizer.step()
    moment = 1
    while len(layers[0].table) == len(KNOWN):
        interrupt(lambda: vectors(layers[0], NEW), moment)
        moment += 1
    expected = vectors(layers[1], NEW)
    assert same_bits(vectors(layers[0], NEW), expected)
    assert same_bits(expected, vectors(single(), NEW))
    for layer, optimizer in zip(layers, optimizers, strict=True):
        optimizer.catch_up(layer.weight)
    assert same_bits(vectors(layers[0], NEW), vectors(layers[1], NEW))
    assert same_bits(layers[0].weight, layers[1].weight)
