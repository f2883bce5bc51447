"""The native exchange: over a stand-in for libnccl in host memory, and on a GPU over the real one.

The stand-in must be what the process opens first, so those tests run in a process of their own.
"""

import contextlib
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import assert_close, generator, randn
from ranks.pool import Ranks

import sparsekit
from sparsekit import _pybind
from sparsekit.distributed import Exchange, nccl
from sparsekit.distributed.exchange import Offer
from sparsekit.distributed.packing import pack, packed_sizes, unpack
from sparsekit.nn import shard

BUILT = sparsekit.build_info()["nccl"]
CPU = torch.device("cpu")
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)
INTERNAL_ERROR = 3
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def test_build_info_says_whether_there_is_nccl():
    assert BUILT is False or BUILT.count(".") == 2
    assert hasattr(_pybind, "NcclCommunicator") == bool(BUILT)


# Over the stand-in.


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """Calls a function in a process whose libnccl is fake_nccl.cpp."""
    if not BUILT:
        pytest.skip("a build without NCCL")
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the stand-in for libnccl")
    library = tmp_path_factory.mktemp("nccl") / "libfake_nccl.so"
    source = Path(__file__).with_name("fake_nccl.cpp")
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", library, source, "-lpthread"], check=True)
    with in_process_of_its_own(library) as call:
        call.library = library
        yield call


