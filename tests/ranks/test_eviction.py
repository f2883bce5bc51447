"""N ranks drop the same keys as one rank with the same budget, and train to its weights."""

import functools
import random
from itertools import chain

import pytest
import torch

import sparsekit

from .pool import Ranks
from .test_faults import raised

BUDGET, CAPACITY, STEPS, DIM = 40, 120, 40, 4


def remainder(keys):
    return keys % 13


POLICIES = {
    "lru": {"score": "lru"},
    "lfu": {"score": sparsekit.LFU(0)},
    "aged lfu": {"score": sparsekit.LFU(6)},
    "ttl": {"score": "lru", "ttl": 8},
    "lfu and ttl": {"score": "lfu", "ttl": 8},
    "function": {"score": remainder},
    "function and ttl": {"score": remainder, "ttl": 8},
    "given": {"score": "given"},
}
ADMISSIONS = {
    "counts": {"admission": sparsekit.MinCount(2, expire_after=12), "score": sparsekit.LFU(6)},
    "sketch": {"admission": sparsekit.MinCount(2, sketch_bytes=1 << 14), "ttl": 8},
    "probability": {"admission": sparsekit.Probability(0.3, seed=1)},
}
# Sweeps down to 38 of 40 rows, and few, down to 20; by default all 40 stay.
WATERMARKS = {str(low): {"low_watermark": low} for low in (0.95, 0.5)}
STRATEGIES = ["all_to_all", "reduce_scatter"]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.close()


def batches():
    """Return the bags of each step: drifting keys that repeat within and over the ranks."""
    draw = random.Random(5)

    def key(step):
        return int(90 * draw.random() ** 3) + step // 3

    return [
        [[key(step) for _ in range(draw.randint(0, 5))] for _ in range(draw.choice([1, 2, 9]))]
        for step in range(STEPS)
    ]


def part(bags, rank, world_size):
    """Return a rank's bags: as many as come, which may be none."""
    own = bags[rank::world_size]
    keys = torch.tensor([key for bag in own for key in bag], dtype=torch.int64)
    return keys, torch.tensor([0, *map(len, own)]).cumsum(0)


def scores(step, bags, rank, world_size):
    """Return a score for each key of a rank's bags, which depends on its place and the step."""
    of_bags = [
        [(31 * key + 7 * place + step * number) % 50 for place, key in enumerate(bag)]
        for number, bag in enumerate(bags)
    ]
    return part(of_bags, rank, world_size)[0]


def trained(rank, world_size, policy, strategy, dtype, grouped=False):
    """Train; return what each step dropped and left, and keys, vectors, scores, states at last."""
    layer = sparsekit.DistributedEmbedding(
        *("sum", CAPACITY, DIM, 1),
        seed=3,
        name="a",
        dtype=dtype,
        strategy=strategy,
        on_full="evict",
        max_rows=BUDGET,
        **(POLICIES | ADMISSIONS | WATERMARKS)[policy],
    )
    group = sparsekit.EmbeddingGroup({"a": layer})
    optimizer = sparsekit.optim.LazyAdam(layer.parameters(), lr=0.01)
    dropped, left, told = [], [], []
    layer.life.on_evict = lambda evicted: told.extend(evicted.keys.tolist())
    steps = batches()
    inputs = [{"a": part(bags, rank, world_size)} for bags in steps]
    more = [{} for _ in steps]
    if policy == "given":
        more = [{"scores": scores(*each, rank, world_size)} for each in enumerate(steps)]
    of_group = [{name: {"a": given} for name, given in each.items()} for each in more]
    for number, bags in enumerate(steps):
        if not grouped:
            out = layer(inputs[number]["a"], **more[number])
        else:
            out = group(inputs[number], **({} if number else of_group[number]))["a"]
            if number + 1 < STEPS:
                group.prefetch(inputs[number + 1], **of_group[number + 1])
        upstream = torch.arange(len(bags) * DIM).view(-1, 1, DIM)[rank::world_size] % 7 - 3.0
        # The gradient is the mean over ranks.
        (out.view(-1, 1, DIM) * upstream * world_size).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dropped.append(told.copy())
        left.append(layer.table.keys().tolist())
        told.clear()
    size, states = len(layer.table), optimizer.state[layer.weight]
    tensors = layer.table.keys(), layer.weight.detach(), layer.scores
    states = [t[:size].clone() for t in (*tensors, states["exp_avg"], states["exp_avg_sq"])]
    return (dropped, left), states, layer.row_counts()


