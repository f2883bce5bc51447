"""Ranks that share memory notice when a rank dies, stops, leaves or damages the memory."""

import contextlib
import ctypes
import os
import re
import signal
import socket
import struct
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sparsekit.distributed import Exchange, shared_memory
from sparsekit.distributed.transport import TorchTransport

from . import on_device
from .pool import Died, Raised, Ranks

pytestmark = pytest.mark.skipif(on_device.NAME != "cpu", reason="for tensors on the CPU")

LARGE = 3 << 20  # bytes: more than the shared memory holds
# Seconds until a rank must notice a dead one. It polls every 0.1 s, but a machine may be busy.
SOON = 4


@pytest.fixture(scope="module")
def three_ranks():
    pool = Ranks(3)
    yield pool
    pool.close()


def made(seconds=60):
    return shared_memory.connect(TorchTransport(dist.group.WORLD), timedelta(seconds=seconds))


def all_to_all(transport, size=8):
    splits = [size] * transport.world_size
    send = torch.full((sum(splits),), transport.rank, dtype=torch.uint8)
    return transport.begin_all_to_all(send, splits, splits)


def check(transport, received):
    expected = torch.arange(transport.world_size, dtype=torch.uint8)
    assert torch.equal(received.view(transport.world_size, -1)[:, 0], expected)