@contextlib.contextmanager
def in_process_of_its_own(library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEKIT_NCCL_LIBRARY", str(library))
        pool = Ranks(1)

    def call(function, *arguments):
        return pool(function, *arguments)[0]

    try:
        yield call
    finally:
        pool.close()


def the_fake():
    library = ctypes.CDLL(os.environ["SPARSEKIT_NCCL_LIBRARY"])
    library.fake_calls.restype = ctypes.c_char_p
    return library


def calls():
    """Made since this was last asked for."""
    return the_fake().fake_calls().decode().split("\n")[:-1]


def one_rank(device=CPU, timeout=LONG):
    return nccl.NcclTransport(0, 1, _pybind.NcclCommunicator.unique_id(), device, timeout)


def on_threads(world_size, function):
    """Result of function(transport) on each rank of a world of threads."""
    unique_id = _pybind.NcclCommunicator.unique_id()
    results = [None] * world_size

    def run(rank):
        try:
            transport = nccl.NcclTransport(rank, world_size, unique_id, CPU, LONG)
            results[rank] = function(transport)
            transport.close()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_the_library_is_the_one_that_was_named(fake):
    assert fake(library_version) == 12345


def library_version(rank):
    sparsekit.init(backend="nccl")  # does not raise
    sparsekit.init(backend="auto")
    return _pybind.NcclCommunicator.library_version()


def test_a_library_that_is_not_there(tmp_path):
    if not BUILT:
        pytest.skip("a build without NCCL")
    with in_process_of_its_own(tmp_path / "libnccl.so.2") as call:
        message = call(message_of_init)
        assert message.startswith("sparsekit.init: backend='nccl': sparsekit: cannot open")
        assert str(tmp_path) in message
    nothing = tmp_path / "libnothing.so"
    subprocess.run(["g++", "-shared", "-x", "c", "-o", nothing, "/dev/null"], check=True)
    with in_process_of_its_own(nothing) as call:
        assert f"{nothing} has no ncclGetVersion" in call(message_of_init)


def message_of_init(rank):
    with pytest.raises(RuntimeError) as caught:
        sparsekit.init(backend="nccl")
    return str(caught.value)


def splits_of(rank, world_size):
    """How much a rank sends to each; nothing to some, and much to one."""
    return [(rank * 3 + other * 5) % 4 * (100 if other == 1 else 1) for other in range(world_size)]


def all_to_all(transport, seed=0):
    """Compare with what each rank must have sent, for one array of each dtype."""
    size = transport.world_size
    sizes = [splits_of(rank, size) for rank in range(size)]
    for dtype in DTYPES:
        arrays = [
            torch.randint(0, 2, (sum(of_rank),), generator=generator(rank + seed)).to(dtype)
            for rank, of_rank in enumerate(sizes)
        ]
        receive = [sizes[rank][transport.rank] for rank in range(size)]
        got = transport.all_to_all(arrays[transport.rank], sizes[transport.rank], receive)
        parts = [
            array.split(of_rank)[transport.rank]
            for array, of_rank in zip(arrays, sizes, strict=True)
        ]
        assert got.dtype == dtype
        assert torch.equal(got, torch.cat(parts))
    return True


def all_to_all_on_threads(rank, world_size):
    return on_threads(world_size, all_to_all)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_bytes_go_where_they_should(fake, world_size):
    assert fake(all_to_all_on_threads, world_size) == [True] * world_size


def calls_of_an_exchange(rank):
    def exchange(transport):
        return transport.all_to_all(torch.arange(5, dtype=torch.int32), [2, 3], [2, 3])

    exchanges = on_threads(2, lambda t: exchange(t) if t.rank == 0 else other_side(t))
    assert exchanges[0].tolist() == [0, 1, 7, 8, 9]
    calls()
    one_rank().all_to_all(torch.zeros(0), [0], [0])
    one_rank().all_to_all(torch.zeros(6, dtype=torch.int16), [6], [6])
    return calls()


def other_side(transport):
    return transport.all_to_all(torch.tensor([7, 8, 9], dtype=torch.int32), [3, 0], [3, 0])


def test_an_exchange_is_one_group(fake):
    said = fake(calls_of_an_exchange)
    begin = ["ncclGetUniqueId", "ncclCommInitRankConfig", "ncclGroupStart"]
    end = ["ncclGroupEnd", "ncclCommFinalize", "ncclCommDestroy"]
    # Nothing is sent where there is nothing to send.
    assert said == [*begin, *end, *begin, "ncclSend 0 12 0", "ncclRecv 0 12 0", *end]


def exchanges(transport):
    exchange = Exchange(None, transport.device, transport)
    size = exchange.world_size
    rows = [[rank + other for other in range(size)] for rank in range(size)]
    parts = [
        torch.full((sum(rows[exchange.rank]), 3), exchange.rank, device=exchange.device),
        torch.full((sum(rows[exchange.rank]),), 0.5, device=exchange.device),
    ]
    own = rows[exchange.rank]
    offer = Offer(torch.tensor(own, device=exchange.device).view(size, 1), (1, 2, exchange.rank))
    _, agreed = exchange.meet("the same", lambda: offer)
    assert agreed.own.tolist() == [[n] for n in own]
    assert agreed.facts == [[1, 2, rank] for rank in range(size)]
    counts = [rows[rank][exchange.rank] for rank in range(size)]
    assert agreed.counts.tolist() == [[n] for n in counts]
    sizes = [packed_sizes(parts, [each] * 2) for each in (own, counts)]
    come = exchange.send("rows", lambda to: pack(to, parts, [own] * 2), *sizes)()
    keys, weights = unpack(come, parts, [counts] * 2)
    assert keys[:, 2].tolist() == [rank for rank in range(size) for _ in range(counts[rank])]
    assert weights.tolist() == [0.5] * sum(counts)
    return exchange.collectives


def exchanges_on_threads(rank):
    return on_threads(3, exchanges)


def test_an_exchange_has_it_as_its_transport(fake):
    assert fake(exchanges_on_threads) == [2, 2, 2]


def step_of_a_layer(transport):
    """A step whose keys and vectors go through the transport is one without it."""
    results = []
    for exchange in (None, Exchange(None, transport.device, transport)):
        before, shard.exchange_of = shard.exchange_of, lambda *_, found=exchange: found
        try:
            layer = sparsekit.DistributedEmbedding(
                "mean", 50, 4, 2, 3, name="items", device=transport.device
            )
            keys = torch.randint(0, 20, (8, 2, 3), generator=generator(0)).to(transport.device)
            out = layer(keys)
            out.backward(randn(8, 2, 4).to(transport.device))
            results.append((out.detach(), layer.weight.grad.to_dense()))
        finally:
            shard.exchange_of = before
    assert exchange.collectives == 4
    for one, other in zip(*results, strict=True):
        assert_close(one, other)
    return True


def step_over_the_fake(rank):
    return step_of_a_layer(one_rank())


def test_a_layer_over_it(fake):
    assert fake(step_over_the_fake)


# What fails.


def raises(function, *parts):
    with pytest.raises(RuntimeError) as caught:
        function()
    for part in parts:
        assert part in str(caught.value)


def fail_once(rank, function):
    fake, before = the_fake(), the_fake().fake_aborted()
    fake.fake_fail(function.encode(), INTERNAL_ERROR)
    parts = (f"{function}: internal error: as the test has asked",)
    if function in ("ncclGetUniqueId", "ncclCommInitRankConfig"):
        raises(one_rank, *parts)
        return fake.fake_aborted() - before
    transport = one_rank()
    if function in ("ncclCommFinalize", "ncclCommDestroy"):
        raises(lambda: transport.communicator.destroy(1.0), *parts)
        return fake.fake_aborted() - before
    ones = torch.ones(4)
    raises(lambda: transport.all_to_all(ones, [4], [4]), *parts)
    # It has been aborted, which stays the reason.
    raises(lambda: transport.all_to_all(ones, [4], [4]), "is no more", *parts)
    transport.close()
    # A group that has failed does not go on in the next one.
    assert torch.equal(one_rank().all_to_all(ones, [4], [4]), ones)
    return fake.fake_aborted() - before


@pytest.mark.parametrize(
    ("function", "aborted"),
    [
        ("ncclGetUniqueId", 0),
        ("ncclCommInitRankConfig", 0),
        ("ncclGroupStart", 1),
        ("ncclSend", 1),
        ("ncclRecv", 1),
        ("ncclGroupEnd", 1),
        ("ncclCommFinalize", 1),
        ("ncclCommDestroy", 0),
    ],
)
def test_a_call_that_fails(fake, function, aborted):
    assert fake(fail_once, function) == aborted
    assert fake(alive) == 0


def alive(rank):
    gc.collect()
    return the_fake().fake_alive()


def async_error(rank):
    transport = one_rank()
    the_fake().fake_async_error(INTERNAL_ERROR)
    raises(lambda: transport.all_to_all(torch.ones(1), [1], [1]), "ncclGroupEnd: internal error")


def async_error_at_init(rank):
    the_fake().fake_async_error(INTERNAL_ERROR)
    raises(one_rank, "ncclCommInitRankConfig: internal error")


def async_error_while_waiting(rank):
    """Only the thread that looks after the communicator can see it."""
    transport = one_rank()
    the_fake().fake_async_error(INTERNAL_ERROR)
    before = the_fake().fake_aborted()
    end = time.monotonic() + 60
    while the_fake().fake_aborted() == before and time.monotonic() < end:
        time.sleep(0.05)
    assert the_fake().fake_aborted() == before + 1
    raises(lambda: transport.all_to_all(torch.ones(1), [1], [1]), "is no more", "internal error")


def different_sizes(rank):
    def exchange(transport):
        return transport.all_to_all(torch.ones(3), [1, 2], [1, transport.rank + 1])

    raises(lambda: on_threads(2, exchange), "ncclGroupEnd: other error")


@pytest.mark.parametrize(
    "function", [async_error, async_error_at_init, async_error_while_waiting, different_sizes]
)
def test_an_error_that_comes_later(fake, function):
    fake(function)
    assert fake(alive) == 0


def absent_at_init(rank):
    unique_id = _pybind.NcclCommunicator.unique_id()
    raises(lambda: nccl.NcclTransport(0, 2, unique_id, CPU, SHORT), "within 1 s; another rank")


def absent_later(rank):
    unique_id = _pybind.NcclCommunicator.unique_id()
    comes = threading.Thread(target=nccl.NcclTransport, args=(1, 2, unique_id, CPU, LONG))
    comes.start()
    transport = nccl.NcclTransport(0, 2, unique_id, CPU, SHORT)
    comes.join()
    raises(lambda: transport.all_to_all(torch.ones(2), [1, 1], [1, 1]), "within 1 s; another")


def kernel_that_does_not_end(rank):
    communicator = _pybind.NcclCommunicator(0, 1, _pybind.NcclCommunicator.unique_id(), 1.0)
    asked = []
    watch = nccl.Watch(communicator, 0.1, lambda: asked.append(time.monotonic()) or len(asked) < 3)
    for _ in range(2):  # twice it is through in time
        watch.launched()
        if not watch.is_alive():
            watch.start()
        time.sleep(2.5)
        communicator.check()
    assert len(asked) == 2
    watch.launched()
    watch.join(60)
    assert not watch.is_alive()
    raises(communicator.check, "an exchange has not ended within 0.1 s; another rank may be gone")


@pytest.mark.parametrize("function", [absent_at_init, absent_later, kernel_that_does_not_end])
def test_a_rank_that_does_not_come(fake, function):
    begin = time.monotonic()
    fake(function)
    assert fake(alive) == 0
    assert time.monotonic() - begin < 50


def wrong_arguments(rank):
    transport = one_rank()
    ones = torch.ones(4)
    for send, splits in ((ones, [3]), (ones.view(2, 2).T, [4])):
        with pytest.raises(ValueError, match="contiguous and hold the"):
            transport.all_to_all(send, splits, [4])
    with pytest.raises(ValueError, match="on meta, the communicator on cpu"):
        transport.all_to_all(ones.to("meta"), [4], [4])
    communicator = transport.communicator
    for sizes, message in (([1, 2], "for each of 1 ranks, got 2"), ([-1], "negative")):
        with pytest.raises(ValueError, match=message):
            communicator.all_to_all(0, sizes, 0, [0], 0)
        with pytest.raises(ValueError, match=message):
            communicator.all_to_all(0, [0], 0, sizes, 0)
    with pytest.raises(ValueError, match="unique_id must have 128 bytes, got 2"):
        _pybind.NcclCommunicator(0, 1, b"ab", 1.0)
    # None of which has harmed it.
    assert torch.equal(transport.all_to_all(ones, [4], [4]), ones)


def test_wrong_arguments(fake):
    fake(wrong_arguments)


def ends(rank):
    calls()
    transport = one_rank()
    transport.close()
    transport.close()
    raises(transport.communicator.check, "is no more: it has been destroyed")
    one_rank()  # by the garbage collector
    # Has no transport that would close it.
    _pybind.NcclCommunicator(0, 1, _pybind.NcclCommunicator.unique_id(), 1.0)
    communicator = one_rank().communicator
    communicator.abort("no longer wanted")
    return [call for call in calls() if call.startswith("ncclComm")]


def test_the_end_of_a_communicator(fake):
    begin, destroyed = "ncclCommInitRankConfig", ["ncclCommFinalize", "ncclCommDestroy"]
    aborted = "ncclCommAbort"
    # The last transport goes before its communicator is aborted.
    expected = [begin, *destroyed, begin, *destroyed, begin, aborted, begin, *destroyed]
    assert fake(ends) == expected


PROGRAM = """
from datetime import timedelta
import torch
from sparsekit import _pybind
from sparsekit.distributed.nccl import NcclTransport

unique_id = _pybind.NcclCommunicator.unique_id()
kept = NcclTransport(0, 1, unique_id, torch.device("cpu"), timedelta(seconds=9))
"""


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [("", ["ncclCommFinalize", "ncclCommDestroy"]), ("raise KeyError", ["ncclCommAbort"])],
)
def test_the_end_of_a_process(fake, last_line, expected):
    environment = {
        **os.environ,
        "SPARSEKIT_NCCL_LIBRARY": str(fake.library),
        "FAKE_NCCL_TALKS": "1",
    }
    command = [sys.executable, "-c", PROGRAM + last_line]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == bool(last_line), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ncclComm")]
    assert said == ["ncclCommInitRankConfig", *expected]


