"""Two ranks swap tensors; the gradients are swapped back."""

from types import SimpleNamespace

import pytest
import torch

from sparsekit.distributed import exchange_of
from sparsekit.distributed.swap import swap


def swapped(rank, shape, dtype):
    exchange = exchange_of(None, torch.device("cpu"), "swap")
    of_ranks = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    of_ranks = [tensor.to(dtype) for tensor in of_ranks]
    own = of_ranks[rank].clone().requires_grad_()
    other = swap(exchange, own, "halves")
    assert torch.equal(other, of_ranks[1 - rank])
    # The result does not keep the message's memory alive.
    assert other.untyped_storage().nbytes() == other.nbytes
    other.backward(of_ranks[rank] * 2)
    assert torch.equal(own.grad, of_ranks[1 - rank] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (0, 2)], ids=str)
def test_each_gets_what_the_other_has(two_ranks_over, shape, dtype):
    two_ranks_over(swapped, shape, dtype)


def of_different_shapes(rank):
    exchange = exchange_of(None, torch.device("cpu"), "swap")
    with pytest.raises(RuntimeError, match=r"halves: \[2\] of torch.float32.*halves: \[3\] of"):
        swap(exchange, torch.ones(2 + rank), "halves")
    assert torch.equal(swap(exchange, torch.ones(2) * rank, "halves"), torch.ones(2) * (1 - rank))


def test_shapes_must_be_the_same(two_ranks_over):
    two_ranks_over(of_different_shapes)


def test_there_must_be_two_ranks():
    with pytest.raises(ValueError, match="swap of halves needs 2 ranks, there are 3"):
        swap(SimpleNamespace(world_size=3), torch.ones(2), "halves")
