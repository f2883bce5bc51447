"""With insert=False on all ranks, new keys get no row; ranks must agree on the value."""

import pytest
import torch

from sparsekit import DistributedEmbedding

T = torch.tensor
KNOWN = torch.arange(20)


def layer_with(**options):
    layer = DistributedEmbedding("mean", 50, 4, 1, name="frozen", insert=False, **options)
    layer.assign(KNOWN, torch.arange(80.0).view(20, 4))
    return layer


def frozen(rank, options):
    layer = layer_with(**options)
    bags = torch.arange(10, 30) + rank, T([0, 3, 20])
    twin = layer_with(**options).eval()
    for _ in range(2):  # the second time may need no handshake
        out, expected = layer(bags), twin(bags)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
    assert torch.equal(layer.weight.grad.to_dense(), twin.weight.grad.to_dense())
    size = len(layer.table)
    layer.insert = True
    layer(bags)
    return size, len(layer.table)


@pytest.mark.parametrize("options", [{"strategy": "reduce_scatter"}, {"max_keys_per_rank": 30}])
def test_nothing_is_inserted(two_ranks, options):
    sizes = two_ranks(frozen, options)
    assert sum(before for before, _ in sizes) == 20
    assert sum(after for _, after in sizes) == 31


def disagree(rank, limit):
    layer = layer_with(max_keys_per_rank=limit)
    bags = T([5, 99]), T([0, 2])
    layer(bags)
    layer.insert = rank == 1
    with pytest.raises(RuntimeError, match="ranks are about to do different things") as caught:
        layer(bags)
    sizes = len(layer.table)
    layer.insert = False
    layer(bags)
    return str(caught.value), sizes


@pytest.mark.parametrize("limit", [None, 9])
def test_a_disagreement_is_an_error_on_all(two_ranks, limit):
    found = two_ranks(disagree, limit)
    for text, _ in found:
        assert "insert=False" in text, text
    assert sum(size for _, size in found) == 20