@functools.cache
def alone(policy, dtype):
    return trained(0, 1, policy, "all_to_all", dtype)


def compare(of_ranks, of_one, tolerance, least_dropped=BUDGET):
    for expected, *parts in zip(of_one[0], *(each[0] for each in of_ranks), strict=True):
        keys = [sorted(chain(*step)) for step in zip(*parts, strict=True)]
        assert keys == [sorted(step) for step in expected]
    assert sum(map(len, of_one[0][0])) > least_dropped
    parts = [torch.cat(each) for each in zip(*(each[1] for each in of_ranks), strict=True)]
    (keys, *ours), (expected, *theirs) = parts, of_one[1]
    order, of_one_rank = keys.argsort(), expected.argsort()
    assert torch.equal(keys[order], expected[of_one_rank])
    assert torch.equal(ours[1][order], theirs[1][of_one_rank])  # the scores
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[order], other[of_one_rank], rtol=0, atol=tolerance)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_drop_what_one_rank_drops_and_train_to_its_weights(ranks, policy, strategy, dtype):
    given = policy, strategy, dtype
    compare(ranks(trained, ranks.world_size, *given), alone(policy, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("policy", WATERMARKS)
def test_ranks_sweep_down_to_the_same_watermark(ranks, policy):
    of_one = alone(policy, torch.float64)
    assert of_one[0] != alone("lru", torch.float64)[0]  # that of 0.99
    found = ranks(trained, ranks.world_size, policy, "all_to_all", torch.float64)
    compare(found, of_one, 1e-10)


@pytest.mark.parametrize("policy", ["lfu", "ttl", "function", "given"])
def test_prefetched_keys_are_counted_once_and_hold_no_rows(ranks, policy):
    given = policy, "all_to_all", torch.float64
    compare(ranks(trained, ranks.world_size, *given, True), alone(policy, torch.float64), 1e-10)


@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        ("counts", "all_to_all"),
        ("counts", "reduce_scatter"),
        ("sketch", "reduce_scatter"),
        ("probability", "all_to_all"),
    ],
)
def test_ranks_admit_what_one_rank_admits_and_train_to_its_weights(ranks, policy, strategy):
    of_one = alone(policy, torch.float64)
    found = ranks(trained, ranks.world_size, policy, strategy, torch.float64)
    compare(found, of_one, 1e-10, 1)
    for name in ("admitted", "refused", "evicted", "expired"):
        assert sum(getattr(counts, name) for *_, counts in found) == getattr(of_one[2], name)
    assert min(of_one[2].admitted, of_one[2].refused) > BUDGET


def counted(rank, world_size, strategy):
    """Look up keys that come often, within a bag, over bags, over features and over ranks."""
    options = {"score": sparsekit.LFU(0), "strategy": strategy}
    layers = {
        name: sparsekit.DistributedEmbedding("sum", 40, 4, 1, name=name, **own)
        for name, own in (("plain", {"strategy": strategy}), ("a", options), ("b", options))
    }
    features = {"x": "a", "y": "plain", "z": "a", "w": "b"}
    group = sparsekit.EmbeddingGroup(layers, features)
    bags = torch.tensor([5, 5, 6]), torch.tensor([0, 2, 3])
    none = torch.tensor([], dtype=torch.int64), torch.tensor([0, 0, 0])
    last = rank == world_size - 1
    inputs = {"x": bags, "y": bags, "z": none if last else bags, "w": bags if last else none}
    group.prefetch(inputs)
    group(inputs)
    layers["a"]((torch.tensor([7] * 100), torch.tensor([0, 100])))
    found = {}
    for name in "ab":
        keys = layers[name].table.keys().tolist()
        words = layers[name].scores[: len(keys)].tolist()
        found[name] = dict(zip(keys, (word >> 32 for word in words), strict=True))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_occurrence_counts(ranks, strategy):
    n = ranks.world_size
    found = ranks(counted, n, strategy)
    of_all = {name: {k: c for each in found for k, c in each[name].items()} for name in "ab"}
    assert of_all["a"] == {5: 2 * (2 * n - 1), 6: 2 * n - 1, 7: 100 * n}
    assert of_all["b"] == {5: 2, 6: 1}


def small(rank, world_size, **options):
    layer = sparsekit.DistributedEmbedding(
        "sum", 12, 2, 1, name="a", on_full="evict", max_rows=8 * world_size, **options
    )
    keys = torch.arange(100)
    own = keys[layer.owned(keys)].tolist()
    # Each rank asks for keys of its own.
    return layer, lambda keys: layer((torch.tensor(keys), torch.tensor([0, len(keys)]))), own


