"""A new key in a row that a load or a reset freed starts with a fresh optimizer state."""

import copy

import pytest
import torch
from interruptions import interrupt

import sparsekit
from sparsekit import checkpoint, optim

from .restores import make_any


def table(name="t", **options):
    return sparsekit.Embedding(100, 2, name=name, dtype=torch.float64, **options)


def train(layer, optimizer, keys, factor=1.0):
    optimizer.zero_grad()
    (layer(torch.tensor(keys)) * factor).sum().backward()
    optimizer.step()


def loaded_by_checkpoint(layer, state, folder):
    other = table()
    other.load_state_dict(state)
    checkpoint.save(other, folder)
    checkpoint.load(layer, folder)


WAYS = {
    "load_state_dict": lambda layer, state, folder: layer.load_state_dict(state),
    "checkpoint.load": loaded_by_checkpoint,
    "table alone": lambda layer, state, folder: layer.table.load_state_dict(
        {n[6:]: v for n, v in state.items() if n.startswith("table.")}
    ),
    "reset_parameters": lambda layer, state, folder: layer.reset_parameters(),
    "clear_": lambda layer, state, folder: layer.table.clear_(),
    "to_empty": lambda layer, state, folder: (
        layer.to_empty(device="cpu"),
        layer.reset_parameters(),
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [optim.Adagrad, torch.optim.Adagrad])
def test_a_new_key_in_the_row_of_a_dropped_one(kind, way, fused, tmp_path):
    layer = table()
    optimizers = [kind(layer.parameters(), lr=0.1), kind(layer.parameters(), lr=0.1)]
    if fused and kind in vars(optim).values():
        optim.fuse_in_backward(optimizers[0], layer)
    train(layer, optimizers[0], [1, 2])
    best = copy.deepcopy(layer.state_dict())
    for optimizer in optimizers if not fused else optimizers[:1]:
        train(layer, optimizer, [1, 2, 3, 4], 1000.0)
    WAYS[way](layer, best, tmp_path / "best")
    before = layer.vectors(torch.tensor([9, 10]))
    for optimizer in optimizers if not fused else optimizers[:1]:
        train(layer, optimizer, [9, 10])
        after = layer.vectors(torch.tensor([9, 10]))
        assert torch.allclose(before - after, torch.tensor(0.1).double())
        before = after


@pytest.mark.parametrize("kind", [optim.Adagrad, torch.optim.Adagrad])
def test_states_of_dropped_keys_go_back_to_their_initial_value(kind):
    layer = table()
    optimizer = kind(layer.parameters(), lr=0.1, initial_accumulator_value=0.5)
    train(layer, optimizer, [1, 2])
    layer.reset_parameters()
    train(layer, optimizer, [9])
    assert optimizer.state[layer.weight]["sum"][:3, 0].tolist() == [1.5, 0.5, 0.5]


@pytest.mark.parametrize("copied", ["nothing", "layer", "both"])
def test_states_follow_keys_to_other_rows(copied):
    layer, other = table(), table()
    layer = copy.deepcopy(layer) if copied == "layer" else layer
    groups = [table().weight], [table().weight, layer.weight]
    optimizer = optim.Adagrad([{"params": group} for group in groups], lr=0.1)
    if copied == "both":
        layer, optimizer = copy.deepcopy((layer, optimizer))
    train(layer, optimizer, [1, 2, 3], 1000.0)
    other(torch.tensor([7, 3, 1]))
    layer.load_state_dict(other.state_dict())
    sums = optimizer.state[layer.weight]["sum"]
    assert sums[:4, 0].tolist() == [0, 1e6, 1e6, 0]
    assert sums.stride() == torch.empty(100, 2).stride()


@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "torch Adagrad", "torch SGD momentum"])
def test_an_interrupted_load_leaves_states_with_their_keys(name):
    moment, ended = 0, None
    while ended is None:
        layer, other = table(), table()
        if name == "torch SGD momentum":
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = make_any(name, layer.parameters())
        train(layer, optimizer, [1, 2, 3], torch.tensor([[10.0], [20.0], [30.0]]))
        other(torch.tensor([3, 7, 1]))
        (state,) = (s for n, s in optimizer.state[layer.weight].items() if n in STATES)
        before = dict(zip([1, 2, 3], state.to_dense()[:3].clone(), strict=True))
        moment += 23
        ended = interrupt(lambda: layer.load_state_dict(other.state_dict()), moment)  # noqa: B023
        layer.weight.grad = torch.zeros(100, 2).double().to_sparse(1)
        optimizer.step()
        optimizer.state_dict()  # late rows catch up
        (state,) = (s for n, s in optimizer.state[layer.weight].items() if n in STATES)
        for key, row in zip(layer.table.keys().tolist(), state.to_dense(), strict=False):
            expected = before.get(key, torch.zeros(2).double())
            decay = {"Adam": 0.9, "torch SGD momentum": 0.9}.get(name, 1)
            if name == "torch Adagrad":
                expected = expected if key in before else torch.full((2,), 0.2).double()
            assert torch.allclose(row, expected * decay), (moment, key)


STATES = ("exp_avg", "sum", "momentum_buffer")


