"""Dense gradients averaged over shared memory equal gradients averaged through gloo."""

import time

import pytest
import torch
import torch.distributed as dist
from patience import patience
from torch.nn.parallel import DistributedDataParallel

import sparsekit
from sparsekit.distributed import exchange_of
from sparsekit.distributed.averaging import averaging_of
from sparsekit.distributed.shared_memory import SharedMemoryTransport
from sparsekit.train import Trainer

CPU = torch.device("cpu")


class Dense(torch.nn.Module):
    """Model with parameters of many sizes; one has fewer elements than there are ranks."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(7, 50, dtype=dtype), torch.nn.Linear(50, 3, dtype=dtype)
        )
        self.scale = torch.nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x):
        return self.layers(x).sum(1) * self.scale


def bits_of_all_ranks(tensors):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [tensor.double().tolist() for tensor in tensors])
    return parts


def averaged(rank, dtype, bucket_cap_mb):
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(4)]
    averaging = averaging_of(CPU)
    models = [DistributedDataParallel(Dense(dtype), bucket_cap_mb=bucket_cap_mb) for _ in range(2)]
    models[0].register_comm_hook(None, averaging.average)
    buckets = []
    for batch in batches:
        before = averaging._exchange.collectives
        for model in models:
            model.zero_grad()
            model(batch).sum().backward()
        ours, theirs = ([p.grad for p in model.parameters()] for model in models)
        # DistributedDataParallel divides before it adds, and each of these operations rounds.
        close = {"atol": 1e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(ours, theirs, **close)
        assert len({str(bits) for bits in bits_of_all_ranks(ours)}) == 1
        buckets.append((averaging._exchange.collectives - before) // 2)
    return buckets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_what_gloo_makes(ranks, dtype):
    for buckets in ranks(averaged, dtype, 25):
        assert buckets == [1] * 4


def test_several_buckets(ranks):
    for buckets in ranks(averaged, torch.float32, 1e-4):
        assert buckets[-1] > 1


class _Both(torch.autograd.Function):
    """Sum of two inputs; backward may visit the inputs in either order."""

    @staticmethod
    def forward(ctx, one, other):
        return one + other

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def in_another_order(rank):
    """Run the table's backward before the dense part's on one rank, and after it on the other."""
    torch.manual_seed(0)
    table = sparsekit.DistributedEmbedding("sum", 100, 4, 1, 1, name="table")
    dense = DistributedDataParallel(torch.nn.Linear(4, 4))
    dense.register_comm_hook(None, averaging_of(CPU).average)
    x = torch.full((6, 4), float(rank + 1))
    # Backward begins with the op that forward ran last.
    for _ in range(3):
        vectors = table(torch.arange(6).view(6, 1, 1)).flatten(1)
        if rank == 0:
            first, second = vectors * 2, dense(x)
        else:
            second = dense(x)
            first = vectors * 2
        _Both.apply(first, second).sum().backward()
        assert torch.equal(dense.module.bias.grad, torch.full((4,), 6.0))
        assert (table.weight.grad.to_dense()[: len(table.table)] == 2).all()
        dense.zero_grad()
        table.zero_grad()


def test_ranks_may_come_to_it_in_another_order(two_ranks):
    two_ranks(in_another_order)


def only_where_memory_is_shared(rank):
    sparsekit.init(backend="torch")
    try:
        assert averaging_of(CPU) is None
        trainer = Trainer(Dense(torch.float32), None, [])
        assert trainer._step._loss._comm_hooks == []
    finally:
        sparsekit.init(backend="auto")
    averaging = averaging_of(CPU)
    assert isinstance(averaging._exchange.transport, SharedMemoryTransport)
    assert averaging._exchange is averaging_of(CPU)._exchange
    assert averaging._exchange is not exchange_of(None, CPU)
    trainer = Trainer(Dense(torch.float32), None, [])
    hooks = [hook.__qualname__ for hook, _ in trainer._step._loss._comm_hooks]
    assert hooks == ["Averaging.average"]


def test_only_where_memory_is_shared(two_ranks):
    two_ranks(only_where_memory_is_shared)


def interrupted(rank):
    dense = DistributedDataParallel(torch.nn.Linear(4, 4))
    averaging = averaging_of(CPU)
    dense.register_comm_hook(None, averaging.average)
    dense(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        send, sent = averaging._exchange.send, []

        def interrupt(*arguments):
            sent.append(arguments)
            if len(sent) == 2:
                raise KeyboardInterrupt
            return send(*arguments)

        averaging._exchange.send = interrupt
        with pytest.raises(KeyboardInterrupt):
            dense(torch.ones(2, 4)).sum().backward()
        return
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="no answer from all other ranks"):
        dense(torch.ones(2, 4)).sum().backward()
    assert time.monotonic() - begin < patience(20)


def test_an_interruption_does_not_leave_the_others_waiting(fresh_ranks):
    fresh_ranks(2, timeout=120)(interrupted)


def test_one_rank_averages_nothing():
    assert averaging_of(CPU) is None
