"""Collectives of a step wait for the right events on the right stream; the host rarely waits.

Two ranks are threads of one process, over the stand-ins for libnccl and for torch.cuda's streams.
"""

import ctypes
import itertools
import threading

import pytest
import simt
import torch
from conftest import generator
from deferred_errors import deferred_errors
from host_waits import waits_of

import sparsekit
from sparsekit.distributed import Exchange
from sparsekit.distributed.streams import NoStream, OwnStream, own_stream
from sparsekit.tables import embedding_table

from .fake import CPU, calls, on_threads
from .streams import Noted, Stream, Streams, note_collectives

# A collective runs on its own stream, between earlier and later work of the current stream.
BEGIN = ["current records", "own waits for current"]
# Events: for the watching thread and for the wait.
SEND = ["own sends", "own records", "own records"]
WAIT = ["current waits for own"]
COLLECTIVE = BEGIN + SEND + WAIT

_local = threading.local()


@pytest.fixture(scope="module", autouse=True)
def each_rank_has_its_exchange(fake):
    fake(find_exchanges_by_thread)


def find_exchanges_by_thread(rank):
    embedding_table.exchange_of = lambda *_: _local.exchange


class Rank:
    """A rank with a group of tables, followed by a dense layer."""

    def __init__(self, transport, tables, strategy, max_keys=None, fused=False):
        self.streams = transport._cuda
        self.used = note_collectives(transport, self.streams)
        self.exchange = _local.exchange = Exchange(None, CPU, transport)
        self.exchange.stream = OwnStream(CPU, self.streams)
        layers = {
            f"t{i}": sparsekit.DistributedEmbedding(
                "sum",
                200,
                4,
                1,
                3,
                name=f"{tables} {i}",
                strategy=strategy,
                max_keys_per_rank=max_keys,
            )
            for i in range(tables)
        }
        self.group = sparsekit.EmbeddingGroup(layers)
        self.optimizer = sparsekit.optim.LazyAdam(self.group.parameters())
        if fused:
            sparsekit.optim.fuse_in_backward(self.optimizer, self.group)
        self.dense = torch.nn.Linear(4 * tables, 1)

    def batch(self, seed):
        random = generator(10 * seed + self.exchange.rank)
        return {
            name: torch.randint(0, 50, (8, 1, 3), generator=random) for name in self.group.layers
        }

    def step(self, batch, following=None):
        outputs = self.group(batch)
        if following is not None:
            self.note("prefetch begins")
            self.group.prefetch(following)
            self.note("prefetch ends")
        self.dense(torch.cat([out.flatten(1) for out in outputs.values()], 1)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def note(self, text):
        self.streams.log.append(text)
        self.streams.ops.append((text, ""))


def on_two_ranks(function, tables=1, strategy="all_to_all", max_keys=None, ranks=2, fused=False):
    """Return the results of function(rank) on the ranks."""

    def of_rank(transport):
        return function(Rank(transport, tables, strategy, max_keys, fused))

    return on_threads(ranks, of_rank, Streams)


# The order of events in a step


def log_of_a_step(rank, tables):
    def steps(of):
        with Noted(of.streams):
            of.step(of.batch(0))
            before = of.exchange.collectives
            of.streams.log.clear()
            of.step(of.batch(1))
        assert of.exchange.collectives - before == 4
        return of.streams.log, of.streams.races

    return on_two_ranks(steps, tables)


@pytest.mark.parametrize("tables", [1, 26])
def test_a_step_has_four_collectives_each_between_its_events(fake, tables):
    for log, races in fake(log_of_a_step, tables):
        assert log == COLLECTIVE * 4
        assert races == []


def log_by_bag(rank):
    def steps(of):
        batches = [of.batch(seed) for seed in range(3)]
        with Noted(of.streams):
            of.step(batches[0], batches[1])
            of.step(batches[1], batches[2])
            of.streams.log.clear()
            of.step(batches[2])
        return of.streams.log, of.streams.races

    return on_two_ranks(steps, 3, "reduce_scatter")


def test_a_step_by_bag_has_no_races_either(fake):
    for log, races in fake(log_by_bag):
        assert log == [*WAIT, *COLLECTIVE * 2]
        assert races == []


def streams_of_groups(rank):
    def step(of):
        of.step(of.batch(0))
        return of.exchange.stream.stream.cuda_stream, of.streams.current_stream().cuda_stream

    calls()
    numbers = on_two_ranks(step)
    return numbers, [line.split() for line in calls() if line.startswith(("ncclSend", "ncclRecv"))]


def test_nccl_gets_the_own_stream(fake):
    (numbers, other), said = fake(streams_of_groups)
    assert numbers == other
    own, current = numbers
    given = {int(stream) for *_, size, stream in said if int(size) > 1}
    assert given == {own}
    assert current not in {int(stream) for *_, stream in said}


def log_of_prefetch(rank, tables):
    def steps(of):
        batches = [of.batch(seed) for seed in range(4)]
        with Noted(of.streams):
            of.step(batches[0], batches[1])
            of.streams.log.clear()
            of.streams.ops.clear()
            before = of.exchange.collectives
            of.step(batches[1], batches[2])
            found = list(of.streams.log), list(of.streams.ops)
            of.step(batches[2], batches[3])
            of.step(batches[3])
        # Three steps need 12 collectives, but two of them were prefetched before.
        assert of.exchange.collectives - before == 10
        return *found, of.streams.races

    return on_two_ranks(steps, tables)


@pytest.mark.parametrize("tables", [1, 26])
def test_prefetch_works_on_the_own_stream(fake, tables):
    for log, ops, races in fake(log_of_prefetch, tables):
        # Keys have arrived. Next: vectors, two collectives of the next batch, and gradients.
        ahead = ["prefetch begins", *BEGIN, *SEND, *SEND, "prefetch ends"]
        assert log == [*WAIT, *COLLECTIVE, *ahead, *COLLECTIVE]
        assert races == []
        begin, end = ops.index(("prefetch begins", "")), ops.index(("prefetch ends", ""))
        assert {stream for _, stream in ops[begin + 1 : end]} == {"own"}
        assert ("sparsekit::group_bucketize", "own") in ops[begin:end]
        others = {stream for name, stream in ops[:begin] + ops[end + 1 :] if name != "send"}
        assert others == {"current"}


def log_without_a_handshake(rank, tables):
    def steps(of):
        batches = [of.batch(seed) for seed in range(4)]
        with Noted(of.streams):
            of.step(batches[0])
            of.step(batches[1], batches[2])
            of.streams.log.clear()
            of.step(batches[2], batches[3])
            log = list(of.streams.log)
            of.streams.log.clear()
            of.step(batches[3])
        return log, of.streams.log, of.streams.races

    return on_two_ranks(steps, tables, max_keys=24)


@pytest.mark.parametrize("tables", [1, 26])
def test_without_a_handshake_prefetch_waits_for_no_other_rank(fake, tables):
    for log, last, races in fake(log_without_a_handshake, tables):
        ahead = ["prefetch begins", *BEGIN, *SEND, "prefetch ends"]
        assert log == [*WAIT, *COLLECTIVE, *ahead, *COLLECTIVE]
        assert last == [*WAIT, *COLLECTIVE * 2]
        assert races == []


def memory_of_collectives(rank):
    def steps(of):
        batches = [of.batch(seed) for seed in range(3)]
        with Noted(of.streams):
            of.step(batches[0], batches[1])
            of.step(batches[1], batches[2])
        own, streams, not_kept = of.exchange.stream.stream, of.streams, 0
        used = {tensor.untyped_storage().data_ptr() for tensor in of.used}
        for address in used - {0}:
            made_on_own = streams.memory[address].first is own
            not_kept += not made_on_own and (address, own) not in streams.kept
        return len(used), not_kept

    return on_two_ranks(steps)


def test_memory_of_a_collective_is_kept_for_its_stream(fake):
    """torch reuses the memory of a deleted tensor unless it knows which streams still use it."""
    for used, not_kept in fake(memory_of_collectives):
        assert used >= 8
        assert not_kept == 0


def unfinished(rank):
    def steps(of):
        with Noted(of.streams):
            of.group.prefetch(of.batch(0))
            of.exchange._raise_together = raise_it
            with pytest.raises(ValueError, match="inputs is not what prefetch"):
                of.group(of.batch(1))
        return of.streams.races

    return on_two_ranks(steps)


def raise_it(plan, error):
    raise error


def test_another_batch_than_the_one_prefetched(fake):
    assert fake(unfinished) == [[], []]


# How often the host waits


def waits_of_a_step(rank, tables, ahead=False, streams=True, max_keys=None, ranks=2):
    def steps(of):
        if not streams:
            of.exchange.stream = own_stream(CPU)
        batches = [of.batch(seed) for seed in range(3)]
        following = itertools.cycle(batches)
        batch = next(following)

        def step():
            nonlocal batch
            current, batch = batch, next(following)
            of.streams.log.clear()
            of.step(current, batch if ahead else None)

        found = waits_of(step, of.group, of.dense, batches)
        found.pop("ops of sparsekit", None)  # counted for the two ranks together, see below
        found.pop("numpy", None)  # access to message heads, which kernels write on a device
        found["streams"] = of.streams.log.count("host waits")
        return dict(found)

    return on_two_ranks(steps, tables, max_keys=max_keys, ranks=ranks)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_host_waits_no_more_for_streams_than_without(fake, ahead):
    assert fake(waits_of_a_step, 1, ahead) == fake(waits_of_a_step, 1, ahead, False)


@pytest.mark.parametrize(("ranks", "tables"), [(2, 1), (2, 26), (4, 3), (8, 2)])
@pytest.mark.parametrize("ahead", [False, True])
def test_waits_of_a_step_on_ranks(fake, ranks, tables, ahead):
    """The host waits for the handshake only. Waits of ops are not counted here."""
    handshake = {"to the host": 1, "streams": 0}
    assert fake(waits_of_a_step, tables, ahead, True, None, ranks) == [handshake] * ranks
    # With a limit for all keys, messages have fixed sizes.
    assert fake(waits_of_a_step, tables, ahead, True, 24, ranks) == [{"streams": 0}] * ranks


def waits_of_ops(rank, tables, max_keys=None, fused=False):
    """Return each rank's waits in two steps, as counted by the host runner."""
    simt.load()
    library = ctypes.CDLL(str(simt.LIBRARY))
    library.sparsekit_num_waits.restype = ctypes.c_int64
    before = library.sparsekit_num_waits()

    def steps(of):
        with deferred_errors(), simt.SimtMode():
            of.step(of.batch(0), following := of.batch(1))
            of.step(following)

    on_two_ranks(steps, tables, max_keys=max_keys, fused=fused)
    return library.sparsekit_num_waits() - before


def test_ops_wait_no_more_for_many_tables(fake):
    fake(waits_of_ops, 1)  # the very first call has an extra wait
    one, many = (fake(waits_of_ops, tables) for tables in (1, 26))
    # Each rank waits once per step, for the gradient's length.
    assert one == many == 4


@pytest.mark.parametrize("max_keys", [None, 24])
def test_ops_of_a_fused_step_do_not_wait(fake, max_keys):
    fake(waits_of_ops, 1, max_keys, True)
    assert [fake(waits_of_ops, tables, max_keys, True) for tables in (1, 26)] == [0, 0]


# The stream by itself


def test_a_cpu_has_no_streams():
    stream = own_stream(CPU)
    assert type(stream) is NoStream
    with stream.ahead():
        assert stream.begin(lambda of: lambda: of, 7)() == 7


def own():
    streams = Streams()
    next(streams.names)
    return streams, OwnStream(CPU, streams)


def test_what_is_ahead_waits_for_what_the_current_stream_has_by_then():
    streams, stream = own()
    with stream.ahead():
        assert streams.current_stream() is stream.stream
        with stream.ahead():  # the collective's own stream is current already
            pass
    assert streams.current_stream() is not stream.stream
    assert streams.log == BEGIN


def test_a_result_is_waited_for_by_the_stream_that_takes_it():
    streams, stream = own()
    with stream.ahead():
        finish = stream.begin(lambda of: lambda: of, 7)
    streams.log.clear()
    other = Stream(streams, "other")
    with streams.stream(other):
        assert finish() == 7
    assert streams.log == ["other waits for own"]
    # Memory allocated on a collective's own stream returns to that stream, while another stream
    # may still use the memory.
    streams.log.clear()
    with stream.ahead():
        pass
    waits = {line for line in streams.log if "waits" in line}
    assert waits == {"own waits for current", "own waits for other"}


def test_the_stand_in_sees_races():
    streams = Streams()
    one, other = streams.current_stream(), Stream(streams, "other")
    with Noted(streams):
        made = torch.ones(3)
        with streams.stream(other):
            made + 1
        assert streams.races == ["aten::add on other is not behind aten::ones on current"]
        other.wait_event(one.record_event())
        with streams.stream(other):
            made + 1
        assert len(streams.races) == 1
        made.zero_()
        assert streams.races[1:] == ["aten::zero_ on current is not behind aten::add on other"]
