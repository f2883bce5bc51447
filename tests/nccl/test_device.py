"""The native exchange on a GPU, over the real libnccl, with one rank: two would need two GPUs."""

import pytest
import torch
import torch.distributed as dist
from conftest import generator

import sparsekit
from sparsekit import _pybind
from sparsekit.distributed import Exchange, nccl
from sparsekit.distributed.streams import own_stream
from sparsekit.tables import embedding_table

from .fake import BUILT, LONG, one_rank
from .test_exchange import DTYPES, exchanges, step_of_a_layer

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not BUILT, reason="a build without NCCL"),
]


@pytest.fixture
def on_device():
    # Layers look for an exchange only in a process that belongs to a group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Use a device without an index, as users may.
    transport = one_rank(torch.device("cuda"))
    yield transport
    transport.close()
    torch.cuda.synchronize()
    dist.destroy_process_group()


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
        on_device.all_to_all(ones, [1000], [1000])  # connects the ranks
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sent = torch.zeros(1000, device="cuda")
            torch.cuda._sleep(200_000_000)
            sent.copy_(ones)
            received = on_device.all_to_all(sent, [1000], [1000])
            assert not stream.query()  # the host has not waited
            del sent
            torch.zeros(1000, device="cuda")  # may reuse the memory of `sent`
            assert received.sum().item() == 1000

    def test_it_runs_on_a_stream_of_its_own(self, on_device):
        """Earlier work of the current stream ends first; readers wait for the result."""
        n, current = 1_000_003, torch.cuda.current_stream()
        own, ones = own_stream(on_device.device), torch.ones(n, device="cuda")
        warm, made = torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
        torch.cuda.synchronize()
        for sent in (warm, made):
            torch.cuda._sleep(200_000_000)
            sent.copy_(ones)
            finish = own.begin(on_device.begin_all_to_all, sent, [n], [n])
            assert not current.query()  # the host has not waited
        del made, sent
        torch.zeros(n, device="cuda")  # must not reuse the memory that is being sent
        received = finish()
        received += 1
        assert received.sum().item() == 2 * n

    def test_what_is_ahead_does_not_wait_for_what_comes_later(self):
        own, current = own_stream(torch.device("cuda:0")), torch.cuda.current_stream()
        keys = torch.zeros(1000, device="cuda")
        with own.ahead():
            keys + 1  # loads the kernel
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        keys.fill_(2)
        with own.ahead():
            torch.cuda.current_stream().synchronize()
            assert current.query()  # `ahead` has waited for the earlier work
        with own.ahead():
            ahead = keys + 1
        torch.cuda._sleep(200_000_000)
        own.stream.synchronize()
        assert not current.query()
        assert ahead.sum().item() == 3000

    def test_prefetch_beside_a_busy_stream(self, on_device, monkeypatch):
        """Prefetch works even if keys are computed late and freed memory is reused immediately."""
        exchange = Exchange(None, on_device.device, on_device)
        monkeypatch.setattr(embedding_table, "exchange_of", lambda *_: exchange)
        group, twin = (
            sparsekit.EmbeddingGroup(
                {
                    f"t{i}": sparsekit.DistributedEmbedding(
                        "sum", 500, 8, 1, 3, name=f"busy {i}", device="cuda"
                    )
                    for i in range(3)
                }
            )
            for _ in range(2)
        )

        def batch(seed):
            random = generator(seed)
            keys = [torch.randint(0, 99, (64, 1, 3), generator=random).cuda() for _ in range(3)]
            torch.cuda._sleep(20_000_000)
            return {f"t{i}": each + 1 for i, each in enumerate(keys)}

        following = batch(0)
        for seed in range(10):
            inputs, following = following, batch(seed + 1)
            outputs = group(inputs)
            group.prefetch(following)
            torch.cuda._sleep(20_000_000)  # simulates the work of the dense part
            sum(out.square().sum() for out in outputs.values()).backward()
            expected = twin(inputs)
            for name, out in outputs.items():
                assert torch.equal(out, expected[name])
            del inputs, outputs, expected
        assert exchange.collectives > 20

    def test_an_exchange(self, on_device):
        assert exchanges(on_device) == 2

    def test_a_layer(self, on_device):
        assert step_of_a_layer(on_device)

    def test_an_abort_ends_a_communicator(self, on_device):
        on_device.communicator.abort("no longer wanted")
        ones = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="no longer wanted"):
            on_device.all_to_all(ones, [3], [3])
        assert ones.sum().item() == 3  # the device is unaffected

    def test_what_nccl_says_of_a_mistake(self, on_device):
        with pytest.raises(RuntimeError, match="ncclCommInitRankConfig: invalid argument"):
            nccl.NcclTransport(
                5, 1, _pybind.NcclCommunicator.unique_id(), torch.device("cuda"), LONG
            )
