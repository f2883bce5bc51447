"""On a device that defers errors, ranks read the heads of messages later."""

import pytest
import torch

import sparsekit
from sparsekit._reports import MOST_LOOKUPS
from sparsekit.distributed.exchange import attempt

from .late import late

SIZES = [16, 16]


def write_nothing(parts):
    pass


def fail(parts):
    raise MemoryError("no room")


def test_parts_are_returned_before_their_heads_are_read():
    def both(exchange):
        what = f"rank {exchange.rank}'s rows"
        exchange.send(what, write_nothing, SIZES, SIZES, late=True)()
        error = attempt(sparsekit.raise_errors)
        return error, attempt(lambda: exchange.agree("go on", None))

    for rank, (error, after) in enumerate(late(both)):
        assert type(error) is RuntimeError
        assert f"rank {rank}'s rows: another rank sent something else" in str(error)
        assert "broke down before: RuntimeError: sparsekit: rank" in str(after)


def test_equal_messages_raise_nothing():
    def both(exchange):
        exchange.send("rows", write_nothing, SIZES, SIZES, late=True)()
        sparsekit.raise_errors()
        return exchange.broken

    assert late(both) == [None, None]


def test_other_heads_are_read_at_once():
    def both(exchange):
        write = fail if exchange.rank == 0 else write_nothing
        errors = [attempt(exchange.send("rows", write, SIZES, SIZES))]
        exchange.agree("go on", None)
        return errors

    (own,), (remote,) = late(both)
    assert type(own) is MemoryError
    assert "on rank 0: MemoryError: no room" in str(remote)


def test_a_rank_that_cannot_write_gives_up_the_exchange():
    def both(exchange):
        if exchange.rank == 1:
            return None
        error = attempt(lambda: exchange.send("rows", fail, SIZES, SIZES, late=True))
        return error, attempt(lambda: exchange.agree("go on", None))

    error, after = late(both)[0]
    assert type(error) is MemoryError
    assert "broke down before: MemoryError: no room" in str(after)


def layer_of(strategy, **options):
    return sparsekit.DistributedEmbedding(
        "sum", 40, 4, 1, 64, name="users", seed=1, strategy=strategy, **options
    )


def errors_of(exchange, layer, bad, good):
    """Look up `bad`, then `good` until an error is raised, and then once more."""
    layer(bad)
    errors = (attempt(lambda: layer(good)) for _ in range(MOST_LOOKUPS))
    error = next((error for error in errors if isinstance(error, Exception)), None)
    return error, layer(good).isfinite().all().item(), exchange.broken


@pytest.mark.parametrize("strategy", ["all_to_all", "reduce_scatter"])
def test_a_full_table_is_raised_on_all_ranks_by_a_later_lookup(late_ranks, strategy):
    few = torch.arange(4).view(1, 1, -1)

    def both(exchange):
        layer = layer_of(strategy)
        layer(few)
        many = torch.arange(100 * exchange.rank, 100 * exchange.rank + 64).view(1, 1, -1)
        return errors_of(exchange, layer, many, few)

    for error, finite, broken in late_ranks(both):
        assert isinstance(error, sparsekit.TableFullError)
        assert "users: " in str(error)
        assert finite
        assert broken is None


# A report may also arrive in the middle of a lookup, when the other rank waits for this one.
@pytest.mark.parametrize("looks_before", [0, 1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_a_bad_key_is_raised_on_all_ranks_by_a_later_lookup(late_ranks, training, looks_before):
    good = torch.arange(4).view(1, 1, -1)

    def both(exchange):
        layer = layer_of("all_to_all", use_hashtable=False).train(training)
        layer(good)
        bad = good.clone()
        bad[0, 0, 1] = 10**6 if exchange.rank == 0 else 2
        return errors_of(exchange, layer, bad, good)

    for error, finite, broken in late_ranks(both, lambda looks: looks >= looks_before):
        assert type(error) is IndexError
        assert "users" in str(error)
        assert finite
        assert broken is None