def test_states_of_a_table_tell_their_keys():
    layer = table()
    optimizer = optim.LazyAdam(layer.parameters())
    train(layer, optimizer, [5, -6])
    saved = optimizer.state_dict()
    assert saved["state"][0]["keys"].tolist() == [5, -6]
    assert "keys" not in optimizer.state[layer.weight]
    twice = copy.deepcopy(saved)
    twice["state"][0]["keys"][1] = 5
    with pytest.raises(ValueError, match=r"LazyAdam: .* damaged: keys has one of them twice"):
        optimizer.load_state_dict(twice)
    # Load the state into an optimizer whose table has these keys in other rows.
    other = table()
    other(torch.tensor([-6, 8, 5]))
    of_other = optim.LazyAdam(other.parameters())
    of_other.load_state_dict(saved)
    assert of_other.state_dict()["state"][0]["keys"].tolist() == [5, -6]
    train(other, of_other, [8], 0.0)
    moments = of_other.state[other.weight]["exp_avg"][:3, 0].tolist()
    assert moments[1] == 0
    assert moments[0] == moments[2] != 0


@pytest.mark.parametrize("fused", [False, True])
def test_states_of_all_tables_tell_their_keys_and_follow_them(fused):
    def three(keys):
        layers = {name: table(name) for name in "abc"}
        for i, layer in enumerate(layers.values()):
            layer(torch.tensor(keys) + i)
        groups = [layers["a"].weight], [layers["b"].weight, layers["c"].weight]
        optimizer = optim.Adagrad([{"params": group} for group in groups], lr=0.1)
        if fused:
            optim.fuse_in_backward(optimizer, torch.nn.ModuleList(layers.values()))
        return layers, optimizer

    def step(layers, optimizer, key, factor):
        keys = {name: torch.tensor([key + i]) for i, name in enumerate(layers)}
        found = sparsekit.EmbeddingGroup(layers)(keys)
        (sum(found.values()) * factor).sum().backward()
        optimizer.step()

    (layers, optimizer), (others, of_others) = three([5, -6]), three([-6, 8, 5])
    step(layers, optimizer, 5, 3.0)
    state = optimizer.state_dict()
    assert [state["state"][i]["keys"].tolist() for i in range(3)] == [
        [5 + i, i - 6] for i in range(3)
    ]
    of_others.load_state_dict(state)
    step(others, of_others, 8, 2.0)
    for layer in others.values():
        assert of_others.state[layer.weight]["sum"][:4, 0].tolist() == [0, 4, 9, 0]


def test_steps_do_not_add_up_hooks_of_torchs_optimizers():
    layer = table()
    optimizer = torch.optim.Adagrad(layer.parameters())
    for _ in range(3):
        train(layer, optimizer, [1])
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


def test_a_state_without_keys_waits_for_the_model():
    """A torch optimizer's state has no keys: its rows match the rows of the model's saved state."""
    layer, other = table(), table()
    optimizer = optim.Adagrad(layer.parameters(), lr=0.1)
    train(layer, optimizer, [5, -6])
    saved = optimizer.state_dict()
    del saved["state"][0]["keys"]
    of_other = optim.Adagrad(other.parameters(), lr=0.1)
    of_other.load_state_dict(saved)
    other.load_state_dict(layer.state_dict())
    assert of_other.state[other.weight]["sum"][:3, 0].tolist() == [1, 1, 0]
    assert of_other.state_dict()["state"][0]["keys"].tolist() == [5, -6]


def test_a_parameter_whose_state_is_empty_starts_anew():
    """Merely reading ``optimizer.state`` creates an empty state; it is loaded as a fresh one."""
    layer, other = table(), table()
    optimizer = optim.Adagrad(layer.parameters())
    assert optimizer.state[layer.weight] == {}
    of_other = optim.Adagrad(other.parameters())
    of_other.load_state_dict(optimizer.state_dict())
    train(other, of_other, [1])
    assert of_other.state[other.weight]["step"] == 1


def test_a_state_of_more_keys_than_there_are_rows_now():
    layer = table()
    optimizer = optim.Adagrad(layer.parameters(), lr=0.1)
    train(layer, optimizer, [1, 2])
    layer(torch.arange(3, 9))
    small = sparsekit.Embedding(5, 2, name="t", dtype=torch.float64)
    small(torch.tensor([8, 2]))
    of_small = optim.Adagrad(small.parameters(), lr=0.1)
    of_small.load_state_dict(optimizer.state_dict())
    train(small, of_small, [8], 2.0)
    assert of_small.state[small.weight]["sum"][:3, 0].tolist() == [4, 1, 0]


@pytest.mark.parametrize(
    ("name", "steps"), [("Adam", [3] * 100), ("LazyAdam per row", [3] + [0] * 99)]
)
def test_a_new_key_has_made_all_steps_or_none(name, steps):
    layer, other = table(), table()
    optimizer = make_any(name, layer.parameters())
    for _ in range(3):
        train(layer, optimizer, [1, 2])
    other(torch.tensor([2, 7]))
    layer.load_state_dict(other.state_dict())
    (state,) = optimizer.state_dict()["state"].values()
    assert state["row_step"].tolist() == steps
