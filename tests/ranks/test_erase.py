"""Ranks erase keys together: each rank passes any keys, and their owners erase them."""

import torch

import sparsekit
from sparsekit.optim import LazyAdam

from .test_faults import raised

KEYS = torch.arange(40)


def trained(rank, name="users"):
    layer = sparsekit.DistributedEmbedding("sum", 60, 4, 1, 4, seed=1, name=name)
    optimizer = LazyAdam(layer.parameters(), lr=0.1)
    step(layer, optimizer, rank)
    return layer, optimizer


def step(layer, optimizer, rank):
    layer(KEYS.roll(rank).view(10, 1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def erased_together(rank):
    layer, optimizer = trained(rank)
    before = layer.vectors(KEYS)
    # Both ranks pass 5; the last rank passes absent keys only.
    mine = [[3, 5, 7], [5, 9], [100, -4]][rank]
    count = layer.erase(torch.tensor(mine))
    after = layer.vectors(KEYS)
    nothing = layer.erase(torch.tensor(mine[:0], dtype=torch.int64))
    step(layer, optimizer, rank)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(sizes, layer.table.size)
    return count, nothing, before, after, int(sum(sizes))


def test_keys_of_all_ranks_are_erased(ranks):
    fresh = sparsekit.DistributedEmbedding("sum", 60, 4, 1, 4, seed=1, name="users").vectors(KEYS)
    for count, nothing, before, after, size in ranks(erased_together):
        gone = torch.isin(KEYS, torch.tensor([3, 5, 7, 9]))
        assert (count, nothing, size) == (4, 0, 40)
        assert torch.equal(after[~gone], before[~gone])
        assert torch.equal(after[gone], fresh[gone])
        assert not (before == fresh).all(1).any()


def a_gradient_on_one(rank):
    layer, _ = trained(rank)
    if rank == 1:
        layer.weight.grad = torch.zeros_like(layer.weight)
    try:
        layer.erase(torch.tensor([3]))
    finally:
        layer.weight.grad = None
        assert layer.vectors(KEYS).isfinite().all()
        assert layer.erase(torch.tensor([3])) == 1


def test_an_error_of_one_rank_is_raised_on_all(two_ranks):
    outcomes = two_ranks.outcomes(a_gradient_on_one)
    raised(outcomes, "RuntimeError", "users: weight has a gradient")


def different_calls(rank):
    layer, _ = trained(rank)
    if rank == 0:
        layer.erase(torch.tensor([3]))
    else:
        layer.vectors(torch.tensor([3]))


def test_ranks_that_do_different_things(two_ranks):
    raised(two_ranks.outcomes(different_calls), "RuntimeError", "erase keys", "vectors of keys")


def backward_after(rank):
    layer, _ = trained(rank)
    out = layer(KEYS.view(10, 1, 4))
    layer.erase(torch.tensor([3, 4]))
    out.sum().backward()


def test_a_backward_whose_forward_was_before_is_refused(two_ranks):
    raised(two_ranks.outcomes(backward_after), "RuntimeError", "users: its rows have other keys")
