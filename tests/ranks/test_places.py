"""On a device, messages have places for max_keys_per_rank keys, so that no size is read back."""

import pytest
import torch

import sparsekit
from sparsekit.distributed.exchange import attempt

from .in_memory import each
from .test_max_keys import compare_steps, layers, one


@pytest.mark.pairs
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_steps_are_those_without_a_limit(late_ranks, ahead, world_size, wire_dtype):
    sparsekit.init(wire_dtype=wire_dtype)
    try:
        results = late_ranks(
            lambda exchange: compare_steps(
                exchange.rank,
                [sparsekit.EmbeddingGroup(layers("m", most)) for most in (40, None)],
                ahead,
            ),
            world_size=world_size,
        )
    finally:
        sparsekit.init(wire_dtype=None)
    for collectives in each(results):
        assert collectives == [8, 7, 7, 7, 7, 7]


def test_messages_have_the_size_of_the_limit(late_ranks):
    def bytes_of_lookups(exchange):
        module = one(6)
        sent = []
        for keys in ([[0, 2]], [[1, 3], [0, 2]], [[5, 5], [7, 9], [4, 4]]):
            before = exchange.bytes_sent
            module(torch.tensor(keys).view(-1, 1, 2))
            sent.append(exchange.bytes_sent - before)
        return sent[1:]

    for one_lookup, other in each(late_ranks(bytes_of_lookups)):
        assert one_lookup == other


@pytest.mark.parametrize("first", [True, False])
def test_more_keys_than_the_limit_are_an_error_of_a_later_lookup(late_ranks, first):
    good, many = ([[0, 1], [2, 3]], [[0, 2], [4, 6]])

    def both(exchange):
        module = one(2)
        if not first:
            module(torch.tensor(good).view(-1, 1, 2))
        module(torch.tensor(many if exchange.rank == 1 else good).view(-1, 1, 2))
        rows = len(module.table)
        error = attempt(sparsekit.raise_errors)
        return rows, error

    results = each(late_ranks(both))
    assert [rows for rows, _ in results] == [2, 2]
    # The ranks share the words of errors here, so either of them finds the error.
    (error,) = [error for _, error in results if error is not None]
    assert type(error) is IndexError
    assert "users: group_bucketize: " in str(error) or "sparsekit: group_bucketize" in str(error)
    assert "a rank owned more keys of table 0 than max_keys_per_rank" in str(error)


def test_a_bad_input_of_one_rank_ends_the_exchange(late_ranks):
    good, bad = torch.tensor([[[1, 2]]]), torch.tensor([[[1.5, 2.5]]])

    def both(exchange):
        module = one(4)
        module(good)
        error = attempt(lambda: module(bad if exchange.rank == 1 else good))
        return error, attempt(lambda: module(good))

    (remote, _), (own, after) = each(late_ranks(both))
    assert type(own) is TypeError
    assert "users: " in str(own)
    assert "look up in users" in str(remote)
    assert "no answer from all other ranks" in str(remote)
    assert "broke down before: TypeError" in str(after)


@pytest.mark.parametrize("limits", [[2**31], [5, 2**30]])
def test_too_many_places_are_refused(late_ranks, limits):
    def both(exchange):
        made = {f"users{i}": one(most, f"users{i}") for i, most in enumerate(limits)}
        return sparsekit.EmbeddingGroup(made)(dict.fromkeys(made, torch.tensor([[[1, 2]]])))

    text = f"users{len(limits) - 1}: max_keys_per_rank {limits[-1]} "
    for error in late_ranks(both):
        assert type(error) is ValueError
        assert text in str(error)
