"""Tests of an exchange over a transport in memory; ranks are threads of this process."""

import contextlib
import queue

import numpy as np
import pytest
import torch

from sparsekit.distributed.exchange import _BLOCK, _FACTS, Exchange, Proposal, attempt
from sparsekit.distributed.reports import RemoteError
from sparsekit.distributed.wire import part_bytes

from .in_memory import CPU, InMemory, each, on_ranks

T = torch.tensor


@pytest.mark.parametrize("tables", [1, _BLOCK - _FACTS, _BLOCK - _FACTS + 1, 1200])
def test_counts_of_any_number_of_tables(tables):
    def agreed(exchange):
        counts = torch.arange(3 * tables).view(3, tables) + 10_000 * exchange.rank
        facts = exchange.rank, 20, 30 + exchange.rank
        found = exchange.agree("x", Proposal("look up", counts, facts))
        return counts, found, exchange.collectives

    results = each(on_ranks(agreed, 3))
    for rank, (counts, found, collectives) in enumerate(results):
        assert found.facts == [[0, 20, 30], [1, 20, 31], [2, 20, 32]]
        assert (found.own == counts.numpy()).all()
        assert (found.counts == np.stack([given[rank] for given, *_ in results])).all()
        assert collectives == (1 if tables <= _BLOCK - _FACTS else 2)


def test_nothing_need_follow():
    (first, _) = each(on_ranks(lambda exchange: exchange.agree("the end", None)))
    assert first.facts == [[0, 0, 0]] * 2
    assert first.counts.shape == first.own.shape == (2, 0)


@pytest.mark.parametrize("how", ["agree", "send"])
def test_an_error_of_one_rank_is_raised_by_all(how):
    def failing(exchange):
        exchange.lookups, exchange.at_once = 5 + exchange.rank, {"plan"}
        error = KeyError("gone") if exchange.rank else None
        if how == "agree":
            call = attempt(lambda: exchange.agree("x", error))
        else:

            def write(parts):
                if error is not None:
                    raise error

            finish = exchange.send("x", write, [16, 16], [16, 16])
            call = attempt(finish)
        return call, exchange.lookups, exchange.at_once, exchange.broken

    for rank, (error, *rest) in enumerate(each(on_ranks(failing))):
        assert type(error) is (KeyError if rank else RemoteError)
        assert str(error) == ("'gone'" if rank else "on rank 1: KeyError: 'gone'")
        assert rest == [6, set(), None]


class OfTwo(ValueError):
    """Error that can be pickled but not unpickled: __init__ requires more than the message."""

    def __init__(self, message, position):
        super().__init__(message)


@pytest.mark.parametrize("local", [False, True])
def test_an_error_that_cannot_be_pickled_and_read_is_told_by_its_text(local):
    class Mine(ValueError):
        pass

    error = Mine("odd") if local else OfTwo("odd", 3)
    first, second = on_ranks(
        lambda exchange: exchange.agree("x", error if exchange.rank == 0 else None)
    )
    assert first is error
    assert type(second) is RemoteError
    assert str(second) == f"on rank 0: RemoteError: {type(error).__name__}: odd"


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("how", ["agree", "send"])
def test_ranks_that_do_different_things(how, interrupted):
    def differing(exchange):
        exchange.lookups = exchange.rank if interrupted else 3
        plan = f"plan of rank {exchange.rank}"
        if how == "agree":
            exchange.agree(plan, None)
        else:
            exchange.send(plan, lambda parts: None, [16, 16], [16, 16])()

    for error in on_ranks(differing):
        assert type(error) is RuntimeError
        assert "different things. rank 0: plan of rank 0; rank 1: plan of rank 1" in str(error)
        assert ("A step was interrupted on one of them" in str(error)) == interrupted


def test_parts_of_different_sizes_with_words_behind_the_head():
    payload = 24

    def sent(exchange):
        rank, size = exchange.rank, part_bytes(8 + payload)
        own = []

        def write(parts):
            for other in range(3):
                words = parts.payload(other, 8 + payload).view(torch.int64)
                words[:] = T([7 + rank, 100 * rank + other, 2, 3])
            own.append(parts.data.data_ptr() + parts.begins[rank])

        come = exchange.send("x", write, [size] * 3, [size] * 3, words=1)()
        assert own == [come.data.data_ptr() + come.begins[rank]]
        assert exchange.bytes_sent == 2 * size
        assert come.words.tolist() == [[7 + other] for other in range(3) if other != rank]
        return [come.payload(r, 8 + payload).view(torch.int64).tolist() for r in range(3)]

    for rank, found in enumerate(each(on_ranks(sent, 3))):
        assert found == [[7 + other, 100 * other + rank, 2, 3] for other in range(3)]


