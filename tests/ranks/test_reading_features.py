"""With features that insert nothing, N ranks insert, drop, count and train what one rank does."""

import functools
import random

import pytest
import torch

import sparsekit
from sparsekit import LFU, Feature, MinCount

from .pool import Ranks

STEPS, DIM, BUDGET, CAPACITY = 20, 4, 30, 100


def remainder(keys):
    return keys % 5


TABLES = {
    "plain": {},
    "lru": {"score": "lru", "on_full": "evict", "max_rows": BUDGET},
    "lfu": {"score": LFU(6), "on_full": "evict", "max_rows": BUDGET, "ttl": 9},
    "function": {"score": remainder, "on_full": "evict", "max_rows": BUDGET, "ttl": 9},
    "admission": {"admission": MinCount(3), "on_full": "evict", "max_rows": BUDGET},
    "padding": {"padding_key": 2, "score": "lfu"},
}
STRATEGIES = ["all_to_all", "reduce_scatter"]
COMBINERS = {"x": "sum", "y": "mean", "z": "sqrtn"}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.close()


def batches():
    """Return the bags of each feature in each step."""
    draw = random.Random(7)

    def bag(step, most):
        return [int(50 * draw.random() ** 2) + step // 2 for _ in range(draw.randint(0, most))]

    return [
        {name: [bag(step, 2 + i) for _ in range(5)] for i, name in enumerate(COMBINERS)}
        for step in range(STEPS)
    ]


def part(bags, rank, world_size):
    own = bags[rank::world_size]
    keys = torch.tensor([key for bag in own for key in bag], dtype=torch.int64)
    return keys, torch.tensor([0, *map(len, own)]).cumsum(0)


def trained(rank, world_size, table, strategy, way):
    """Train; return outputs, and keys, vectors, scores and states in the end, and counts."""
    layers = {
        name: sparsekit.DistributedEmbedding(
            *("sum", CAPACITY, DIM, 1),
            seed=3,
            name=name,
            dtype=torch.float64,
            strategy=strategy,
            **options,
        )
        for name, options in (("a", TABLES[table]), ("b", {}))
    }
    layer = layers["a"]
    features = {
        "x": "a",
        "y": Feature("a", "mean", insert=False),
        "z": Feature("b", "sqrtn", insert=False),
        "u": "b",
    }
    features["v"] = Feature("a", None if way == "unpooled" else "sum", insert=False)
    group = sparsekit.EmbeddingGroup(layers, features)
    optimizer = sparsekit.optim.LazyAdam(group.parameters(), lr=0.01)
    if way == "fused":
        sparsekit.optim.fuse_in_backward(optimizer, group)
    inputs = [
        {
            name: part(of_step[{"u": "x", "v": "y"}.get(name, name)], rank, world_size)
            for name in features
        }
        for of_step in batches()
    ]
    outputs = []
    for number, given in enumerate(inputs):
        out = group(given)
        if way == "prefetch" and number + 1 < STEPS:
            group.prefetch(inputs[number + 1])
        values = [one.values() if one.is_nested else one for one in out.values()]
        outputs += [one.detach() for one in values]
        loss = sum(
            (one * torch.linspace(1, 2, DIM)).sum() * (2 + i) for i, one in enumerate(values)
        )
        (loss * world_size).backward()  # the gradient is the mean over ranks
        optimizer.step()
        optimizer.zero_grad()
    ends = []
    for one in layers.values():
        size, states = len(one.table), optimizer.state[one.weight]
        tensors = [one.table.keys(), one.weight.detach(), states["exp_avg"], states["exp_avg_sq"]]
        tensors += [] if one.scores is None else [one.scores]
        ends.append([tensor[:size].clone() for tensor in tensors])
    counts = layer.row_counts() if layer.life is not None else ()
    return outputs, ends, torch.tensor(counts)


@functools.cache
def alone(table, way):
    return trained(0, 1, table, "all_to_all", way)


@pytest.mark.pairs
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("table", "way"),
    [
        *((table, "plain") for table in TABLES),
        *(("lfu", "prefetch"), ("lfu", "fused"), ("admission", "unpooled")),
    ],
)
def test_ranks_do_what_one_rank_does(ranks, table, strategy, way):
    if way == "unpooled" and strategy == "reduce_scatter":
        return
    of_ranks = ranks(trained, ranks.world_size, table, strategy, way)
    outputs, ends, counts = alone(table, way)
    for i, expected in enumerate(outputs):
        ours = [found[0][i] for found in of_ranks]
        if way == "unpooled":
            assert sum(map(len, ours)) == len(expected)
            continue
        for rank, output in enumerate(ours):
            close(output, expected[rank :: ranks.world_size])
    for number, (expected, *theirs) in enumerate(ends):
        keys, *tensors = map(torch.cat, zip(*(found[1][number] for found in of_ranks), strict=True))
        order, of_one = keys.argsort(), expected.argsort()
        assert torch.equal(keys[order], expected[of_one])
        for tensor, other in zip(tensors, theirs, strict=True):
            close(tensor[order], other[of_one])
    assert torch.equal(sum(found[2] for found in of_ranks), counts)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def disagree(rank):
    layer = sparsekit.DistributedEmbedding("sum", 9, 4, 1, name="a")
    features = {"x": "a", "y": Feature("a", insert=rank == 1)}
    group = sparsekit.EmbeddingGroup({"a": layer}, features)
    bags = torch.tensor([rank]), torch.tensor([0, 1])
    try:
        group({"x": bags, "y": bags})
    finally:
        assert len(layer.table) == 0


def test_ranks_agree_on_what_is_read(ranks):
    outcomes = ranks.outcomes(disagree)
    assert all("ranks are about to do different things" in one.message for one in outcomes)


def to_evaluation_and_back(rank):
    """A prefetched batch is looked up in the mode in which the group is called."""
    layers = {
        name: sparsekit.DistributedEmbedding("sum", 99, 4, 1, name=name, score="lfu", seed=1)
        for name in "ab"
    }
    group = sparsekit.EmbeddingGroup(layers, {"x": "a", "z": "b", "y": Feature("a", insert=False)})
    keys = [torch.tensor([2 * rank + step, 50 + step, 50 + step]) for step in range(3)]
    inputs = [{name: (own, torch.tensor([0, 3])) for name in "xyz"} for own in keys]
    for own in inputs[1:]:
        own["y"] = own["y"][0] + 10, own["y"][1]
    group(inputs[0])
    group.prefetch(inputs[1])
    group.eval()
    group(inputs[1])
    sizes = [len(layer.table) for layer in layers.values()]
    group.prefetch(inputs[2])
    group.train()
    group(inputs[2])
    return sizes, {
        key: word >> 32
        for key, word in zip(
            layers["a"].table.keys().tolist(), layers["a"].scores.tolist(), strict=False
        )
    }


def test_a_mode_that_changes_after_prefetch(ranks):
    found = ranks(to_evaluation_and_back)
    n = ranks.world_size
    assert [sum(sizes) for sizes in zip(*(sizes for sizes, _ in found), strict=True)] == [n + 1] * 2
    scores = {key: count for _, own in found for key, count in own.items()}
    assert scores == {
        **{2 * rank: 1 for rank in range(n)},
        **{50: 2 * n, 52: 2 * n},
        **{2 * rank + 2: 1 + (rank + 1 < n) for rank in range(n)},
    }
