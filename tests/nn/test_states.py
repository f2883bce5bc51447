"""Tests of states without a hash table, entries of the wrong kind, and writes to weights."""

import copy
import pickle

import pytest
import torch

from sparsekit import Embedding
from sparsekit.nn import Constant, EmbeddingWeight
from sparsekit.tables.weight import count_own_writes, free_rows_hold, own_writes

T = torch.tensor
both = pytest.mark.parametrize("assign", [False, True])


def filled(rows=9, **settings):
    layer = Embedding(rows, 2, name="n", **settings)
    layer.assign(torch.arange(4), torch.arange(8.0).view(4, 2) + 1)
    return layer


@both
def test_a_layer_without_a_hash_table_loads(assign):
    saved = filled(use_hashtable=False, seed=1)
    layer = Embedding(9, 2, use_hashtable=False, seed=2, name="n")
    layer.load_state_dict(saved.state_dict(), assign=assign)
    assert torch.equal(layer.weight, saved.weight)
    assert int(layer.seed) == 1
    assert layer.weight.requires_grad
    layer(T([8])).sum().backward()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", [1.0], r"n: weight in the state must be a tensor, got \[1.0\]"),
        ("weight", torch.ones(9, 2).long(), "n: weight .* must be float32 or .*torch.int64"),
        ("weight", torch.ones(9), r"n: weight in the state must have shape \[any, 2\], got \[9\]"),
        ("weight", torch.ones(9, 2).to_sparse(), "n: weight in the state must be a dense tensor"),
        ("weight", torch.ones(9, 2, device="meta"), "n: weight .* dense tensor on cpu or cuda"),
        ("seed", T([1, 2]), r"n: seed in the state must have shape \[1\], got \[2\]"),
        ("seed", T([1.0]), "n: seed in the state must be int64, got torch.float32"),
        ("shard", T([1, 2]), "n: the state is that of rank 1 of 2, .* to rank 0 of 1"),
        ("shard", T([0, 2]), "n: the state is that of rank 0 of 2"),
        ("shard", T([1, 1]), "n: the state is that of rank 1 of 1"),
        ("owners", torch.zeros(65536).short(), "n: the state has owners, though it is that of one"),
        ("table.size", T([10]), r"n: the state has 10 rows in use, which must be in \[0, 9\]"),
        ("table.size", T([-1]), "n: the state has -1 rows in use"),
        ("table.size", T([5]), "n: the state is damaged"),
        (
            "weight",
            torch.ones(3, 2),
            "n: the state is damaged: 4 rows are in use, but weight has 3",
        ),
    ],
)
@both
def test_entries_that_do_not_fit_change_nothing(name, value, message, assign):
    layer, state = filled(), {**filled().state_dict(), name: value}
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state, assign=assign)
    now = layer.state_dict()
    assert all(torch.equal(now[key], before[key]) for key in before)
    assert now.keys() == before.keys()


def test_a_state_of_torch_names_what_to_do():
    with pytest.raises(
        RuntimeError, match=r"n: the state has no seed, only weight, as that of a t"
    ):
        filled().load_state_dict({"weight": torch.ones(9, 2)})
    state = filled().state_dict()
    del state["shard"]  # as older versions saved it
    filled().load_state_dict(state)
    del state["seed"]
    with pytest.raises(RuntimeError, match="n: the state has no seed, only weight, table"):
        filled().load_state_dict(state)


@both
@pytest.mark.parametrize("rows", [4, 20])
def test_rows_beyond_the_state_are_free(rows, assign):
    layer = filled(9)
    layer.assign(torch.arange(10, 15), torch.ones(5, 2))
    layer.load_state_dict(filled(rows).state_dict(), assign=assign)
    assert layer.weight.shape == (9, 2)
    assert not layer.weight[4:].any()
    assert layer.table.keys().tolist() == layer.weight.keys().tolist() == [0, 1, 2, 3]
    assert not layer.weight.written()
    assert layer(T([99])).shape == (1, 2)


