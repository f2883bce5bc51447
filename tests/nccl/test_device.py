"""The native exchange on a GPU, over the real libnccl, with one rank, since two need two GPUs."""

import pytest
import torch

from sparsekit import _pybind
from sparsekit.distributed import nccl

from .fake import BUILT, LONG, one_rank
from .test_exchange import DTYPES, exchanges, step_of_a_layer

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
