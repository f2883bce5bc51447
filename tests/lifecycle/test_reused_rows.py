"""A row that a dropped key has left gives its next key nothing: no vector, state, score or mark."""

import copy

import pytest
import torch
from optim.cases import OPTIMIZERS, make

import sparsekit
from sparsekit import checkpoint
from sparsekit.optim import fuse_in_backward

BUDGET, SPARE = 12, 4
OF_TORCH = {
    "torch SparseAdam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
    "torch Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "torch SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}
CASES = [*((name, fused) for name in OPTIMIZERS for fused in (False, True))]
CASES += [(name, False) for name in OF_TORCH]


def layer_of(rows, **options):
    return sparsekit.DistributedEmbedding("sum", rows, 4, 1, 40, seed=1, name="a", **options)


def evicting(**options):
    return layer_of(BUDGET + SPARE, **({"on_full": "evict", "max_rows": BUDGET} | options))


def optimizer_of(name, layer, fused=False):
    if name in OF_TORCH:
        return OF_TORCH[name](layer.parameters())
    optimizer = make(name, layer.parameters())
    if fused:
        fuse_in_backward(optimizer, layer)
    return optimizer


def batches(steps=30):
    """Return the keys of each step: each key comes in a few steps in a row and never again."""
    return [
        torch.tensor([[[*range(2 * step, 2 * step + 7), 2 * step + 3]]]) for step in range(steps)
    ]


def step(layer, optimizer, keys):
    out = layer(keys)
    (out * torch.linspace(0.5, 2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(layer, optimizer):
    """Return the states that have a row for each of the table's rows, by name."""
    of_rows = {}
    for name, state in optimizer.state[layer.weight].items():
        if isinstance(state, torch.Tensor) and state.shape[:1] == layer.weight.shape[:1]:
            of_rows[name] = state.to_dense()
    return of_rows


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_keys_in_reused_rows_train_as_in_a_table_that_never_fills(name, fused):
    small, large = evicting(), layer_of(200)
    optimizers = [optimizer_of(name, layer, fused) for layer in (small, large)]
    for keys in batches():
        for layer, optimizer in zip((small, large), optimizers, strict=True):
            step(layer, optimizer, keys)
        kept = small.table.keys()
        assert torch.equal(small.vectors(kept), large.vectors(kept))
    assert small.life.evicted >= 50
    for layer in (small, large):
        layer.catch_up()
    ours, theirs = (states_of(*each) for each in zip((small, large), optimizers, strict=True))
    rows = small.table.find(kept), large.table.find(kept)
    assert ours.keys() == theirs.keys()
    for state in ours:
        assert torch.equal(ours[state][rows[0]], theirs[state][rows[1]]), state


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_free_rows_are_as_before_their_first_key(name, fused):
    layer = evicting()
    optimizer = optimizer_of(name, layer, fused)
    for keys in batches(4):
        step(layer, optimizer, keys)
    states = states_of(layer, optimizer)
    # The states of a row that has never had a key: those of a row behind all that were in use.
    first = {state: tensor[-1].clone() for state, tensor in states.items() if state != "row_step"}
    layer.evict(keep=3)
    assert len(layer.table) == 3
    for state, tensor in states_of(layer, optimizer).items():
        if state in first:
            assert torch.equal(tensor[3:], first[state].expand_as(tensor[3:])), state
    assert not layer.weight[3:].any()
    assert not layer.scores[3:].any()


def test_an_adam_row_that_is_late_takes_no_step_of_its_last_key():
    """Steps that a row has missed belong to its last key; the next one moves when it is touched."""
    layer = evicting()
    optimizer = sparsekit.optim.Adam(layer.parameters(), lr=0.1)
    step(layer, optimizer, torch.arange(10).view(1, 1, 10))
    for _ in range(5):
        step(layer, optimizer, torch.tensor([[[0, 1]]]))  # rows 2 to 9 miss these steps
    assert layer.evict(keep=2) == 8
    with torch.no_grad():
        layer(torch.arange(20, 28).view(1, 1, 8))
    for _ in range(3):
        step(layer, optimizer, torch.tensor([[[0, 1]]]))
    fresh = layer_of(8).vectors(torch.arange(20, 28))
    assert torch.equal(layer.vectors(torch.arange(20, 28)), fresh)
    states = states_of(layer, optimizer)
    rows = layer.table.find(torch.arange(20, 28))
    for state in ("exp_avg", "exp_avg_sq"):
        assert not states[state][rows].any()


@pytest.mark.parametrize("score", [sparsekit.LFU(0), sparsekit.LFU(5), "lru"])
def test_a_score_starts_anew(score):
    layer = evicting(score=score)
    for _ in range(9):
        layer(torch.tensor([[[1, 1, 2]]]))
    assert layer.evict(keep=0) == 2
    layer(torch.tensor([[[7, 8, 8]]]))
    words = {7: 1 << 32 | 10, 8: 2 << 32 | 10} if score != "lru" else {7: 10, 8: 10}
    keys = layer.table.keys().tolist()
    assert layer.scores[:2].tolist() == [words[key] for key in keys]


def test_a_key_that_comes_back_is_new():
    layer = evicting()
    optimizer = optimizer_of("LazyAdam", layer)
    for keys in batches(3):
        step(layer, optimizer, keys)
    layer.evict(keep=0)
    assert torch.equal(layer.vectors(torch.arange(9)), layer_of(9).vectors(torch.arange(9)))
    layer(torch.arange(9).view(1, 1, 9))
    assert torch.equal(layer.vectors(torch.arange(9)), layer_of(9).vectors(torch.arange(9)))
    for state in states_of(layer, optimizer).values():
        assert not state.any()


def test_an_incremental_checkpoint_has_the_new_keys_of_reused_rows(tmp_path):
    layer = evicting()
    model = torch.nn.ModuleDict({"a": layer})
    optimizer = optimizer_of("LazyAdam", layer)
    checkpoints = checkpoint.Checkpoints(tmp_path, complete_every=10)
    for number, keys in enumerate(batches(8)):
        step(layer, optimizer, keys)
        checkpoints.save(number, model, optimizer)
        loaded = torch.nn.ModuleDict({"a": evicting()})
        other = optimizer_of("LazyAdam", loaded["a"])
        checkpoint.load(loaded, checkpoints.latest(), other)
        every = layer.table.keys()
        assert set(loaded["a"].table.keys().tolist()) == set(every.tolist())
        assert torch.equal(loaded["a"].vectors(every), layer.vectors(every))
        rows = layer.table.find(every), loaded["a"].table.find(every)
        ours, theirs = states_of(layer, optimizer), states_of(loaded["a"], other)
        for state in ours:
            assert torch.equal(ours[state][rows[0]], theirs[state][rows[1]])
    assert layer.life.evicted > 8


def test_memory_of_dropped_rows_is_overwritten():
    layer = evicting()
    optimizer = optimizer_of("LazyAdam", layer)
    for keys in batches(4):
        step(layer, optimizer, keys)
    tensors = [layer.weight, *states_of(layer, optimizer).values()]
    before = [copy.deepcopy(tensor.detach()) for tensor in tensors]
    rows = layer.table.find(layer.table.keys())
    layer.evict(keep=0)
    for tensor, old in zip(tensors, before, strict=True):
        for row in old[rows]:
            assert not (tensor.detach() == row).all(1).any()
