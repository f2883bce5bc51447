"""Outputs for a real KeyedJaggedTensor equal the outputs of torchrec's EmbeddingBagCollection."""

import pickle

import pytest
import torch
from conftest import generator

from sparsekit import DistributedEmbedding, EmbeddingGroup, Feature
from tests.nn.keyed import random_keyed

KEYS = ("unused", "b", "a", "c")
ROWS = {"users": (40, 8), "clicks": (50, 4)}


# Ignore warnings of torchrec's own code.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torchrec():
    return pytest.importorskip("torchrec", reason="torchrec is not installed")


def collection_and_layers(torchrec, pooling):
    pools = {"sum": torchrec.PoolingType.SUM, "mean": torchrec.PoolingType.MEAN}
    tables = [
        torchrec.EmbeddingBagConfig(
            name=name,
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names={"users": ["a", "b"], "clicks": ["c"]}[name],
            pooling=pools[pooling],
        )
        for name, (rows, dim) in ROWS.items()
    ]
    collection = torchrec.EmbeddingBagCollection(tables=tables)
    layers = {
        name: DistributedEmbedding(pooling, rows, dim, 1, 4, use_hashtable=False, name=name)
        for name, (rows, dim) in ROWS.items()
    }
    for name, layer in layers.items():
        theirs = collection.embedding_bags[name].weight.detach()
        layer.weight.data.copy_(theirs)
    return collection, layers


def of_torchrec(torchrec, keyed):
    return torchrec.KeyedJaggedTensor(
        keyed.keys(), keyed.values(), keyed.weights_or_none(), offsets=keyed.offsets()
    )


@pytest.mark.parametrize("batch", [5, 1])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_a_group_is_an_embedding_bag_collection(pooling, batch, torchrec):
    collection, layers = collection_and_layers(torchrec, pooling)
    # The features are in the order of the collection's output.
    group = EmbeddingGroup(layers, {"a": "users", "b": "users", "c": "clicks"}, "keyed")
    keyed = of_torchrec(torchrec, random_keyed(KEYS, batch, batch))
    expected, out = collection(keyed), group(keyed)
    assert isinstance(out, torchrec.KeyedTensor)
    assert out.keys() == expected.keys()
    assert out.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(out.values(), expected.values())
    for key in out.keys():  # noqa: SIM118 (no dict)
        torch.testing.assert_close(out[key], expected[key])
    grad = torch.randn(out.values().shape, generator=generator(0))
    out.values().backward(grad)
    expected.values().backward(grad)
    for name, layer in layers.items():
        theirs = collection.embedding_bags[name].weight.grad
        torch.testing.assert_close(layer.weight.grad.to_dense(), theirs.to_dense())


def test_weights_and_jagged_vectors(torchrec):
    _, layers = collection_and_layers(torchrec, "sum")
    plain = random_keyed(KEYS, 4, 1, weighted=True)
    keyed = of_torchrec(torchrec, plain)
    group = EmbeddingGroup(layers, {"a": "users", "b": Feature("users", None), "c": "clicks"})
    out, expected = group(keyed), group(plain)
    for name in ("a", "c"):
        assert torch.equal(out[name], expected[name])
    theirs = torch.nn.functional.embedding_bag(
        keyed["a"].values(),
        layers["users"].weight.detach(),
        keyed["a"].offsets(),
        mode="sum",
        per_sample_weights=keyed["a"].weights(),
        include_last_offset=True,
    )
    torch.testing.assert_close(out["a"], theirs)
    vectors = layers["users"].weight[keyed["b"].values()]
    assert torch.equal(out["b"].values(), vectors)


def test_strides_of_their_own_are_refused(torchrec):
    _, layers = collection_and_layers(torchrec, "sum")
    group = EmbeddingGroup(layers, {"a": "users", "c": "clicks"})
    keyed = torchrec.KeyedJaggedTensor(
        ["a", "c"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match="EmbeddingGroup: inputs has a stride of its own"):
        group(keyed)


def test_copies(torchrec):
    _, layers = collection_and_layers(torchrec, "sum")
    group = EmbeddingGroup(layers, {"a": "users", "c": "clicks"}, "keyed")
    keyed = of_torchrec(torchrec, random_keyed(KEYS, 4, 1))
    copied = pickle.loads(pickle.dumps(group))
    assert torch.equal(copied(keyed).values(), group(keyed).values())
