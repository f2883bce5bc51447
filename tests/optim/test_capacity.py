"""The state of an optimizer can be loaded for a table with a different capacity."""

import copy

import pytest
import torch
from conftest import generator, same_bits

import sparsekit

from .cases import ALL_ROWS, OPTIMIZERS, make

USED = 30  # rows in use after the first steps


def table(capacity, **options):
    return sparsekit.Embedding(capacity, 5, name="t", dtype=torch.float64, **options)


def train(layer, optimizer, first, last, keys=USED):
    for step in range(first, last):
        drawn = torch.randint(0, keys, (20,), generator=generator(step))
        if step == 0:
            drawn = torch.arange(USED)
        optimizer.zero_grad()
        layer(drawn * 2**40).square().sum().backward()
        optimizer.step()


def rows(layer, optimizer, count):
    """Return the vectors and states of the first rows."""
    layer.state_dict()  # late rows catch up
    state = optimizer.state[layer.weight]
    found = {name: value[:count] if value.dim() else value for name, value in state.items()}
    return {**found, "vectors": layer.weight.detach()[:count]}


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert same_bits(value, other[name]), name


@pytest.mark.pairs
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("capacity", [USED, 45, 70, 300])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on(name, capacity, model_first):
    layer = table(70)
    optimizer = make(name, layer.parameters())
    train(layer, optimizer, 0, 4)
    states = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    other = table(capacity)
    of_other = make(name, other.parameters(), lr=7)
    loads = [lambda: other.load_state_dict(states[0]), lambda: of_other.load_state_dict(states[1])]
    for load in loads if model_first else reversed(loads):
        load()
    same(rows(other, of_other, USED), rows(layer, optimizer, USED))
    # New rows start as they would have at the old capacity.
    keys = USED if capacity < 70 else 2 * USED
    for pair in ((layer, optimizer), (other, of_other)):
        train(*pair, 4, 10, keys)
    assert len(other.table) == len(layer.table)
    count = len(layer.table)
    same(rows(other, of_other, count), rows(layer, optimizer, count))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_beyond_are_as_those_that_no_step_has_touched(name):
    layer, large = table(70), table(300)
    optimizer = make(name, layer.parameters())
    train(layer, optimizer, 0, 3)
    of_large = make(name, large.parameters())
    of_large.load_state_dict(optimizer.state_dict())
    fresh = table(300)
    of_fresh = make(name, fresh.parameters())
    train(fresh, of_fresh, 0, 3)
    found, expected = (one.state_dict()["state"][0] for one in (of_large, of_fresh))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key == "row_step" and name in ALL_ROWS:
            continue  # 0 or the step number: either is right, as rows with zero states do not move
        assert same_bits(found[key], value), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_through_a_larger_table_and_back(name):
    layers = [table(capacity) for capacity in (70, 300, 45)]
    optimizers = [make(name, layer.parameters()) for layer in layers]
    train(layers[0], optimizers[0], 0, 3)
    for i in range(2):
        layers[i + 1].load_state_dict(layers[i].state_dict())
        optimizers[i + 1].load_state_dict(optimizers[i].state_dict())
    same(rows(layers[2], optimizers[2], USED), rows(layers[0], optimizers[0], USED))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "SGD"])
def test_trained_rows_that_have_no_room(name):
    layer, small = table(70), table(USED - 3)
    optimizer, of_small = make(name, layer.parameters()), make(name, small.parameters())
    train(layer, optimizer, 0, 2)
    train(small, of_small, 1, 2, 5)
    before = copy.deepcopy(of_small.state_dict())
    message = rf"^{type(of_small).__name__}: .*\(27,.* got \(70,.*: row 27 .* room for 27 rows.*"
    with pytest.raises(ValueError, match=message + r", for parameter 0 of shape \(27, 5\)$"):
        of_small.load_state_dict(optimizer.state_dict())
    same(of_small.state_dict()["state"][0], before["state"][0])


@pytest.mark.parametrize("capacity", [10, 61, 69])
def test_only_the_last_of_many_rows_is_trained(capacity, monkeypatch):
    monkeypatch.setattr("sparsekit.optim.load_state._ROWS", 8)
    layer, small = table(70), table(capacity)
    optimizer, of_small = (make("LazyAdam", one.parameters()) for one in (layer, small))
    layer(torch.arange(70))
    layer(torch.tensor([3, 69])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="row 69 of the saved table"):
        of_small.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("capacity", [20, USED - 1])
def test_rows_in_use_that_the_state_lacks(capacity):
    small, layer = table(capacity), table(70)
    optimizer, of_layer = (make("LazyAdam", one.parameters()) for one in (small, layer))
    train(small, optimizer, 1, 2, 10)
    train(layer, of_layer, 0, 1)
    message = rf"of {capacity} rows, and there are vectors .* module's state fi"
    with pytest.raises(ValueError, match=message):
        of_layer.load_state_dict(optimizer.state_dict())
    layer.load_state_dict(small.state_dict())
    of_layer.load_state_dict(optimizer.state_dict())
    assert of_layer.state[layer.weight]["step"] == 1


def test_row_numbers_have_one_capacity():
    layer, large = table(20, use_hashtable=False), table(70, use_hashtable=False)
    optimizer, of_large = (make("Ftrl", one.parameters()) for one in (layer, large))
    layer(torch.arange(9)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="without a hash table keep the capacity"):
        of_large.load_state_dict(optimizer.state_dict())


def test_other_dims_and_plain_parameters():
    layer, wide = table(70), sparsekit.Embedding(90, 6, dtype=torch.float64)
    optimizer, of_wide = (make("LazyAdam", one.parameters()) for one in (layer, wide))
    train(layer, optimizer, 0, 1)
    with pytest.raises(ValueError, match=r"exp_avg must have shape \(90, 6\), got \(70, 5\)"):
        of_wide.load_state_dict(optimizer.state_dict())
    plain = torch.nn.Parameter(torch.zeros(90, 5, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"exp_avg must have shape \(90, 5\), got \(70, 5\)"):
        make("LazyAdam", [plain]).load_state_dict(optimizer.state_dict())


def test_states_of_different_lengths():
    layer, large = table(70), table(90)
    optimizer, of_large = (make("LazyAdam", one.parameters()) for one in (layer, large))
    train(layer, optimizer, 0, 1)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:50]
    with pytest.raises(ValueError, match=r"exp_avg must have shape \(90, 5\), got \(50, 5\)"):
        of_large.load_state_dict(state)


@pytest.mark.parametrize("name", ["LazyAdam per row", "Adam"])
def test_without_the_steps_of_rows(name):
    """If a state has no row_step, as in torch's Adam, all rows count as having taken every step."""
    layer, large = table(70), table(90)
    optimizer, of_large = (make(name, one.parameters()) for one in (layer, large))
    train(layer, optimizer, 0, 3)
    state = optimizer.state_dict()
    del state["state"][0]["row_step"]
    of_large.load_state_dict(state)
    assert "row_step" not in state["state"][0]
    steps = of_large.state[large.weight]["row_step"]
    assert steps[:70].tolist() == [3] * 70
    assert steps[70:].tolist() == [0 if "per row" in name else 3] * 20
