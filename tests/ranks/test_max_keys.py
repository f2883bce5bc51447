"""With a limit on the keys for each rank, keys are sent without a handshake."""

import pytest
import torch

import sparsekit
from sparsekit.lookup.by_key import ByKey

from .test_faults import raised

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def layers(prefix, most, count=5):
    """Return tables of several dims and dtypes, some of which do not pool."""
    made = {}
    for i in range(count):
        settings = {"dtype": DTYPES[i % 3], "name": f"{prefix}{i}", "seed": i}
        settings["max_keys_per_rank"] = most
        if i % 3 == 1:
            made[f"t{i}"] = sparsekit.All2AllDenseEmbedding(200, 3 + i, 2, 3, **settings)
        else:
            made[f"t{i}"] = sparsekit.DistributedEmbedding("mean", 200, 3 + i, 2, 3, **settings)
    return made


def batch(rank, seed, names):
    """Return a batch whose size differs by rank; in some batches the last rank has no keys."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    bags = 0 if seed % 3 == 2 and rank == 1 else 3 + 2 * rank
    return {name: torch.randint(0, 60, (bags, 2, 3), generator=generator) for name in names}


def train(group, optimizer, inputs):
    out = group(inputs)
    sum((vectors.float() ** 2).sum() for vectors in out.values()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return out


def equal_to_those_without(rank, wire_dtype, ahead):
    """Compare steps with and without a key limit; return the number of collectives per step."""
    sparsekit.init(wire_dtype=wire_dtype)
    groups = [sparsekit.EmbeddingGroup(layers("m", most)) for most in (40, None)]
    sparsekit.init(wire_dtype=None)
    return compare_steps(rank, groups, ahead)


def compare_steps(rank, groups, ahead):
    optimizers = [sparsekit.optim.LazyAdam(group.parameters(), lr=0.1) for group in groups]
    exchange = groups[0].layers["t0"].exchange
    batches = [batch(rank, seed, groups[0].layers) for seed in range(6)]
    collectives = []
    for inputs in batches:
        before = exchange.collectives
        if ahead:
            groups[0].prefetch(inputs)
        outs = [
            train(group, optimizer, inputs)
            for group, optimizer in zip(groups, optimizers, strict=True)
        ]
        collectives.append(exchange.collectives - before)
        for name, vectors in outs[0].items():
            assert torch.equal(vectors, outs[1][name]), name
    for one, other in zip(*(group.parameters() for group in groups), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        for group in groups:
            group.eval()
        for _ in range(2):
            outs = [group(batch(rank, 7, group.layers)) for group in groups]
            for name, vectors in outs[0].items():
                assert torch.equal(vectors, outs[1][name]), name
    return collectives


@pytest.mark.parametrize("ahead", [False, True])
def test_keys_without_a_handshake(ranks, ahead):
    wire_dtype = torch.bfloat16 if ahead else None
    # Without a limit, a step has four collectives. With a limit that all ranks know, it has three.
    for collectives in ranks(equal_to_those_without, wire_dtype, ahead):
        assert collectives == [8, 7, 7, 7, 7, 7]


def one(most, name="users", **keywords):
    return sparsekit.DistributedEmbedding(
        "sum", 100, 4, 1, 2, name=name, placement="modulo", max_keys_per_rank=most, **keywords
    )


def step(module, keys):
    module(torch.tensor(keys).view(-1, 1, 2)).sum().backward()
    module.weight.grad = None


def too_many_keys(rank, first):
    """Let rank 1 request three keys from rank 0, although the limit is two; then step as usual."""
    module = one(2)
    if not first:
        step(module, [0, 1, 2, 3])
    try:
        step(module, [0, 2, 4, 4] if rank == 1 else [0, 1, 2, 3])
    finally:
        rows = len(module.table)
        for _ in range(2):
            step(module, [0, 1, 2, 3])
        if rows != (0 if first else 2) or len(module.table) != 2:
            raise AssertionError(f"{rows} rows and then {len(module.table)}")


@pytest.mark.parametrize("first", [True, False])
def test_more_keys_than_the_limit(two_ranks_over, first):
    outcomes = two_ranks_over.outcomes(too_many_keys, first)
    raised(outcomes, "ValueError", "users: 3 distinct keys for rank 0, but max_keys_per_rank is 2")
    assert "on rank 1: " in outcomes[0].message


def bad_input_on_one(rank, ahead):
    group = sparsekit.EmbeddingGroup({"users": one(4)})
    good, bad = torch.tensor([[[1, 2]]]), torch.tensor([[[1.5, 2.5]]])
    group({"users": good})
    inputs = {"users": bad if rank == 1 else good}
    try:
        if ahead:
            group.prefetch(inputs)
        group(inputs)
    finally:
        group({"users": good})
        group({"users": good})


@pytest.mark.parametrize("ahead", [False, True])
def test_a_bad_input_of_one_rank(two_ranks_over, ahead):
    outcomes = two_ranks_over.outcomes(bad_input_on_one, ahead)
    raised(outcomes, "TypeError", "users", "torch.float32")


def two_limits(rank):
    step(one(2 + rank), [0, 1])


def a_limit_that_changes_on_one(rank):
    module = one(3000)  # too many keys to fit into a handshake
    step(module, [0, 1])
    step(module, [0, 1])
    if rank == 1:
        module.max_keys_per_rank = None
    step(module, [0, 1])


@pytest.mark.parametrize("function", [two_limits, a_limit_that_changes_on_one])
def test_ranks_with_other_limits(two_ranks_over, function):
    outcomes = two_ranks_over.outcomes(function)
    raised(outcomes, "RuntimeError", "ranks are about to do different things")


def missed_on_one(rank):
    """Make rank 1 fail after the handshake, before it sends keys; only rank 0 knows the limit."""
    module = one(3)
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ByKey, "begin", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                step(module, [0, 1])
    with pytest.raises(RuntimeError, match="ranks are about to do different things"):
        step(module, [0, 1])
    exchange = module.exchange
    before = exchange.collectives
    step(module, [0, 1])
    step(module, [0, 1])
    return exchange.collectives - before


def test_an_agreement_that_one_rank_has_missed(two_ranks_over):
    assert two_ranks_over(missed_on_one) == [7, 7]


def an_attribute_of_one(rank):
    """Set an unrelated attribute on one rank; return the number of collectives of the last step."""
    module = one(3)
    exchange = module.exchange
    for i in range(4):
        if rank == 1 and i == 2:
            module.note = "mine"
        before = exchange.collectives
        step(module, [0, 1])
    return exchange.collectives - before


def test_an_attribute_that_is_set_on_one_rank(two_ranks):
    assert two_ranks(an_attribute_of_one) == [3, 3]


def without_a_way_by_key(rank):
    """Check that a limit has no effect if another layer has no limit, or if the route is by bag."""
    group = sparsekit.EmbeddingGroup({"a": one(1, "a"), "b": one(None, "b")})
    keys = torch.tensor([[[0, 1]], [[2, 3]]])
    group({"a": keys, "b": keys})
    step(one(1, "c", strategy="reduce_scatter"), [0, 1, 2, 3])
    return sparsekit.EmbeddingGroup({"a": one(1, "d")})({"a": keys})


def test_where_a_limit_counts(two_ranks):
    raised(two_ranks.outcomes(without_a_way_by_key), "ValueError", "d: 2 distinct keys")


@pytest.mark.parametrize("most", [0, 2.5])
def test_a_limit_that_is_none(most):
    with pytest.raises((TypeError, ValueError), match=f"users: max_keys_per_rank .* got {most}"):
        one(most)
