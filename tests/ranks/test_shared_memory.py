"""The transport through shared memory delivers the same data as gloo."""

import gc
import itertools
import random
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from patience import patience

from sparsekit.distributed import shared_memory
from sparsekit.distributed.transport import TorchTransport, room_for

from . import on_device
from .pool import Raised, Ranks

# The transport is only for tensors on the CPU.
pytestmark = pytest.mark.skipif(on_device.NAME != "cpu", reason="for tensors on the CPU")

MEBIBYTE = 1 << 20  # size of a ring buffer in bytes if there are few ranks
SECONDS = 30


def made(seconds=SECONDS):
    return shared_memory.connect(TorchTransport(dist.group.WORLD), timedelta(seconds=seconds))


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def any_ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.close()


def message(number, sender, receiver, size, dtype=torch.uint8):
    """Return the message that a rank sends another in a collective; both ranks can compute it."""
    first = 31 * number + 7 * sender + 3 * receiver
    return torch.arange(first, first + size).to(dtype)


def sizes_of(number, world_size, most):
    """Return the message sizes between all ranks, the same on all ranks; some totals are 0."""
    generator = random.Random(number)
    return [
        [
            generator.choice((0, 0, 1, 8, 64, generator.randrange(most), most))
            for _ in range(world_size)
        ]
        for _ in range(world_size)
    ]


def begin(transport, number, most, dtype=torch.uint8):
    """Begin a collective of random sizes; return its wait function and the expected result."""
    rank, world_size = transport.rank, transport.world_size
    sizes = sizes_of(number, world_size, most)
    ranks = range(world_size)
    send = torch.cat([message(number, rank, other, sizes[rank][other], dtype) for other in ranks])
    expected = [message(number, other, rank, sizes[other][rank], dtype) for other in ranks]
    receive = [sizes[other][rank] for other in ranks]
    return transport.begin_all_to_all(send, sizes[rank], receive), torch.cat(expected)


def like_gloo(rank, most, rounds):
    transports = [made(), TorchTransport(dist.group.WORLD)]
    for number in range(rounds):
        dtype = (torch.uint8, torch.int64, torch.float32, torch.bool)[number % 4]
        for transport in transports:
            wait, expected = begin(transport, number, most, dtype)
            received = wait()
            assert received.dtype == dtype
            assert torch.equal(received, expected)


@pytest.mark.parametrize(("most", "rounds"), [(100, 200), (5000, 100), (300_000, 12)])
def test_messages_of_any_sizes(any_ranks, most, rounds):
    any_ranks(like_gloo, most, rounds)


def large(rank):
    transport = made()
    for number in range(3):
        wait, expected = begin(transport, number, 9 * MEBIBYTE + 5)
        assert torch.equal(wait(), expected)
    # All ranks send only to rank 0.
    ranks = range(transport.world_size)
    size = 12 * MEBIBYTE + 3
    send = message(0, rank, 0, size)
    splits = [size if other == 0 else 0 for other in ranks]
    received = transport.all_to_all(send, splits, [size if rank == 0 else 0] * len(ranks))
    expected = [message(0, other, 0, size) for other in ranks if rank == 0]
    assert torch.equal(received, torch.cat([*expected, received.new_empty(0)]))


def test_messages_of_many_times_the_memory(any_ranks):
    any_ranks(large)


def several_at_once(rank, most):
    """Begin several collectives, then wait for them in an order that differs by rank."""
    transport = made()
    for numbers in batches(range(60), 6):
        begun = [begin(transport, number, most) for number in numbers]
        random.Random(100 * numbers[0] + rank).shuffle(begun)
        for wait, expected in begun:
            assert torch.equal(wait(), expected)


def batches(numbers, size):
    return [list(numbers[first : first + size]) for first in range(0, len(numbers), size)]


@pytest.mark.parametrize("most", [50, MEBIBYTE])
def test_several_collectives_at_once(any_ranks, most):
    any_ranks(several_at_once, most)


def one_ahead(rank):
    """Wait for a collective only after later ones have ended, as when prefetching."""
    transport = made()
    for first in range(0, 40, 4):
        # This collective exceeds the shared memory, so only a later call can send the rest.
        early, expected_early = begin(transport, first, 3 * MEBIBYTE)
        for number in range(first + 1, first + 4):
            wait, expected = begin(transport, number, 20_000)
            if (number + rank) % 2:
                assert torch.equal(wait(), expected)
        assert torch.equal(early(), expected_early)


def test_a_collective_that_is_begun_early(any_ranks):
    any_ranks(one_ahead)


def sent_at_once(rank):
    """Check that a message that fits into the memory reaches others as soon as begin returns."""
    transport = made()
    splits = [1000] * transport.world_size
    wait = transport.begin_all_to_all(torch.ones(sum(splits)), splits, splits)
    dist.barrier()
    if rank == 0:
        assert wait().sum() == sum(splits)
    dist.barrier()
    assert wait().sum() == sum(splits)


def test_what_fits_is_sent_at_once(any_ranks):
    any_ranks(sent_at_once)


def late(rank):
    """Time small collectives with a late rank, and a large one that waits for buffer space."""
    transport = made()
    world_size = transport.world_size
    begin = time.monotonic()
    for number in range(100):
        if rank == number % world_size:
            time.sleep(0.002)  # gives the others time to fall asleep
        splits = [8] * world_size
        transport.all_to_all(torch.zeros(sum(splits)), splits, splits)
    middle = time.monotonic()
    # Send much more than the memory holds, from rank 0 to rank 1.
    send, receive = [0] * world_size, [0] * world_size
    if rank == 0:
        send[1] = 100 * MEBIBYTE
    if rank == 1:
        receive[0] = 100 * MEBIBYTE
    transport.all_to_all(torch.zeros(sum(send), dtype=torch.uint8), send, receive)
    return middle - begin, time.monotonic() - middle


