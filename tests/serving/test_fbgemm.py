"""Conversions from and to FBGEMM's layouts, byte for byte."""

import numpy as np
import pytest

from sparsekit.serving import encoding, fbgemm

from .test_encoding import odd_rows


@pytest.fixture(scope="module")
def ops():
    """Return torch.ops.fbgemm, and a function that turns arrays into tensors."""
    pytest.importorskip("fbgemm_gpu", reason="fbgemm_gpu is not installed")
    import torch

    return torch.ops.fbgemm


def held(rows):
    """Leave out rows that int8 or int4 cannot hold, which FBGEMM rounds to infinities."""
    least, most = rows.min(1), rows.max(1)
    return rows[(abs(least) < 65519) & (most - least < 65519.0 * 15)]


def mixed_zeros(rows):
    """Return which rows have zeros of both signs and nothing below: bias has either sign."""
    zeros = rows == 0
    return (
        (rows.min(1) == 0) & (zeros & np.signbit(rows)).any(1) & (zeros & ~np.signbit(rows)).any(1)
    )


@pytest.mark.parametrize("dim", [4, 8, 12, 16, 32, 64, 100])
@pytest.mark.parametrize(("word", "bits"), [("int8", 8), ("int4", 4)])
def test_rows_are_quantised_to_the_bytes_of_fbgemm(ops, word, bits, dim):
    import torch

    rows = held(odd_rows(dim))
    expected = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(torch.from_numpy(rows), bits).numpy()
    found = encoding.encode_rows(rows, word)
    either = mixed_zeros(rows)
    assert 0 < either.sum() < len(rows) / 4
    np.testing.assert_array_equal(found[~either], expected[~either])
    # FBGEMM's bias is the zero that its vector instructions happen to find.
    differs = found[either] != expected[either]
    assert not differs[:, :-1].any()
    assert np.isin(found[either][:, -1], [0, 0x80]).all()
    decoded = ops.FusedNBitRowwiseQuantizedSBHalfToFloat(torch.from_numpy(found), bits).numpy()
    np.testing.assert_array_equal(decoded, encoding.decode_rows(found, word, dim))


@pytest.mark.parametrize("dim", [4, 8, 64, 100])
@pytest.mark.parametrize("word", ["int8", "int4"])
def test_fbgemms_tables_take_rows_with_scale_and_bias_in_front(ops, word, dim):
    import torch
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    rows = encoding.encode_rows(held(odd_rows(dim)), word)
    front = fbgemm.to_front(rows, dim, word)
    kind = {"int8": SparseType.INT8, "int4": SparseType.INT4}[word]
    table = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("table", len(rows), dim, kind, EmbeddingLocation.HOST)],
        device="cpu",
        output_dtype=SparseType.FP32,
    )
    table.initialize_weights()
    ((weights, _),) = table.split_embedding_weights(split_scale_shifts=False)
    weights.copy_(torch.from_numpy(fbgemm.to_front(rows, dim, word, weights.shape[1])))
    keys = torch.arange(len(rows) + 1, dtype=torch.int32)
    decoded = table(keys[:-1], keys).numpy()
    np.testing.assert_array_equal(decoded, encoding.decode_rows(rows, word, dim))
    np.testing.assert_array_equal(fbgemm.from_front(weights.numpy(), dim, word), rows)
    np.testing.assert_array_equal(fbgemm.from_front(front, dim, word), rows)
    aligned = fbgemm.to_front(rows, dim, word, 128)
    assert aligned.shape == (len(rows), 128)
    assert not aligned[:, front.shape[1] :].any()
    np.testing.assert_array_equal(fbgemm.from_front(aligned, dim, word), rows)


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 101])
def test_scale_and_bias_of_32_bits_there_and_back(ops, dim):
    import torch

    rows = encoding.encode_rows(held(odd_rows(dim)), "int8")
    fused = fbgemm.to_fused(rows)
    decoded = ops.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(fused)).numpy()
    np.testing.assert_array_equal(decoded, encoding.decode_rows(rows, "int8", dim))
    np.testing.assert_array_equal(fbgemm.from_fused(fused), rows)


@pytest.mark.parametrize("dim", [3, 4, 8, 64, 101])
def test_rows_that_fbgemm_has_fused_are_requantised_only_when_told(ops, dim):
    import torch

    vectors = np.random.default_rng(0).normal(size=(50, dim)).astype(np.float32)
    fused = ops.FloatToFused8BitRowwiseQuantized(torch.from_numpy(vectors)).numpy()
    with pytest.raises(ValueError, match=r"row 0 has scale .* requantize_fused decodes"):
        fbgemm.from_fused(fused)
    decoded = ops.Fused8BitRowwiseQuantizedToFloat(torch.from_numpy(fused)).numpy()
    found = fbgemm.requantize_fused(fused, "float32").view(np.float32)
    np.testing.assert_allclose(found, decoded, atol=2e-6, rtol=0)  # FBGEMM rounds once, we twice
    np.testing.assert_array_equal(
        fbgemm.requantize_fused(fused), encoding.encode_rows(found, "int8")
    )
    # Rows whose scale and bias are float16 numbers are taken as they are.
    whole = np.arange(0, 256, dtype=np.float32)[None, :] * 0.5 - 3
    fused = ops.FloatToFused8BitRowwiseQuantized(torch.from_numpy(whole)).numpy()
    np.testing.assert_array_equal(
        encoding.decode_rows(fbgemm.from_fused(fused), "int8", 256), whole
    )


def test_layouts_without_fbgemm():
    """Where fbgemm_gpu is not installed, the layouts are still those of its documentation."""
    row = np.array([[1, 2, 3, 0x00, 0x3C, 0x00, 0xC0]], np.uint8)  # scale 1, bias -2
    front = [[0x00, 0x3C, 0x00, 0xC0, 1, 2, 3]]
    assert fbgemm.to_front(row, 3, "int8").tolist() == front
    assert fbgemm.from_front(np.array(front, np.uint8), 3, "int8").tolist() == row.tolist()
    fused = [[1, 2, 3, *np.array([1, -2], "<f4").view(np.uint8)]]
    assert fbgemm.to_fused(row).tolist() == fused
    assert fbgemm.from_fused(np.array(fused, np.uint8)).tolist() == row.tolist()


def test_what_is_no_row_is_refused():
    rows = np.zeros((2, 7), np.uint8)
    with pytest.raises(ValueError, match=r"from_front: rows must be uint8 \[n, at least 8\]"):
        fbgemm.from_front(rows, 4, "int8")
    with pytest.raises(ValueError, match=r"to_front: rows must be uint8 \[n, 8\], got uint8"):
        fbgemm.to_front(rows, 4, "int8")
    with pytest.raises(ValueError, match="to_front: row_bytes must be >= 7 for dim 3, got 6"):
        fbgemm.to_front(rows, 3, "int8", 6)
    with pytest.raises(ValueError, match="rows of int8 and int4; got 'float32'"):
        fbgemm.from_front(rows, 3, "float32")
    rows[1, :4] = np.array([np.inf, 0], "<f2").view(np.uint8)
    with pytest.raises(ValueError, match="row 1 has scale inf and bias 0"):
        fbgemm.from_front(rows, 3, "int8")
    wide = np.array([[1e30, 0]], "<f4").view(np.uint8)
    with pytest.raises(ValueError, match=r"row 0 has scale 1.*e.30 and bias 0, which are not both"):
        fbgemm.from_fused(np.concatenate([np.zeros((1, 3), np.uint8), wide], 1))