def seconds_to_raise(function):
    """Return the seconds until a function raises, and the error's message."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        function()
    return time.monotonic() - begin, str(caught.value)


def files():
    """Return the number of this process's open files, without the listing's own file."""
    return len(os.listdir("/proc/self/fd")) - 1


def die(rank, how):
    transport = made()
    check(transport, all_to_all(transport)())
    if rank == 1:
        time.sleep(0.3)  # gives the others time to begin their wait
        if how == "exit":
            os._exit(1)
        if os.fork() == 0:
            time.sleep(2 * SOON)  # outlives its parent
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return seconds_to_raise(all_to_all(transport, LARGE))


@pytest.mark.parametrize(("how", "world_size"), [("exit", 2), ("kill beside a child", 3)])
def test_a_rank_that_dies(fresh_ranks, how, world_size):
    outcomes = fresh_ranks(world_size).outcomes(die, how)
    dead = outcomes.pop(1)
    assert isinstance(dead, (Died, Raised))  # its child keeps the pool's connection open
    for seconds, text in outcomes:
        assert seconds < SOON
        assert "rank 1 is gone: its process has ended" in text


KEPT = []  # keeps transports alive, as the traceback of an error does


def leave(rank, way):
    transport = made()
    if rank == 1:
        time.sleep(0.3)
        if way == "close":
            transport.close()
        if way == "drop":
            del transport
        if way in ("exchange", "abandon"):
            exchange = Exchange(None, torch.device("cpu"), transport)
            exchange.group = object()
            KEPT.append(transport)
            if way == "abandon":
                exchange.abandon(KeyboardInterrupt("here"))
            else:
                exchange.close()
        return SOON, "rank 1"
    return seconds_to_raise(all_to_all(transport, LARGE))


@pytest.mark.parametrize("way", ["close", "drop", "exchange", "abandon"])
def test_a_rank_that_leaves(two_ranks, way):
    (seconds, text), _ = two_ranks(leave, way)
    assert seconds < SOON
    assert "rank 1 is gone: it has " in text


def leave_after_sending(rank):
    transport = made()
    wait = all_to_all(transport, 100)
    if rank == 1:
        check(transport, wait())
        transport.close()
        transport.close()
        with pytest.raises(RuntimeError, match="is no more: it has closed its exchange"):
            all_to_all(transport)
        return
    time.sleep(0.5)
    check(transport, wait())  # rank 1 sent the whole message before it closed
    seconds, text = seconds_to_raise(all_to_all(transport))
    assert seconds < SOON
    assert "rank 1 is gone: it has closed its exchange" in text


def test_what_was_sent_before_the_end_is_received(two_ranks):
    two_ranks(leave_after_sending)


def spread(rank):
    """Let rank 0 give up first. Rank 2 learns from rank 0 what happened to rank 1."""
    transport = made()
    if rank == 1:
        time.sleep(0.3)
        transport.close()
        return "rank 1"
    splits = [[0, 8, 8], [8, 0, 0], [8, 0, 0]][rank]
    send = torch.zeros(sum(splits), dtype=torch.uint8)
    first = transport.begin_all_to_all(send, splits, splits)
    seconds, text = seconds_to_raise(lambda: (first(), all_to_all(transport)()))
    assert seconds < SOON
    return text


def test_the_end_of_one_is_the_end_of_all(three_ranks):
    for text in three_ranks(spread):
        assert "rank 1" in text


def never_come(rank):
    transport = made(2)
    if rank == 1:
        time.sleep(4)
        with pytest.raises(RuntimeError, match="rank 0 is gone: timed out: no answer from rank 1"):
            all_to_all(transport, LARGE)()
        return 2, "rank 1 within 2 s"
    seconds, text = seconds_to_raise(all_to_all(transport, LARGE))
    with pytest.raises(RuntimeError, match="the shared memory is no more: timed out"):
        all_to_all(transport)
    return seconds, text


def test_a_rank_that_never_comes(two_ranks):
    (seconds, text), _ = two_ranks(never_come)
    assert 1.9 < seconds < 2 + SOON
    assert "timed out: no answer from rank 1 within 2 s" in text


def stop(rank, seconds):
    transport = made(seconds)
    pids = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        check(transport, all_to_all(transport, LARGE)())
        return
    os.kill(pids[1], signal.SIGSTOP)
    try:
        wait = all_to_all(transport, LARGE)  # cannot end while the other rank is stopped
        if seconds == 2:
            assert "timed out" in seconds_to_raise(wait)[1]
    finally:
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGCONT)).start()
    if seconds > 2:
        check(transport, wait())


def test_a_rank_that_is_stopped_for_a_while(two_ranks):
    two_ranks(stop, 60)


def test_a_rank_that_is_stopped_for_too_long(two_ranks):
    first, second = two_ranks.outcomes(stop, 2)
    assert first is None
    assert isinstance(second, Raised)
    assert "timed out" in second.message


def interrupt(rank):
    transport = made()
    wait = all_to_all(transport, LARGE)
    if rank == 0:
        # Signals go to the main thread, which runs this function.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - begin < SOON
    dist.barrier()
    check(transport, wait())  # a second wait works
    check(transport, all_to_all(transport)())


def test_an_interrupted_wait(two_ranks):
    two_ranks(interrupt)


def nothing_is_left(rank):
    def sockets():
        with open("/proc/net/unix") as listed:
            return sum("@" in line.split()[-1] for line in listed)

    made().close()  # the first transport opens files that stay open until the process ends
    dist.barrier()
    before = files(), sorted(os.listdir("/dev/shm")), "memfd:sparsekit" in maps()
    dist.barrier()
    transport = made()
    check(transport, all_to_all(transport, LARGE)())
    assert files() == before[0] + transport.world_size - 1  # one socket per other rank
    assert "memfd:sparsekit" in maps()
    transport.close()
    assert (files(), sorted(os.listdir("/dev/shm")), "memfd:sparsekit" in maps()) == before
    transport = made()
    wait = all_to_all(transport)
    check(transport, wait())
    del transport
    assert files() == before[0]
    with pytest.raises(RuntimeError, match="the exchange ended"):
        wait()


def maps():
    with open("/proc/self/maps") as listed:
        return listed.read()


def test_nothing_is_left(three_ranks):
    three_ranks(nothing_is_left)


def use_after_fork(rank):
    transport = made()
    wait = all_to_all(transport, LARGE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (wait, lambda: all_to_all(transport)):
                with pytest.raises(RuntimeError, match="forked process cannot use"):
                    use()
            del transport, wait
            code = 0 if "memfd:sparsekit" not in maps() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check(transport, wait())
    check(transport, all_to_all(transport, LARGE)())


def test_a_forked_process_leaves_it_alone(two_ranks):
    two_ranks(use_after_fork)


# Offsets of the rings' positions and of their bytes in the memory of two ranks.
POSITIONS, RINGS, MEBIBYTE = 4096, 8192, 1 << 20


def fill(first, last, word):
    """Overwrite bytes `first` to `last` of the memory that ranks share."""
    mapped = re.search(r"(\w+)-(\w+) .*memfd:sparsekit", maps())
    begin, end = (int(address, 16) for address in mapped.groups())
    assert end - begin == RINGS + 2 * MEBIBYTE
    words = struct.pack("Q", word) * ((last - first) // 8)
    ctypes.memmove(begin + first, words, len(words))


def overwrite_positions(rank, word):
    transport = made(2)
    check(transport, all_to_all(transport)())
    dist.barrier()
    if rank == 1:
        fill(POSITIONS, RINGS, word)
        dist.barrier()  # wait until rank 0 has read the positions: sending would repair them
    text = seconds_to_raise(lambda: all_to_all(transport, LARGE)())[1]
    if rank == 0:
        dist.barrier()
    return text


@pytest.mark.parametrize("word", [1, 9, 1 << 40, 2**64 - 8, 2**64 - 1])
def test_positions_that_are_overwritten(two_ranks, word):
    # The first rank to notice the damage gives up, and then the other rank does.
    for text in two_ranks(overwrite_positions, word):
        assert "the memory shared with another rank has been overwritten" in text


def overwrite_messages(rank, word):
    transport = made(2)
    wait = all_to_all(transport)  # the messages are in the memory now
    dist.barrier()
    if rank == 1:
        fill(RINGS, RINGS + 2 * MEBIBYTE, word)
    dist.barrier()
    return seconds_to_raise(wait)[1]


@pytest.mark.parametrize("word", [9, 2**63, 2**64 - 1])
def test_sizes_that_are_overwritten(two_ranks, word):
    texts = two_ranks(overwrite_messages, word)
    assert any(f"{word} bytes have come from rank" in text for text in texts)


def strangers(rank):
    """Let processes that are not ranks connect first and send garbage."""
    offer = shared_memory._Meeting.offer
    kept = []

    def visited(meeting):
        made = offer(meeting)
        for hello in (b"", b"x" * 7, b"x" * 20):
            kept.append(socket.socket(socket.AF_UNIX))
            kept[-1].connect(made.address)
            kept[-1].sendall(hello)
            kept[-1].shutdown(socket.SHUT_WR)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory._Meeting, "offer", visited)
        transport = made()
    check(transport, all_to_all(transport)())


def test_strangers_that_connect(two_ranks):
    two_ranks(strangers)


@pytest.mark.time_limit(30)
def test_rank_0_never_sends_its_memory():
    with contextlib.ExitStack() as stack:
        meetings = [shared_memory._Meeting(rank, 2, 0.1, stack) for rank in range(2)]
        meetings[1].call([meeting.offer() for meeting in meetings])
        with pytest.raises(TimeoutError):
            meetings[1].meet()
