"""A failure on one rank raises an error on every rank, and no rank waits for long.

The pool sets the limit: a rank that still runs well after the timeout of its collectives counts as
`Raised("hangs")`.
"""

import os
import signal

import pytest
import torch

import sparsekit
from sparsekit.distributed import exchange_of

from .conftest import BACKENDS
from .pool import Died, Raised

over_backends = pytest.mark.parametrize("backend", BACKENDS)


def layer(name, capacity=100, **keywords):
    return sparsekit.DistributedEmbedding("sum", capacity, 4, 1, 2, name=name, **keywords)


def step(module, keys):
    module(torch.tensor(keys).view(-1, 1, 2)).sum().backward()
    module.weight.grad = None


def raised(outcomes, kind, *parts):
    """Check that every rank raised an error of this type whose message contains all the parts."""
    for outcome in outcomes:
        assert isinstance(outcome, Raised), outcome
        assert outcome.type == kind, outcome.trace
        for part in parts:
            assert part in outcome.message, outcome.message


def full_on_one(rank, strategy):
    module = layer("movies", capacity=3, strategy=strategy, placement="modulo")
    step(module, [0, 1, 2, 3])
    with pytest.raises(sparsekit.TableFullError) as caught:
        step(module, [5, 7, 9, 11])  # rank 1 owns all these keys
    assert (caught.value.layer, caught.value.rank, caught.value.size) == ("movies", 1, 2)
    step(module, [0, 1, 2, 3])  # all ranks still work
    return len(module.table)


@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_a_table_full_on_one_rank(two_ranks_over, strategy):
    assert two_ranks_over(full_on_one, strategy) == [2, 2]


def bad_key_on_one(rank):
    module = layer("rows", capacity=5, use_hashtable=False)
    step(module, [0, 9])
    try:
        step(module, [0, 10 + rank] if rank == 1 else [0, 1])
    finally:
        step(module, [3, 4])


def test_a_key_out_of_range_on_one_rank(two_ranks_over):
    outcomes = two_ranks_over.outcomes(bad_key_on_one)
    raised(outcomes, "IndexError", "rows: key 11 at position 1", "[0, 10)")
    assert "on rank 1: " in outcomes[0].message


class Odd(Exception):
    """Error that cannot be unpickled: its constructor requires more than the message."""

    def __init__(self, key, why):
        super().__init__(f"key {key}: {why}")


def an_error_that_cannot_be_sent(rank):
    exchange_of(None, torch.device("cpu")).agree("test", Odd(3, "odd") if rank == 1 else None)


def test_an_error_that_cannot_be_sent_comes_as_its_message(two_ranks_over):
    outcomes = two_ranks_over.outcomes(an_error_that_cannot_be_sent)
    raised(outcomes[:1], "RemoteError", "on rank 1: ", "Odd: key 3: odd")
    raised(outcomes[1:], "Odd", "key 3: odd")


def lookups_after_an_error(rank):
    exchange = exchange_of(None, torch.device("cpu"))
    exchange.lookups = before = 300 + rank
    with pytest.raises(ValueError, match="on one"):
        exchange.agree("test", ValueError("on one") if rank == 1 else None)
    return exchange.lookups - before


def test_ranks_count_alike_again_after_an_error(two_ranks_over):
    assert two_ranks_over(lookups_after_an_error) == [1, 0]


def missing_input(rank):
    group = sparsekit.EmbeddingGroup({"a": layer("a"), "b": layer("b")})
    keys = torch.tensor([[[1, 2]]])
    group({"a": keys, "b": keys} if rank == 0 else {"a": keys})


def test_an_input_of_a_group_is_missing_on_one_rank(two_ranks_over):
    outcomes = two_ranks_over.outcomes(missing_input)
    raised(outcomes, "ValueError", "EmbeddingGroup: inputs must have the layers ['a', 'b']")


def another_number_of_ranks(rank):
    module = layer("users")
    module.world_size = 3
    step(module, [1, 2])


def test_a_layer_of_another_number_of_ranks(two_ranks_over):
    outcomes = two_ranks_over.outcomes(another_number_of_ranks)
    raised(outcomes, "RuntimeError", "users: made on rank", "of 3", "of 2")


def different_layers(rank):
    step(layer("users" if rank == 0 else "items"), [1, 2])


def different_dims(rank):
    module = sparsekit.DistributedEmbedding("sum", 10, 4 + rank, 1, 2, name="users")
    step(module, [1, 2])


