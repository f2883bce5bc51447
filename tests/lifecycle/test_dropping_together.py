"""A lookup drops the rows of several tables in one call, and earlier lookups follow."""

import pytest
import torch

import sparsekit
from sparsekit import optim
from sparsekit.lookup import drop_rows
from sparsekit.lookup.sweep import Sweep

NAMES = "a", "b"


@pytest.fixture(autouse=True)
def together(monkeypatch):
    """Let a table fail that is swept alone."""

    def refuse(*_):
        raise AssertionError("a table was swept alone")

    monkeypatch.setattr(drop_rows, "Sweep", refuse)


def new_group(**options):
    settings = {"on_full": "evict", "max_rows": 10, "seed": 1, "low_watermark": 0.5} | options
    layers = {
        name: sparsekit.DistributedEmbedding("sum", 40, 2, 1, name=name, **settings)
        for name in NAMES
    }
    return sparsekit.EmbeddingGroup(layers)


def look(group, **keys):
    """Return the sum of the vectors of each table's keys."""
    inputs = {
        name: (torch.tensor([*keys[name]], dtype=torch.int64), torch.tensor([0, len(keys[name])]))
        for name in NAMES
    }
    return group(inputs)


def keys_of(group):
    return [set(group.layers[name].table.keys().tolist()) for name in NAMES]


def old_and_retained(group):
    """Give both tables five old keys, then keys 0 to 4 by a lookup whose graph is retained."""
    look(group, a=range(20, 25), b=range(20, 25))["a"].sum().backward()
    outs = look(group, a=range(5), b=range(5))
    sum(out.sum() for out in outs.values()).backward(retain_graph=True)
    for parameter in group.parameters():
        parameter.grad = None
    return outs


def test_rows_that_have_moved_get_their_gradient_again():
    group = new_group()
    outs = old_and_retained(group)
    look(group, a=[40], b=[41])
    assert keys_of(group) == [{*range(5), 40}, {*range(5), 41}]
    sum(out.sum() for out in outs.values()).backward()
    for name in NAMES:
        weight, table = group.layers[name].weight, group.layers[name].table
        rows = weight.grad.coalesce().indices()[0]
        assert rows.tolist() == [0, 1, 2, 3, 5]  # all but one have moved
        assert set(table.keys()[rows].tolist()) == {*range(5)}


def test_a_lookup_that_has_lost_rows_names_their_table():
    group = new_group()
    outs = old_and_retained(group)
    look(group, a=[40], b=range(60, 66))  # b drops all but its new keys and the newest others
    assert keys_of(group)[0] == {*range(5), 40}
    assert keys_of(group)[1] < {*range(5), *range(60, 66)}
    with pytest.raises(RuntimeError, match=r"^b: the table has dropped keys of this backward's"):
        outs["a"].sum().backward()


def test_a_gradient_of_a_gradient_is_refused_once_rows_have_moved():
    group = new_group()
    look(group, a=range(20, 25), b=[])["a"].sum().backward()
    scale = torch.ones(1, requires_grad=True)
    weight = group.layers["a"].weight
    out = look(group, a=range(5), b=[])["a"] * scale
    (grad,) = torch.autograd.grad(out.square().sum(), [weight], create_graph=True)
    penalty = grad.to_dense().square().sum()
    weight.grad = None
    look(group, a=[40], b=[])
    with pytest.raises(RuntimeError, match=r"^a: the table has dropped keys since this gradient"):
        penalty.backward()


def test_versions_show_that_rows_have_moved():
    group = new_group()
    optimizer = optim.LazyAdam(group.parameters())
    weight = group.layers["a"].weight
    for keys in (range(20, 25), range(5)):
        look(group, a=keys, b=[])["a"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    tensors = [group.layers["a"].scores, *optimizer.state[weight].values()]
    moved = [tensor for tensor in tensors if tensor.shape[:1] == weight.shape[:1]]
    before = [tensor._version for tensor in moved]
    look(group, a=[40], b=[])
    assert len(moved) == 3
    assert all(x._version > then for x, then in zip(moved, before, strict=True))
    assert weight.noted_version == weight._version  # the library's own write


@pytest.fixture
def alone(monkeypatch):
    """Let tables be swept alone again."""
    monkeypatch.setattr(drop_rows, "Sweep", Sweep)


def test_states_that_are_refused_together_are_moved_table_by_table(alone):
    group = new_group()
    optimizer = torch.optim.Adagrad(group.parameters())
    rows = torch.arange(80.0).view(40, 2, 1).repeat(1, 1, 6).view(40, 2, 2, 3)
    for t, name in enumerate(NAMES):  # apart, but in one allocation, with rows of two dimensions
        optimizer.state[group.layers[name].weight]["sum"] = rows[:, t]
        group.layers[name].weight.is_stepped_by(optimizer)
    old_and_retained(group)
    look(group, a=[40], b=[41])
    assert keys_of(group) == [{*range(5), 40}, {*range(5), 41}]
    for t in range(2):
        assert rows[:, t, 0, 0][:6].tolist() == [2 * row + t for row in (6, 7, 8, 9, 10, 5)]
        assert not rows[6:11, t].any()


def test_a_state_whose_rows_cannot_move_leaves_all_tables_as_they_were(alone):
    group = new_group()
    optimizer = torch.optim.Adagrad(group.parameters())
    outs = old_and_retained(group)
    weight = group.layers["b"].weight
    optimizer.state[weight]["sum"] = torch.zeros(2, 40).T
    weight.is_stepped_by(optimizer)
    before = [group.layers[name].table.keys().tolist() for name in NAMES]
    with pytest.raises(ValueError, match=r"^b: its rows cannot be dropped, since .* \[40, 2\]"):
        look(group, a=[], b=[41])
    for name, keys in zip(NAMES, before, strict=True):
        assert group.layers[name].table.keys().tolist()[:10] == keys
    sum(out.sum() for out in outs.values()).backward()  # no row has moved


def test_a_table_in_use_by_another_thread_leaves_earlier_lookups_as_they_were(monkeypatch):
    group = new_group()
    outs = old_and_retained(group)

    def refuse(*_):
        raise RuntimeError("another thread is inserting into this table")

    monkeypatch.setattr(drop_rows, "_drop_lowest", refuse)
    with pytest.raises(RuntimeError, match="another thread"):
        look(group, a=[40], b=[41])
    sum(out.sum() for out in outs.values()).backward()


def test_counts_of_each_table():
    group = new_group()
    old_and_retained(group)
    look(group, a=[40], b=[])
    counts = [group.layers[name].row_counts() for name in NAMES]
    assert [(count.rows, count.evicted) for count in counts] == [(6, 5), (10, 0)]