# On a GPU.

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not BUILT, reason="a build without NCCL"),
]


@pytest.fixture
def on_device():
    # A device's name without its number, as a user may write it.
    transport = one_rank(torch.device("cuda"))
    yield transport
    transport.close()
    torch.cuda.synchronize()


class TestDevice:
    pytestmark = on_gpu

    def test_a_rank_sends_to_itself(self, on_device):
        for dtype in DTYPES:
            for n in (0, 1, 1000, 1_000_003):
                sent = torch.randint(0, 2, (n,), device="cuda").to(dtype)
                received = on_device.all_to_all(sent, [n], [n])
                assert received.data_ptr() != sent.data_ptr() or n == 0
                assert torch.equal(received, sent)

    def test_it_runs_on_the_current_stream(self, on_device):
        ones = torch.ones(1000, device="cuda")
        on_device.all_to_all(ones, [1000], [1000])  # connects
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sent = torch.zeros(1000, device="cuda")
            torch.cuda._sleep(200_000_000)
            sent.copy_(ones)
            received = on_device.all_to_all(sent, [1000], [1000])
            assert not stream.query()  # the call has not waited
            del sent
            torch.zeros(1000, device="cuda")  # has the memory of sent
            assert received.sum().item() == 1000

    def test_an_exchange(self, on_device):
        assert exchanges(on_device) == 2

    def test_a_layer(self, on_device):
        assert step_of_a_layer(on_device)

    def test_an_abort_ends_a_communicator(self, on_device):
        on_device.communicator.abort("no longer wanted")
        ones = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="no longer wanted"):
            on_device.all_to_all(ones, [3], [3])
        assert ones.sum().item() == 3  # the device is as it was

    def test_what_nccl_says_of_a_mistake(self, on_device):
        with pytest.raises(RuntimeError, match="ncclCommInitRankConfig: invalid argument"):
            nccl.NcclTransport(
                5, 1, _pybind.NcclCommunicator.unique_id(), torch.device("cuda"), LONG
            )
