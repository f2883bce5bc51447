"""The native exchange over a stand-in for libnccl in host memory: messages arrive correctly."""

import subprocess

import pytest
import torch
from conftest import assert_close, generator, randn

import sparsekit
from sparsekit import _pybind
from sparsekit.distributed import Exchange
from sparsekit.distributed.exchange import Proposal
from sparsekit.distributed.wire import pack, packed_sizes, unpack
from sparsekit.tables import embedding_table

from .fake import BUILT, calls, in_process_of_its_own, on_threads, one_rank

DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


def test_build_info_says_whether_there_is_nccl():
    assert BUILT is False or BUILT.count(".") == 2
    assert hasattr(_pybind, "NcclCommunicator") == bool(BUILT)


def test_the_library_is_the_one_that_was_named(fake):
    assert fake(library_version) == 12345


def library_version(rank):
    sparsekit.init(backend="nccl")  # must not raise
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
    """Return the sizes that a rank sends: nothing to some ranks, and the most to rank 1."""
    return [(rank * 3 + other * 5) % 4 * (100 if other == 1 else 1) for other in range(world_size)]


def all_to_all(transport, seed=0):
    """Check for each dtype that every rank receives exactly the arrays sent to it."""
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
    init = ["ncclGetUniqueId", "ncclCommInitRankConfig"]
    warm_up = ["ncclGroupStart", "ncclSend 0 1 0", "ncclRecv 0 1 0", "ncclGroupEnd"]
    empty = ["ncclGroupStart", "ncclGroupEnd"]  # empty messages are not sent
    group = ["ncclGroupStart", "ncclSend 0 12 0", "ncclRecv 0 12 0", "ncclGroupEnd"]
    end = ["ncclCommFinalize", "ncclCommDestroy"]
    assert said == [*init, *warm_up, *empty, *end, *init, *warm_up, *group, *end]


def test_ranks_connect_when_they_are_made(fake):
    """A new transport sends messages between all ranks: NCCL connects them at the first message."""
    calls = fake(warm_up_of, 3)
    assert calls.count("ncclGroupEnd") == 3
    for rank in range(3):
        assert calls.count(f"ncclSend {rank} 1 0") == calls.count(f"ncclRecv {rank} 1 0") == 3


def warm_up_of(rank, world_size):
    calls()
    on_threads(world_size, lambda transport: None)
    return calls()


def exchanges(transport):
    exchange = Exchange(None, transport.device, transport)
    size = exchange.world_size
    rows = [[rank + other for other in range(size)] for rank in range(size)]
    parts = [
        torch.full((sum(rows[exchange.rank]), 3), exchange.rank, device=exchange.device),
        torch.full((sum(rows[exchange.rank]),), 0.5, device=exchange.device),
    ]
    own = rows[exchange.rank]
    counts = torch.tensor(own, device=exchange.device).view(size, 1)
    agreed = exchange.agree("", Proposal("the same", counts, (1, 2, exchange.rank)))
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
    """Check that a layer's step is the same when this transport sends its keys and vectors."""
    results = []
    for exchange in (None, Exchange(None, transport.device, transport)):
        before, embedding_table.exchange_of = (
            embedding_table.exchange_of,
            lambda *_, found=exchange: found,
        )
        try:
            layer = sparsekit.DistributedEmbedding(
                "mean", 50, 4, 2, 3, name="items", device=transport.device
            )
            keys = torch.randint(0, 20, (8, 2, 3), generator=generator(0)).to(transport.device)
            out = layer(keys)
            out.backward(randn(8, 2, 4).to(transport.device))
            results.append((out.detach(), layer.weight.grad.to_dense()))
        finally:
            embedding_table.exchange_of = before
    assert exchange.collectives == 4
    for one, other in zip(*results, strict=True):
        assert_close(one, other)
    return True


def step_over_the_fake(rank):
    return step_of_a_layer(one_rank())


def test_a_layer_over_it(fake):
    assert fake(step_over_the_fake)
