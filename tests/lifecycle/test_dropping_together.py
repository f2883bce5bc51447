"""A lookup drops the rows of several tables in one call, and earlier lookups follow."""

import pytest
import torch

import sparsekit
from sparsekit import optim
from sparsekit.lookup import drop_rows

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


def test_counts_of_each_table():
    group = new_group()
    old_and_retained(group)
    look(group, a=[40], b=[])
    counts = [group.layers[name].row_counts() for name in NAMES]
    assert [(count.rows, count.evicted) for count in counts] == [(6, 5), (10, 0)]