def test_ranks_that_sleep_are_woken(ranks):
    # A sleeping rank that is not woken polls every 0.1 s: the collectives would take ten seconds.
    for small, large in ranks(late):
        assert small < patience(4)
        assert large < patience(4)


def nobody_waits(rank):
    transport = made()
    wait, _ = begin(transport, 0, 3 * MEBIBYTE)
    sent = torch.zeros(transport.world_size * 5, dtype=torch.uint8)
    seen = weakref.ref(sent)
    splits = [5] * transport.world_size
    transport.begin_all_to_all(sent, splits, splits)
    del wait, sent
    gc.collect()
    assert transport.world_size == 1 or seen() is not None
    for number in range(1, 20):
        wait, expected = begin(transport, number, MEBIBYTE)
        assert torch.equal(wait(), expected)
    assert seen() is None


def test_memory_lives_as_long_as_it_is_in_use(any_ranks):
    any_ranks(nobody_waits)


def shorter(rank, with_gloo):
    transport = TorchTransport(dist.group.WORLD) if with_gloo else made()
    world_size = transport.world_size
    for room, number in itertools.product((0, 1, 1000, 3 * MEBIBYTE), range(4)):
        sizes = [[size % (room + 1) for size in of] for of in sizes_of(number, world_size, 400)]
        for other in range(world_size):
            sizes[other][other] = room
        send = [message(number, rank, other, size) for other, size in enumerate(sizes[rank])]
        received = transport.all_to_all(torch.cat(send), sizes[rank], [room] * world_size)
        for other, part in enumerate(received.split(room) if room else []):
            size = sizes[other][rank]
            assert torch.equal(part[:size], message(number, other, rank, size))


@pytest.mark.parametrize("with_gloo", [True, False])
def test_messages_shorter_than_their_room(ranks, with_gloo):
    ranks(shorter, with_gloo)


def longer(rank, size):
    transport = made()
    world_size = transport.world_size
    # The last rank sends rank 0 one byte more than expected.
    sizes = [size + (sender == world_size - 1) for sender in range(world_size)]
    send_splits = [sizes[rank] if receiver == 0 else 1 for receiver in range(world_size)]
    receive_splits = [size if rank == 0 else 1] * world_size
    send = torch.zeros(sum(send_splits), dtype=torch.uint8)
    transport.all_to_all(send, send_splits, receive_splits)
    # Ranks without an error so far get the error from rank 0 here.
    transport.all_to_all(send, send_splits, receive_splits)


@pytest.mark.parametrize("size", [0, 7, 5 * MEBIBYTE])
def test_a_message_longer_than_its_room(ranks, size):
    outcomes = ranks.outcomes(longer, size)
    sender = len(outcomes) - 1
    expected = f"{size + 1} bytes have come from rank {sender} where {size} were expected"
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, Raised), outcome
        assert outcome.type == "RuntimeError"
        assert expected in outcome.message or "is gone" in outcome.message
        assert rank != 0 or outcome.message == expected


def own_part_too_long(rank):
    transport = made()
    send = torch.zeros(8)
    with pytest.raises(RuntimeError, match=f"16 bytes have come from rank {rank} where 12 were"):
        transport.all_to_all(send, [4, 4], [4 - (rank == 0), 4 - (rank == 1)])


def test_a_part_for_the_rank_itself_that_is_too_long(two_ranks):
    two_ranks(own_part_too_long)


def wrong_arguments(rank):
    transport = made()
    ones = torch.ones(4)
    for send, splits in ((ones, [3, 0]), (ones.view(2, 2).T, [2, 2]), (ones.to("meta"), [2, 2])):
        with pytest.raises(ValueError, match="contiguous, on the CPU, and hold the"):
            transport.all_to_all(send, splits, [2, 2])
    with pytest.raises(ValueError, match="a size for each of 2 ranks, got 1"):
        transport.all_to_all(ones, [4], [2, 2])
    with pytest.raises(ValueError, match="a size for each of 2 ranks, got 3"):
        transport.all_to_all(ones, [2, 2], [2, 2, 0])
    with pytest.raises(ValueError, match="negative"):
        transport.all_to_all(ones, [5, -1], [2, 2])
    # These errors have not harmed the transport.
    assert torch.equal(transport.all_to_all(ones, [2, 2], [2, 2]), ones)


def test_wrong_arguments(two_ranks):
    two_ranks(wrong_arguments)


def two_threads(rank):
    """Exchange data in two threads at the same time, each with its own transport."""
    transports = [made(), made()]
    errors = []

    def run(transport, seed):
        try:
            for number in range(40):
                wait, expected = begin(transport, seed + number, 200_000)
                assert torch.equal(wait(), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(t, 100 * i)) for i, t in enumerate(transports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_two_threads(ranks):
    ranks(two_threads)


@pytest.mark.parametrize(
    "received",
    [
        torch.empty(2),
        torch.empty(4),
        torch.empty(3, 1),
        torch.empty(3).double(),
        torch.empty(6)[::2],
        torch.empty(3, device="meta"),
    ],
)
def test_memory_that_does_not_fit_is_refused(received):
    with pytest.raises(ValueError, match="received must be contiguous, with the 3 elements of"):
        room_for(torch.empty(5), [1, 2], received)
