"""All2AllDenseEmbedding equals nn.Embedding with the same rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsekit
from sparsekit import All2AllDenseEmbedding, DistributedEmbedding

from .bags import INT64_MAX, INT64_MIN, check_coalesced

pytestmark = pytest.mark.usefixtures("engine")

KEYS = torch.tensor([[[0, -1, 0]], [[INT64_MIN, INT64_MAX, 5]], [[5, 7, 0]], [[7, 7, 7]]])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}


def make_layer(**changes):
    arguments = {
        "max_vocabulary_size_per_gpu": 100,
        "embedding_vec_size": 4,
        "slot_num": 1,
        "nnz_per_slot": 3,
        "dtype": torch.float64,
        "name": "layer",
    }
    return All2AllDenseEmbedding(**{**arguments, **changes})


def check_equal(layer, keys):
    """Compare forward and backward with an nn.Embedding whose row for the padding key is zero."""
    out = layer(keys)
    assert out.shape == (*keys.shape, layer.embedding_vec_size)
    assert out.dtype == layer.weight.dtype
    rows = keys.long() if layer.table is None else layer.table.find(keys)
    padding = len(layer.weight)
    if layer.padding_key is not None:
        rows = rows.masked_fill(keys == layer.padding_key, padding)
    weight = torch.cat([layer.weight.detach(), layer.weight.new_zeros(1, 4)])
    dense = torch.nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding)
    close = {"rtol": 0, "atol": TOLERANCE[out.dtype]}
    torch.testing.assert_close(out, dense(rows), rtol=0, atol=0)

    upstream = torch.rand(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    layer.weight.grad = None
    out.backward(upstream)
    dense(rows).backward(upstream)
    check_coalesced(layer.weight.grad)
    torch.testing.assert_close(layer.weight.grad.to_dense(), dense.weight.grad[:-1], **close)
    assert layer.weight.grad._nnz() == len(rows[rows != padding].unique())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_key", [None, 0, 7, -3])
def test_equals_embedding(dtype, padding_key):
    layer = make_layer(dtype=dtype, padding_key=padding_key)
    for _ in range(2):  # first with new keys, then with known ones
        check_equal(layer, KEYS)
    expected = set(KEYS.view(-1).tolist()) - {padding_key}
    assert set(layer.table.keys().tolist()) == expected
    assert len(layer.table) == len(expected)


@given(
    keys=st.lists(
        st.one_of(st.sampled_from([0, -1, INT64_MIN, INT64_MAX]), st.integers(-4, 4)), max_size=50
    ),
    padding_key=st.sampled_from([None, 0, INT64_MIN]),
)
def test_any_keys_equal_embedding(keys, padding_key):
    layer = make_layer(dynamic_input=True, padding_key=padding_key)
    keys = torch.tensor(keys, dtype=torch.int64)
    check_equal(layer, keys)
    # Looking up distinct keys and expanding the result gives the same.
    unique, inverse, _ = sparsekit.ops.unique(keys)
    assert torch.equal(layer(unique)[inverse], layer(keys))


@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 2, 3), (5, 2, 3)])
def test_shapes(shape):
    layer = make_layer(slot_num=2)
    check_equal(layer, torch.arange(torch.Size(shape).numel()).view(shape))


@pytest.mark.parametrize("n", [0, 1, 17])
@pytest.mark.parametrize("padding_key", [None, 3])
def test_dynamic_input(n, padding_key):
    check_equal(make_layer(dynamic_input=True, padding_key=padding_key), torch.arange(n) % 5)


def test_nothing_but_padding():
    layer = make_layer(padding_key=9)
    check_equal(layer, torch.full((2, 1, 3), 9))
    assert len(layer.table) == 0
    assert layer.weight.grad._nnz() == 0


def test_int32_keys_and_keys_that_are_not_contiguous():
    layer = make_layer(key_dtype=torch.int32)
    keys = torch.arange(12, dtype=torch.int32).view(3, 1, 4).transpose(0, 2)[:, :, :3]
    assert not keys.is_contiguous()
    check_equal(layer, keys)


def test_padding_key_beyond_int32_is_no_int32_key():
    keys = torch.zeros(1, 1, 3, dtype=torch.int32)
    assert (make_layer(padding_key=2**32)(keys) != 0).all()


def test_without_hash_table_keys_are_rows_and_padding_need_not_be_one():
    layer = make_layer(use_hashtable=False, padding_key=-1)
    check_equal(layer, torch.tensor([[[0, 99, -1]], [[99, 50, 0]]]))


def test_evaluation_reads_what_training_would_start_from():
    layer = make_layer(padding_key=7).eval()
    read = layer(KEYS)
    assert len(layer.table) == 0
    assert (read[KEYS == 7] == 0).all()
    assert torch.equal(layer.train()(KEYS), read)
    assert len(layer.table) == 5


def test_shares_its_start_with_a_pooled_layer_of_the_same_seed():
    pooled = DistributedEmbedding("sum", 100, 4, 1, 3, seed=5, dtype=torch.float64)
    found = make_layer(seed=5)(KEYS)
    torch.testing.assert_close(found.sum(2), pooled(KEYS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 3, 2), (4, 2, 3, 1)])
def test_keys_of_another_shape_are_refused(shape):
    keys = torch.zeros(shape, dtype=torch.int64)
    layer = All2AllDenseEmbedding(9, 4, 2, 3, name="n")
    with pytest.raises(ValueError, match=r"^n: keys must have shape \[batch, slot_num=2, nnz_per"):
        layer(keys)
    layer = All2AllDenseEmbedding(9, 4, 2, 3, dynamic_input=True, name="n")
    if len(shape) != 1:
        with pytest.raises(ValueError, match=r"^n: keys must be 1-D, got shape \("):
            layer(keys)
