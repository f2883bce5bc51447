"""Layers accept inputs like torchrec's JaggedTensor, and can return jagged outputs."""

import pytest
import torch

from sparsekit import (
    All2AllDenseEmbedding,
    DistributedEmbedding,
    Embedding,
    EmbeddingBag,
    EmbeddingGroup,
    Feature,
)

T = torch.tensor
VALUES, OFFSETS = T([3, 10**12, 3, -5]), T([0, 2, 2, 4])


class Jagged:
    """Stand-in for torchrec's JaggedTensor."""

    def __init__(self, values, offsets, weights=None):
        self._parts = values, offsets, weights

    def values(self):
        return self._parts[0]

    def offsets(self):
        return self._parts[1]

    def weights_or_none(self):
        return self._parts[2]


def jagged(device, weights=None):
    return Jagged(VALUES.to(device), OFFSETS.to(device), weights)


def test_bags(device):
    layer = DistributedEmbedding("mean", 50, 4, 3, name="bags").to(device)
    plain = VALUES.to(device), OFFSETS.to(device)
    weights = torch.rand(4, device=device)
    assert torch.equal(layer(jagged(device)), layer(plain))
    assert torch.equal(layer(jagged(device, weights)), layer(plain, weights))
    assert torch.equal(layer(jagged(device), weights), layer(plain, weights))
    with pytest.raises(ValueError, match="bags: inputs has weights of its own; pass no sample_w"):
        layer(jagged(device, weights), weights)
    if device == "cpu":
        layer(jagged(device, weights.requires_grad_())).sum().backward()
        assert weights.grad.any()


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("form", ["jagged tensor", "nested"])
def test_vectors_come_back_jagged(form, kind, device):
    layer = [
        lambda: Embedding(50, 4, name="vectors", padding_idx=3),
        lambda: All2AllDenseEmbedding(50, 4, 1, 1, True, padding_key=3, name="vectors"),
    ][kind]().to(device)
    keys = jagged(device, torch.rand(4, device=device))
    if form == "nested":
        keys = torch.nested.nested_tensor_from_jagged(keys.values(), keys.offsets())
    out = layer(keys)
    assert out.is_nested
    assert out.offsets().tolist() == OFFSETS.tolist()
    plain = layer(VALUES.to(device))
    assert torch.equal(out.values(), plain)
    assert not plain[0].any()
    grad = torch.rand_like(plain)
    out.values().backward(grad)
    found = layer.weight.grad.to_dense()
    layer.weight.grad = None
    plain.backward(grad)
    assert torch.equal(found, layer.weight.grad.to_dense())


def test_in_a_group(device):
    """A group accepts a dict of JaggedTensors, as KeyedJaggedTensor.to_dict() returns it."""
    layers = {
        "vectors": Embedding(50, 4, name="vectors"),
        "bags": EmbeddingBag(50, 4, mode="sum", name="bags"),
    }
    group = EmbeddingGroup(layers).to(device)
    inputs = {"vectors": jagged(device), "bags": jagged(device)}
    out = group(inputs)
    assert torch.equal(out["vectors"].values(), layers["vectors"](VALUES.to(device)))
    assert torch.equal(out["bags"], layers["bags"](VALUES.to(device), OFFSETS[:-1].to(device)))
    features = {"a": "bags", "b": Feature("vectors", "mean"), "c": Feature("bags", None)}
    group = EmbeddingGroup(layers, features)
    found = group(
        {
            "a": inputs["bags"],
            "b": jagged(device, torch.ones(4, device=device)),
            "c": inputs["bags"],
        }
    )
    assert torch.equal(found["a"], out["bags"])
    assert torch.equal(found["c"].values(), layers["bags"](VALUES.view(-1, 1).to(device)))


def test_refused():
    bad = Jagged(VALUES, T([0, 2, 2, 3]))
    with pytest.raises(ValueError, match=r"v: offsets must end at len\(values\)=4, but .* is 3"):
        Embedding(50, 4, name="v")(bad)
    with pytest.raises(ValueError, match=r"v: keys must have shape \[batch, slot_num=1, nnz_per"):
        All2AllDenseEmbedding(50, 4, 1, 1, name="v")(jagged("cpu"))
    with pytest.raises(TypeError, match=r"v: inputs must be .* a JaggedTensor, .* got dict"):
        DistributedEmbedding("sum", 50, 4, 1, name="v")({"a": VALUES})