def alone(transport=None):
    transport = transport or InMemory(0, [[queue.Queue() for _ in range(2)] for _ in range(2)])
    return Exchange(object(), CPU, transport)


def test_room_for_the_largest_part_that_may_come():
    exchange = alone()
    handshake = 8 * _BLOCK
    assert exchange._room([16, 32]) == [16, handshake]
    exchange.expect([handshake + 8, handshake - 8])
    exchange.expect([16, handshake + 1])
    assert exchange._most == [handshake + 16, handshake + 16]
    assert exchange._room([16, 32]) == [16, handshake + 16]
    exchange.exact = True
    assert exchange._room([16, 32]) == [16, 32]


def test_no_answer_breaks_the_exchange():
    def broken(exchange):
        if exchange.rank:
            exchange.transport.queues[1][0].put(RuntimeError("connection closed"))
            return
        first = attempt(lambda: exchange.agree("look up", None))
        again = attempt(lambda: exchange.agree("once more", None))
        sent = attempt(lambda: exchange.send("keys", lambda parts: None, [16, 16], [16, 16]))
        assert "look up: no answer from all other ranks" in str(first)
        for error, plan in ((again, "once more"), (sent, "keys")):
            assert type(error) is RuntimeError
            assert f"{plan}: the exchange broke down before: connection closed" in str(error)

    each(on_ranks(broken))


@pytest.mark.parametrize("error", [MemoryError("none left"), KeyboardInterrupt()])
def test_a_launch_that_fails_abandons_the_exchange(error):
    exchange = alone()
    transport = exchange.transport

    def begin(*arguments):
        raise error

    transport.begin_all_to_all = begin
    with pytest.raises(type(error)):
        exchange.agree("look up", None)
    assert exchange.broken == f"{type(error).__name__}: {error}"
    assert transport.closed == 1
    exchange.close()
    assert transport.closed == 1
    # Later errors do not hide the first one.
    with pytest.raises(RuntimeError, match=r"wait: no answer from all other ranks.*: closed"):
        fail_to_wait(exchange)
    assert exchange.broken == f"{type(error).__name__}: {error}"


def fail_to_wait(exchange):
    with exchange._answered("wait"):
        raise RuntimeError("closed")


def test_an_error_of_one_rank_alone_counts_as_a_lookup():
    exchange = alone()
    with pytest.raises(ValueError, match="mine"), exchange.alone():
        raise ValueError("mine")
    assert exchange.lookups == 1
    with exchange.alone():
        pass
    assert exchange.lookups == 1


def test_an_error_of_all_ranks_does_not_count_as_a_lookup():
    def failing(exchange):
        with exchange.alone():
            exchange.agree("x", ValueError("ours"))

    def counted(exchange):
        error = attempt(lambda: failing(exchange))
        return str(error), exchange.lookups

    assert each(on_ranks(counted)) == [("ours", 0)] * 2


def test_a_watch_sees_what_goes_to_others_and_the_wait(monkeypatch):
    seen = []

    def watch(exchange, sent):
        seen.append((exchange.rank, sent))
        return contextlib.nullcontext()

    monkeypatch.setattr(Exchange, "watch", staticmethod(watch))
    each(on_ranks(lambda exchange: exchange.agree("x", None)))
    assert sorted(seen) == [(0, 0), (0, 8 * _BLOCK), (1, 0), (1, 8 * _BLOCK)]


def test_what_an_exchange_begins_with():
    exchange = alone()
    assert (exchange.purpose, exchange.broken, exchange.exact) == ("layers", None, False)
    assert (exchange.lookups, exchange.collectives, exchange.parts_saved) == (0, 0, 0)
    transport = exchange.transport
    assert Exchange(object(), torch.device("meta"), transport).exact
    transport.exact = True
    assert alone(transport).exact


def test_an_interrupt_is_no_error_to_agree_on():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupted)
    assert attempt(lambda: 3) == 3
