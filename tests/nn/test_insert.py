"""With insert=False, training adds no keys to the table, but trains the rows of known keys."""

import pytest
import torch

from sparsekit import (
    All2AllDenseEmbedding,
    DistributedEmbedding,
    Embedding,
    EmbeddingBag,
    EmbeddingGroup,
    optim,
)
from tests.nn.keyed import Keyed

T = torch.tensor
KNOWN, NEW = T([[3, 4]]), T([[4, 10**15, 4, -9]])
MAKE = {
    "DistributedEmbedding": lambda **how: DistributedEmbedding("mean", 9, 4, 1, **how),
    "All2AllDenseEmbedding": lambda **how: All2AllDenseEmbedding(9, 4, 1, 4, True, **how),
    "Embedding": lambda **how: Embedding(9, 4, **how),
    "EmbeddingBag": lambda **how: EmbeddingBag(9, 4, **how),
    "largest": lambda **how: EmbeddingBag(9, 4, mode="max", **how),
}
FUSED = [optim.LazyAdam, lambda weights: optim.Adam(weights, lr=0.1)]


def keys_for(kind, keys):
    if kind == "DistributedEmbedding":
        return keys.unsqueeze(1)
    return keys.view(-1) if kind == "All2AllDenseEmbedding" else keys


@pytest.mark.parametrize("kind", MAKE)
def test_new_keys_are_what_they_are_in_evaluation(kind, device):
    layer = MAKE[kind](name="frozen").to(device)
    assert layer.insert
    layer.assign(KNOWN[0].to(device), torch.ones(2, 4, device=device))
    twin = MAKE[kind](name="frozen", insert=False).to(device)
    twin.load_state_dict(layer.state_dict())
    keys = keys_for(kind, NEW.to(device))
    expected = layer.eval()(keys)
    out = twin(keys)
    assert torch.equal(out, expected)
    upstream = torch.rand(out.shape, device=device)
    out.backward(upstream)
    expected.backward(upstream)
    assert len(twin.table) == 2
    row = int(twin.table.find(T([4], device=device)))
    assert twin.weight.grad.indices().tolist() == [[row]]
    assert torch.equal(twin.weight.grad.to_dense(), layer.weight.grad.to_dense())
    assert twin.weight.grad.to_dense()[row].any()
    twin.insert = True
    twin(keys)
    assert len(twin.table) == 4


@pytest.mark.parametrize("optimizer", [0, 1])
def test_the_known_train_on(optimizer):
    """Optimizer states and late updates are the same as in a layer in evaluation mode."""
    frozen, twin = (Embedding(9, 4, name="same") for _ in range(2))
    steps = [FUSED[optimizer]([layer.weight]) for layer in (frozen, twin)]
    for layer, step in zip((frozen, twin), steps, strict=True):
        step.zero_grad()
        layer(KNOWN).sum().backward()
        step.step()
    frozen.insert = False
    twin.eval()
    for _ in range(3):
        for layer, step in zip((frozen, twin), steps, strict=True):
            step.zero_grad()
            layer(NEW).sin().sum().backward()
            step.step()
    assert len(frozen.table) == 2
    assert torch.equal(frozen(KNOWN), twin(KNOWN))
    assert torch.equal(frozen.weight, twin.weight)


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_in_a_group(output):
    layers = {
        "frozen": DistributedEmbedding("sum", 9, 4, 1, 4, insert=False, name="frozen"),
        "growing": DistributedEmbedding("sum", 9, 4, 1, 4, name="growing"),
    }
    group = EmbeddingGroup(layers, output=output)
    layers["frozen"].assign(T([4]), torch.ones(1, 4))
    out = group(Keyed(["growing", "frozen"], torch.arange(8), T([0, 4, 8])))
    parts = list(out.values()) if output == "dict" else [out[:, :4], out[:, 4:]]
    assert (len(layers["frozen"].table), len(layers["growing"].table)) == (1, 4)
    alone = layers["frozen"].eval()((torch.arange(4, 8), T([0, 4])))
    torch.testing.assert_close(parts[0], alone[:, 0])
    sum(part.sum() for part in parts).backward()
    assert layers["frozen"].weight.grad._nnz() == 1
    assert layers["growing"].weight.grad._nnz() == 4


def test_row_numbers_and_refused():
    layer = Embedding(5, 4, use_hashtable=False, insert=False, name="rows")
    layer(T([4])).sum().backward()
    assert layer.weight.grad.indices().tolist() == [[4]]
    with pytest.raises(TypeError, match=r"^rows: insert must be True or False, got 'no'"):
        Embedding(5, 4, insert="no", name="rows")