def evaluating_on_one(rank):
    module = layer("users").train(rank == 0)
    step(module, [1, 2])


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (different_layers, ("rank 0: look up in users", "rank 1: look up in items")),
        (different_dims, ("users (dim 4", "users (dim 5")),
        (evaluating_on_one, ("training", "evaluation")),
    ],
)
def test_ranks_that_disagree(two_ranks_over, function, parts):
    raised(two_ranks_over.outcomes(function), "RuntimeError", *parts)


def called_on_one_only(rank):
    first, second = layer("first"), layer("second")
    out = first(torch.tensor([[[1, 2]]]))
    if rank == 0:
        out = out + second(torch.tensor([[[1, 2]]]))
    out.sum().backward()


def test_a_layer_called_on_some_ranks_only(two_ranks_over):
    raised(two_ranks_over.outcomes(called_on_one_only), "RuntimeError", "second", "gradients: ")


def crossed_backwards(rank):
    module = layer("users")
    one, other = (module(torch.tensor([[keys]])) for keys in ([2, 4], [6, 8]))
    (one if rank == 0 else other).sum().backward()


def test_backwards_of_different_calls(two_ranks_over):
    raised(
        two_ranks_over.outcomes(crossed_backwards), "RuntimeError", "lookup number", "gradients: "
    )


def no_grad_on_one(rank):
    with torch.set_grad_enabled(rank == 0):
        layer("users")(torch.tensor([[[1, 2]]]))


def other_reduction_on_one(rank):
    reduction = "mean" if rank == 0 else "sum"
    step(layer("users", gradient_reduction=reduction), [1, 2])


def other_watermark_on_one(rank):
    step(layer("users", on_full="evict", low_watermark=(0.95, 0.9)[rank]), [1, 2])


def other_seed_on_one(rank):
    step(layer("users", seed=rank), [1, 2])


def other_padding_on_one(rank):
    step(layer("users", padding_key=rank), [1, 2])


def no_grad_on_one_later(rank):
    module = layer("users")
    step(module, [1, 2])
    with torch.set_grad_enabled(rank == 0):
        module(torch.tensor([[[1, 2]]]))


def frozen_on_one_later(rank):
    module = layer("users")
    step(module, [1, 2])
    module.weight.requires_grad_(rank == 0)
    module(torch.tensor([[[1, 2]]]))


def other_seed_on_one_later(rank):
    module = layer("users")
    step(module, [1, 2])
    module.seed.data.fill_(rank)  # a write through .data changes no version counter
    step(module, [1, 2])


@pytest.mark.parametrize(
    "function",
    [
        *(no_grad_on_one, other_reduction_on_one, other_seed_on_one, other_padding_on_one),
        *(
            no_grad_on_one_later,
            frozen_on_one_later,
            other_seed_on_one_later,
            other_watermark_on_one,
        ),
    ],
)
def test_settings_that_must_agree(two_ranks_over, function):
    raised(
        two_ranks_over.outcomes(function), "RuntimeError", "ranks are about to do different things"
    )


def no_memory_for_what_was_announced(rank):
    sparsekit.init(timeout=4)
    module = layer("users")
    step(module, [1, 2])
    if rank == 1:
        exchange = module.exchange
        begin = exchange.transport.begin_all_to_all

        def fail(send, *splits):
            if send.dtype == torch.uint8:
                raise MemoryError("none left")
            return begin(send, *splits)

        exchange.transport.begin_all_to_all = fail
    try:
        step(module, [3, 4])
    except MemoryError:
        step(module, [5, 6])


@over_backends
def test_what_was_announced_does_not_come(fresh_ranks, backend):
    outcomes = fresh_ranks(2, backend=backend).outcomes(no_memory_for_what_was_announced)
    raised(outcomes[:1], "RuntimeError")
    raised(outcomes[1:], "RuntimeError", "the exchange broke down before: MemoryError: none left")


def killed(rank):
    module = layer("users")
    step(module, [1, 2])
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        step(module, [1, 2])


@over_backends
def test_a_rank_is_killed(fresh_ranks, backend):
    ranks = fresh_ranks(3, backend=backend)
    outcomes = ranks.outcomes(killed)
    assert isinstance(outcomes[1], Died)
    raised([outcomes[0], outcomes[2]], "RuntimeError")


def absent(rank):
    sparsekit.init(timeout=4)
    module = layer("users")
    if rank == 0:
        step(module, [1, 2])


@over_backends
def test_a_rank_that_never_comes(fresh_ranks, backend):
    outcomes = fresh_ranks(2, backend=backend).outcomes(absent)
    assert outcomes[1] is None
    raised(outcomes[:1], "RuntimeError")
