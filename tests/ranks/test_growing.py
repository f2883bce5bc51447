"""On several ranks, tables that grow, each rank by itself, train like large ones."""

import pytest
import torch
from optim.cases import make

import sparsekit
from sparsekit import checkpoint
from sparsekit.optim import fuse_in_backward
from sparsekit.tables import growth

ROOM = 1 << 20


def layers_of(grows, strategy):
    def layer(name, dim):
        rows = {"on_full": "grow", "max_capacity": ROOM} if grows else {}
        return sparsekit.DistributedEmbedding(
            "sum", 3 if grows else 3000, dim, 1, name=name, strategy=strategy, ttl=30,
            dtype=torch.float64, **rows,
        )  # fmt: skip

    return torch.nn.ModuleDict({"a": layer("a", 3), "b": layer("b", 4)})


def bags(rank, step):
    """Return bags whose keys nobody had before, and some that all ranks have; rank 1 has more."""
    first = 1000 * rank + 17 * step
    keys = [step, step + 1, *range(first, first + (9 if rank else 3))]
    return torch.tensor(keys), torch.tensor([0, 2, 2, len(keys)])


def train(group, optimizer, rank, steps):
    for step in steps:
        inputs = {name: bags(rank, step + 3 * i) for i, name in enumerate("ab")}
        if step % 3 == 0:
            group.prefetch(inputs)
        outputs = group(inputs)
        sum(out.square().sum() for out in outputs.values()).backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(layers, optimizer):
    """Return keys, vectors, scores and states of each layer, and the capacity of its index."""
    found = {}
    for name, layer in layers.items():
        layer.catch_up()
        rows = len(layer.table)
        states = {
            state: value[:rows]
            for state, value in optimizer.state[layer.weight].items()
            if value.dim() and not value.is_sparse and len(value) >= rows
        }
        own = layer.table.keys(), layer.weight[:rows].detach(), layer.scores[:rows]
        found[name] = *own, states, layer.table.capacity
    return found


def trained(rank, grows, name, strategy, fused, folder=None):
    """Train, and go on after a checkpoint with other layers; return what there is then."""
    growth._STEPWISE, growth._LEAST_BUCKETS = 16, 4
    layers = layers_of(grows, strategy)
    group, optimizer = sparsekit.EmbeddingGroup(layers), make(name, layers.parameters())
    if fused:
        fuse_in_backward(optimizer, layers)
    train(group, optimizer, rank, range(20))
    if folder is not None:
        checkpoint.save(layers, folder, optimizer)
        layers = layers_of(grows, strategy)
        group, optimizer = sparsekit.EmbeddingGroup(layers), make(name, layers.parameters())
        checkpoint.load(layers, folder, optimizer)
    train(group, optimizer, rank, range(20, 30))
    return contents(layers, optimizer)


@pytest.mark.pairs
@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
@pytest.mark.parametrize(
    ("name", "fused"),
    [(name, False) for name in ("SGD momentum", "Adam", "RowWiseAdagrad")]
    + [(name, fused) for name in ("LazyAdam", "Adagrad") for fused in (False, True)],
)
def test_training_is_that_of_large_tables(ranks, name, fused, strategy):
    grown, large = (ranks(trained, grows, name, strategy, fused) for grows in (True, False))
    capacities = set()
    for one, other in zip(grown, large, strict=True):
        for layer in "ab":
            *own, states, capacity = one[layer]
            *theirs, expected, _ = other[layer]
            capacities.add(capacity)
            for value, wanted in zip(own, theirs, strict=True):
                assert torch.equal(value, wanted)
            assert states.keys() == expected.keys()
            for state, value in states.items():
                assert torch.equal(value, expected[state]), state
    assert min(capacities) >= 48
    assert max(capacities) < 3000


@pytest.mark.parametrize("name", ["LazyAdam", "Adagrad", "Adam"])
def test_going_on_from_a_checkpoint(two_ranks, name, tmp_path):
    through_files = two_ranks(trained, True, name, "auto", False, tmp_path / "saved")
    straight = two_ranks(trained, True, name, "auto", False)
    for one, other in zip(through_files, straight, strict=True):
        for layer in "ab":
            for value, wanted in zip(one[layer][:3], other[layer][:3], strict=True):
                assert torch.equal(value, wanted)


def loaded_elsewhere(rank, folder, grows):
    growth._STEPWISE, growth._LEAST_BUCKETS = 16, 4
    layers = layers_of(grows, "auto")
    checkpoint.load(layers, folder)
    vectors = layers["a"].vectors(torch.arange(600))
    layers["a"](bags(rank, 50))
    return vectors, len(layers["a"].table), layers["a"].table.capacity


def test_another_number_of_ranks(ranks, tmp_path):
    growth_before = growth._STEPWISE, growth._LEAST_BUCKETS
    try:
        trained(0, True, "LazyAdam", "auto", False, tmp_path / "saved")
        expected, _, _ = loaded_elsewhere(0, tmp_path / "saved", False)
    finally:
        growth._STEPWISE, growth._LEAST_BUCKETS = growth_before
    for vectors, rows, capacity in ranks(loaded_elsewhere, tmp_path / "saved", True):
        assert torch.equal(vectors, expected)
        assert rows <= capacity <= 4 * rows


def full(rank):
    layer = sparsekit.DistributedEmbedding(
        "sum", 2, 3, 1, name="t", on_full="grow", max_capacity=20 if rank else 200
    )
    layer(bags(rank, 0))
    with pytest.raises(sparsekit.TableFullError, match=r"^t: .*the table on rank 1 is full"):
        layer((torch.arange(100), torch.tensor([0, 100])))
    return len(layer.table), layer.table.capacity


def test_a_rank_that_cannot_grow_any_more(two_ranks):
    (_, large), (rows, small) = two_ranks(full)
    assert rows <= small <= 20 < large
