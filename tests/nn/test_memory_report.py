"""The memory report counts every tensor of a table, and of it what rows in use need."""

import copy

import pytest
import torch

import sparsekit

OPTIMIZERS = {
    "LazyAdam": 2 * 16 * 4,
    "Adam": 2 * 16 * 4 + 4,
    "PartialRowWiseAdam": 16 * 4 + 4,
    "Adagrad": 16 * 4,
    "RowWiseAdagrad": 4,
    "Ftrl": 2 * 16 * 4,
    "SGD": 0,
}


def trained(layer, optimizer, rows):
    layer(torch.arange(rows)).sum().backward()
    optimizer.step()
    return sparsekit.memory_report(layer).tables[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optimizers(name):
    layer = sparsekit.Embedding(1000, 16, name="users")
    report = trained(layer, getattr(sparsekit.optim, name)(layer.parameters()), 30)
    assert (report.name, report.rows, report.capacity) == ("users", 30, 1000)
    assert report.vectors == (30 * 64, 1000 * 64)
    states = [sum(sizes) for sizes in zip((0, 0), *report.states.values(), strict=True)]
    assert states == [30 * OPTIMIZERS[name], 1000 * OPTIMIZERS[name]]
    assert all(state.startswith(f"{name}.") for state in report.states)


def test_states_of_torchs_optimizers():
    layer = sparsekit.Embedding(1000, 4, name="users")
    report = trained(layer, torch.optim.SparseAdam([layer.weight]), 30)
    assert report.states == {
        "SparseAdam.exp_avg": (30 * 16, 16_000),
        "SparseAdam.exp_avg_sq": (30 * 16, 16_000),
    }
    layer = sparsekit.Embedding(1000, 4, name="users")
    report = trained(layer, torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9), 30)
    # A sparse momentum has an int64 row number and four floats for each row of the gradient.
    assert report.states == {"SGD.momentum_buffer": (30 * 24, 30 * 24)}


def test_two_optimizers_of_a_class():
    layer = sparsekit.Embedding(1000, 4, name="users")
    first = sparsekit.optim.Adagrad(layer.parameters())
    trained(layer, first, 30)
    report = trained(layer, sparsekit.optim.Adagrad(layer.parameters()), 30)
    assert report.states == {"Adagrad.sum": (2 * 30 * 16, 2 * 16_000)}


@pytest.mark.parametrize("sketch_bytes", [None, 4096])
def test_all_parts_are_in_the_total(sketch_bytes):
    layer = sparsekit.Embedding(
        1000, 16, on_full="evict", admission=sparsekit.MinCount(2, sketch_bytes=sketch_bytes)
    )
    layer(torch.arange(50))
    layer(torch.arange(20))
    (table,) = sparsekit.memory_report(layer).tables
    assert table.rows == len(layer.table) >= 20  # the sketch may take a key for an older one
    assert table.scores == (table.rows * 8, 1000 * 8)
    index = sum(tensor.nbytes for tensor in layer.table.tensors())
    assert table.index == (index, index)
    counts = layer.life.counts
    words = counts.words.nbytes
    if sketch_bytes is None:
        words += sum(tensor.nbytes for tensor in counts.index.tensors())
    assert table.waiting == (words, words) != (0, 0)
    parts = table.vectors, table.scores, table.index, table.waiting
    assert table.total == tuple(sum(sizes) for sizes in zip(*parts, strict=True))


def test_a_model_has_each_table_once():
    """Neither a group, nor a layer that a model has twice, is counted again."""
    users = sparsekit.Embedding(100, 4, name="users")
    rows = sparsekit.DistributedEmbedding("sum", 50, 4, 1, use_hashtable=False, name="rows")
    model = torch.nn.ModuleDict(
        {"a": users, "b": users, "group": sparsekit.EmbeddingGroup({"r": rows, "u": users})}
    )
    report = sparsekit.memory_report(model)
    assert [table.name for table in report.tables] == ["users", "rows"]
    assert report.tables[1].rows == 50
    assert report.tables[1].index == (0, 0)
    assert report.total == tuple(
        sum(sizes) for sizes in zip(*(table.total for table in report.tables), strict=True)
    )
    lines = str(report).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split()[:3] == ["rows", "50", "50"]


def test_it_changes_nothing():
    layer = sparsekit.Embedding(100, 4, name="users", on_full="evict")
    optimizer = sparsekit.optim.LazyAdam(layer.parameters())
    before = trained(layer, optimizer, 10)
    state = copy.deepcopy([layer.state_dict(), optimizer.state_dict()["state"]])
    assert sparsekit.memory_report(layer).tables[0] == before
    after = [layer.state_dict(), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, state, rtol=0, atol=0)


def test_layers_without_memory_and_models_without_tables():
    """A layer on meta reserves nothing yet, but says what it would; a dense model has no tables."""
    layer = sparsekit.Embedding(10**9, 64, name="users", device="meta")
    (table,) = sparsekit.memory_report(layer).tables
    assert table.rows == 0
    assert table.vectors == (0, 256 * 10**9)
    assert table.states == {}
    report = sparsekit.memory_report(torch.nn.Linear(2, 2))
    assert report.tables == ()
    assert report.total == (0, 0)
    assert str(report).splitlines()[-1].split() == ["all", "0", "B", "0", "B"]