def test_a_layer_on_meta_takes_a_state_by_assignment_only():
    layer, saved = Embedding(9, 2, device="meta", name="n"), filled()
    with pytest.raises(
        RuntimeError, match=r"n: the module is on meta, .* load it with assign=True"
    ):
        layer.load_state_dict(saved.state_dict())
    layer.load_state_dict(saved.state_dict(), assign=True)
    assert torch.equal(layer.vectors(T([0, 3])), saved.vectors(T([0, 3])))


def test_copies_of_weights_keep_their_marks():
    layer = filled()
    layer.weight.requires_grad_(False)
    layer.weight.moved = True
    with torch.no_grad():
        layer.weight.mul_(2)
    assert layer.weight.written()
    copied = copy.deepcopy(layer.weight)
    assert (copied.moved, copied.written(), copied.requires_grad) == (True, True, False)
    loaded = pickle.loads(pickle.dumps(layer.weight))
    assert type(loaded) is EmbeddingWeight
    assert not loaded.requires_grad
    assert not copy.deepcopy(filled().weight).written()


def test_weights_catch_up_before_they_are_copied():
    weight, calls = filled().weight, []
    weight.before_read = lambda weight, rows: calls.append(rows)
    copy.deepcopy(weight)
    pickle.dumps(weight)
    weight.catch_up()
    weight.note_keys()
    assert calls == [None] * 4
    filled().weight.catch_up()


def test_own_writes_are_told_from_others():
    weight, plain = filled().weight, torch.nn.Parameter(torch.ones(2))
    with own_writes([weight, plain]), torch.no_grad():
        weight.add_(1)
    assert not weight.written()
    with torch.no_grad():
        weight.add_(1)
    with own_writes([weight]), torch.no_grad():
        weight.add_(1)
    assert weight.written()  # the earlier write still counts
    weight.note_version()
    with torch.no_grad():
        weight.add_(1)
    count_own_writes([weight, plain])
    assert not weight.written()
    with own_writes([weight]):
        count_own_writes([weight])  # has no effect inside a block of own_writes


@pytest.mark.parametrize(("rows", "place", "found"), [(9, 4, True), (9, 8, True), (9, 3, False)])
def test_free_rows_that_hold_a_value(rows, place, found):
    weight = torch.zeros(rows, 2)
    weight[place, 1] = 1
    assert free_rows_hold(weight, 4) == found
    assert not free_rows_hold(weight, rows)
    large = torch.zeros(4 + 64 * 100, 2)
    large[4 + 6300] = 1  # not among the first free rows, but in the second sample of rows
    assert free_rows_hold(large, 4)
    large.zero_()[4 + 63] = 1
    assert free_rows_hold(large, 4)


def test_zeros_written_over_keys_are_refused_unless_keys_start_from_zero():
    for initializer in (None, Constant(0.0)):
        layer = filled(embedding_initializer=initializer)
        with torch.no_grad():
            layer.weight.zero_()
        if initializer is None:
            with pytest.raises(RuntimeError, match=r"n: weight was written to as zeros, rows"):
                layer(T([7]))
            layer.weight.moved = True
        assert layer(T([7])).shape == (1, 2)
    layer = filled()
    with torch.no_grad():
        layer.weight[:3].zero_()
    layer(T([7]))  # one row still has a vector


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_torch_swaps_is_as_frozen_as_before(frozen):
    layer, saved = Embedding(9, 2, name="n").requires_grad_(not frozen), filled()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(saved.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert type(layer.weight) is EmbeddingWeight
    assert layer.weight.requires_grad != frozen
    assert torch.equal(layer.weight, saved.weight)


def test_entries_of_nothing_are_unexpected():
    layer = filled()
    state = {**layer.state_dict(), "tables": T([1])}
    found = layer.load_state_dict(state, strict=False)
    assert found.unexpected_keys == ["tables"]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "tables"'):
        layer.load_state_dict(state)
