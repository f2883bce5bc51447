"""N ranks train the fallback rows of one rank, and admit the keys that it admits."""

import functools
import random

import pytest
import torch

import sparsekit
from sparsekit import Fallback, Feature, MinCount, Probability

from .pool import Ranks
from .test_faults import raised

STEPS, DIM, BUDGET, CAPACITY = 20, 4, 30, 80
TABLES = {
    "exact": {"admission": MinCount(3), "before_admission": Fallback(5)},
    "one row": {"admission": Probability(0.2), "before_admission": Fallback(1), "score": "lfu"},
    "evicts": {
        **{"admission": MinCount(3), "before_admission": Fallback(4), "ttl": 8},
        **{"on_full": "evict", "max_rows": BUDGET, "score": "lfu"},
    },
}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.close()


def batches():
    draw = random.Random(7)

    def bag(step, most):
        return [int(50 * draw.random() ** 2) + step for _ in range(draw.randint(0, most))]

    return [{name: [bag(step, 4) for _ in range(5)] for name in "xy"} for step in range(STEPS)]


def part(bags, rank, world_size):
    own = bags[rank::world_size]
    keys = torch.tensor([key for bag in own for key in bag], dtype=torch.int64)
    return keys, torch.tensor([0, *map(len, own)]).cumsum(0)


def trained(rank, world_size, table, strategy, prefetches, reads):
    """Train; return outputs, evaluation, vectors, the state of the rows in the end, and counts."""
    options = {"seed": 3, "dtype": torch.float64, "strategy": strategy}
    layers = {
        name: sparsekit.DistributedEmbedding("sum", CAPACITY, DIM, 1, name=name, **options, **own)
        for name, own in (("a", TABLES[table]), ("b", {}))
    }
    layer = layers["a"]
    features = {"x": "a", "y": Feature("a", "mean", insert=not reads), "z": "b"}
    group = sparsekit.EmbeddingGroup(layers, features)
    optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=0.01)
    inputs = [
        {"z": part(step["x"], rank, world_size)}
        | {name: part(step[name], rank, world_size) for name in "xy"}
        for step in batches()
    ]
    outputs = []
    for number, given in enumerate(inputs):
        out = group(given)
        if prefetches and number + 1 < STEPS:
            group.prefetch(inputs[number + 1])
        outputs += [out[name].detach() for name in features]
        loss = sum(
            (out[name] * torch.linspace(1, 2, DIM)).sum() * (i + 2)
            for i, name in enumerate(features)
        )
        (loss * world_size).backward()  # the gradient is the mean over ranks
        optimizer.step()
        optimizer.zero_grad()
    vectors = layer.vectors(torch.arange(90))
    group.eval()
    outputs += [out.detach() for out in group(inputs[0]).values()]
    size, states = len(layer.table), optimizer.state[layer.weight]
    rows = (
        layer.table.keys(),
        layer.weight.detach(),
        states["exp_avg"],
        states["exp_avg_sq"],
        layer.scores,
    )
    items = torch.cat([torch.empty(0, dtype=torch.int64), *(part.keys for part in layer.items())])
    counts = torch.tensor(layer.row_counts())
    return outputs, vectors, [tensor[:size].clone() for tensor in rows], items, counts


@functools.cache
def alone(table, reads):
    return trained(0, 1, table, "all_to_all", False, reads)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("table", "strategy", "prefetches", "reads"),
    [
        ("exact", "all_to_all", False, False),
        ("exact", "reduce_scatter", False, True),
        ("one row", "all_to_all", True, False),
        ("evicts", "all_to_all", True, True),
        ("evicts", "reduce_scatter", False, False),
    ],
)
def test_ranks_train_the_rows_of_one(ranks, table, strategy, prefetches, reads):
    n = ranks.world_size
    of_ranks = ranks(trained, n, table, strategy, prefetches, reads)
    outputs, vectors, (keys, *tensors), items, counts = alone(table, reads)
    for rank, found in enumerate(of_ranks):
        for ours, theirs in zip(found[0], outputs, strict=True):
            close(ours, theirs[rank::n])
        close(found[1], vectors)
    own, *parts = map(torch.cat, zip(*(found[2] for found in of_ranks), strict=True))
    order, of_one = own.argsort(), keys.argsort()
    assert torch.equal(own[order], keys[of_one])
    for ours, theirs in zip(parts, tensors, strict=True):
        close(ours[order], theirs[of_one])
    of_users = torch.cat([found[3] for found in of_ranks]).sort().values
    assert torch.equal(of_users, items.sort().values)
    assert torch.equal(sum(found[4] for found in of_ranks), counts)
    assert counts[2] > 10  # admitted


def admitted_after_prefetch(rank):
    layer = sparsekit.DistributedEmbedding("sum", 9, DIM, 1, name="a", **TABLES["exact"])
    group = sparsekit.EmbeddingGroup({"a": layer})
    inputs = {"a": (torch.tensor([3]), torch.tensor([0, 1]))}
    group.prefetch(inputs)
    layer((torch.tensor([3, 3, 3]), torch.tensor([0, 3])))
    return group(inputs)["a"].detach().view(1, -1), layer.vectors(torch.tensor([3]))


def test_a_prefetched_key_that_is_admitted_is_read(ranks):
    own = sparsekit.DistributedEmbedding("sum", 9, DIM, 1, name="a").vectors(torch.tensor([3]))
    for found in ranks(admitted_after_prefetch):
        assert all(torch.equal(vector, own) for vector in found)


def refused(rank, fault):
    layer = sparsekit.DistributedEmbedding("sum", 9, DIM, 1, name="a", **TABLES["exact"])
    group = sparsekit.EmbeddingGroup({"a": layer})
    good = {"a": (torch.tensor([rank]), torch.tensor([0, 1]))}
    bad = {
        "offsets": (torch.tensor([rank]), torch.tensor([0, 2])),
        "type": "no bags",
        "reserved": (torch.tensor([-(2**63)]), torch.tensor([0, 1])),
        "other": good["a"],
    }
    group.prefetch(good)
    try:
        group({"a": bad[fault]} if rank == 0 and fault == "other" else good)
        group({"a": bad[fault]} if rank == 0 else good)
    finally:
        assert not layer.life.counts.state()[:, 1].gt(2).any()
        group(good)  # the ranks are not out of step


@pytest.mark.parametrize("fault", ["offsets", "type", "reserved", "other"])
def test_an_error_of_one_rank_is_raised_on_all(ranks, fault):
    expected = {"other": ("ValueError", "inputs is not what"), "type": ("TypeError", "inputs must")}
    raised(ranks.outcomes(refused, fault), *expected.get(fault, ("ValueError", "a:")))


def full(rank):
    layer = sparsekit.DistributedEmbedding("sum", 9, DIM, 1, name="a", **TABLES["exact"])
    keys = torch.arange(200)
    own = keys[layer.owned(keys)] if rank == 1 else keys[:0]
    try:
        layer((own.repeat(3), torch.tensor([0, 3 * len(own)])))
    finally:
        layer((keys[:1], torch.tensor([0, 1])))


def test_a_full_rank_is_an_error_on_all(ranks):
    raised(ranks.outcomes(full), "TableFullError", "a: the table on rank 1 is full")
