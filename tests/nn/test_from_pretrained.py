"""Tests of from_pretrained's arguments, negative values of padding_idx, and repr of layers."""

import pytest
import torch

from sparsekit import All2AllDenseEmbedding, DistributedEmbedding, Embedding, EmbeddingBag

T = torch.tensor
DROP_INS = [Embedding, EmbeddingBag]
VECTORS = T([[0.0, 0.0], [3.0, 4.0], [1.0, 2.0]])
every_kind = pytest.mark.parametrize("kind", DROP_INS)


@every_kind
def test_arguments_reach_the_layer(kind):
    layer = kind.from_pretrained(
        VECTORS.double(), True, max_norm=2.0, norm_type=1.0, padding_idx=-3, key_dtype=torch.int32
    )
    assert (layer.max_norm, layer.norm_type, layer.padding_idx, layer.padding_key) == (2, 1, 0, 0)
    assert layer.weight.dtype == torch.float64
    assert not layer.weight.requires_grad
    assert layer.table.keys().tolist() == [0, 1, 2]
    assert layer.num_embeddings == 3
    assert kind.from_pretrained(VECTORS, False, num_embeddings=3).weight.requires_grad


def test_arguments_of_bags_reach_the_layer():
    layer = EmbeddingBag.from_pretrained(
        VECTORS, mode="max", include_last_offset=True, strategy="all_to_all"
    )
    assert (layer.mode, layer.include_last_offset, layer.strategy) == ("max", True, "all_to_all")


@every_kind
def test_options_beside_the_vectors(kind):
    layer = kind.from_pretrained(VECTORS.double(), dtype=torch.float32)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.vectors(torch.arange(3)), VECTORS)
    with pytest.raises(TypeError, match=r"^n: vectors must be float32 or .*, got torch.int64"):
        kind.from_pretrained(VECTORS.long(), dtype=torch.float32, name="n")
    with pytest.raises(RuntimeError, match=r"^n: the layer is on meta"):
        kind.from_pretrained(VECTORS.to("meta"), name="n")


def test_padding_must_be_zeros_in_the_vectors():
    assert not Embedding.from_pretrained(VECTORS, padding_idx=0)(T([0])).any()
    for padding, vectors in ((0, VECTORS + 1), (-2, VECTORS)):
        with pytest.raises(ValueError, match=rf"^n: the vector at padding_idx={padding % 3} is"):
            Embedding.from_pretrained(vectors, padding_idx=padding, name="n")


@every_kind
@pytest.mark.parametrize(("padding", "key"), [(-9, 0), (-1, 8), (0, 0), (8, 8)])
def test_padding_counts_from_either_end(kind, padding, key):
    layer = kind(9, 4, padding_idx=padding)
    assert (layer.padding_idx, layer.padding_key) == (key, key)
    assert f", padding_key={key}" in repr(layer)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Embedding(9, 4, name="n"), ", rows=0"),
        (
            Embedding(9, 4, max_norm=2, padding_key=-1, use_hashtable=False, name="n"),
            ", use_hashtable=False, padding_key=-1, max_norm=2.0",
        ),
        (
            EmbeddingBag(9, 4, include_last_offset=True, device="meta", name="n"),
            ", mode='mean', include_last_offset=True",
        ),
        (EmbeddingBag(9, 4, mode="max", name="n"), ", rows=0, mode='max'"),
        (
            DistributedEmbedding("sum", 9, 4, 2, [1, 5], truncate=True, name="n"),
            ", rows=0, combiner='sum', slot_num=2, max_nnz=(1, 5), truncate=True",
        ),
        (
            DistributedEmbedding("sum", 9, 4, 1, name="n"),
            ", rows=0, combiner='sum', slot_num=1, max_nnz=None",
        ),
        (
            All2AllDenseEmbedding(9, 4, 1, 2, use_hashtable=False, name="n"),
            ", use_hashtable=False",
        ),
    ],
)
def test_what_is_printed(layer, text):
    assert layer.extra_repr() == f"name='n', capacity=9, dim=4, dtype=torch.float32{text}"