def too_many_rows_stay(rank, world_size):
    layer, look, own = small(rank, world_size)
    look(own[:2])
    held = look(own[2:6])
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    try:
        # Rank 0 can free rows for these, rank 1 cannot.
        look(own[6:8] if rank != 1 else own[6:15])
    finally:
        left = set(layer.table.keys().tolist())
        assert left >= set(own[:6])
        assert layer.life.evicted == 0
        if rank == 1:
            assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        held.sum().backward()
        layer.weight.grad = None
        look(own[20:22])  # the ranks are not out of step


def test_no_rank_drops_rows_for_a_lookup_that_fails(ranks):
    outcomes = ranks.outcomes(too_many_rows_stay, ranks.world_size)
    raised(outcomes, "TableFullError", "a: the table on rank 1 is full")


def a_function_fails_on_one(rank, world_size, strategy, way):
    failing = []

    def score(keys):
        if failing and rank == 1:
            raise OSError("no price")
        return keys % 13

    layer, _, own = small(rank, world_size, score=score, strategy=strategy, seed=1)
    group = sparsekit.EmbeddingGroup({"a": layer})

    def bags(keys):
        return torch.tensor(keys), torch.tensor([0, len(keys)])

    group({"a": bags(own[:8])})
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    failing.append(True)
    inputs = {"a": bags(own[10:15])}
    try:
        if way == "assign":
            layer.assign(inputs["a"][0], torch.ones(5, 2))
        if way == "prefetch":
            group.prefetch(inputs)
        group(inputs)
    finally:
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        failing.clear()
        group({"a": bags(own[10:15])})  # the ranks are not out of step
        keys = layer.table.keys()
        assert (layer.scores[: len(keys)] >> 32).tolist() == (keys % 13).tolist()
        assert set(keys.tolist()) >= set(own[10:15])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["group", "prefetch", "assign"])
def test_an_error_of_a_score_function_is_raised_on_all_ranks(ranks, strategy, way):
    outcomes = ranks.outcomes(a_function_fails_on_one, ranks.world_size, strategy, way)
    raised(outcomes, "RuntimeError", "a: score function ", "score raised OSError: no price")


def wrong_scores_on_one(rank, world_size, strategy, wrong):
    layer, _, own = small(rank, world_size, score="given", strategy=strategy, seed=1)
    group = sparsekit.EmbeddingGroup({"a": layer})

    def look(keys, scores):
        bags = {"a": (torch.tensor(keys), torch.tensor([0, len(keys)]))}
        group(bags, scores={} if scores is None else {"a": torch.tensor(scores)})

    look(own[:8], [3] * 8)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    try:
        look(own[10:13], wrong if rank == 1 else [1, 2, 3])
    finally:
        assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())
        look(own[10:13], [1, 2, 3])  # the ranks are not out of step
        keys = layer.table.keys().tolist()
        found = dict(zip(keys, (layer.scores[: len(keys)] >> 32).tolist(), strict=True))
        assert [found[key] for key in own[10:13]] == [1, 2, 3]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "a: with score='given' a lookup in training needs scores, one for each key"),
        ([1, 2], "a: scores must be of shape (3,) on cpu, one for each key, got shape (2,) on cpu"),
        ([1, -2, 3], "a: scores must be in [0, 2^32), got -2 for key "),
    ],
)
def test_wrong_scores_of_a_rank_are_refused_on_all(ranks, strategy, wrong, message):
    outcomes = ranks.outcomes(wrong_scores_on_one, ranks.world_size, strategy, wrong)
    raised(outcomes, "ValueError", message)


def a_listener_raises_on_one(rank, world_size):
    layer, look, own = small(rank, world_size, seed=1)
    look(own[:8])
    if rank == 1:
        layer.life.on_evict = lambda evicted: int("no number")
    try:
        look(own[10:15])
    finally:
        layer.life.on_evict = None
        assert set(layer.table.keys().tolist()) <= set(own)
        look(own[10:15])
        assert set(layer.table.keys().tolist()) >= set(own[10:15])


def test_an_error_of_a_listener_is_raised_on_all_ranks(ranks):
    outcomes = ranks.outcomes(a_listener_raises_on_one, ranks.world_size)
    raised(outcomes, "ValueError", "no number")
