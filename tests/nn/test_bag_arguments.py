"""EmbeddingBag accepts the arguments that a form of input needs, and refuses all others."""

import pytest
import torch

from sparsekit import DistributedEmbedding, EmbeddingBag

T = torch.tensor
IDS, BAGS, OFFSETS, ONES = T([4, 5, 4, 9]), T([[4, 5], [4, 9]]), T([0, 2]), torch.ones(4)


@pytest.mark.parametrize(
    ("mode", "arguments", "error", "message"),
    [
        ("mean", (BAGS, None, ONES.view(2, 2)), NotImplementedError, "mode='sum', .*'mean'"),
        ("max", (BAGS, None, ONES.view(2, 2)), NotImplementedError, "mode='sum', .*'max'"),
        ("sum", (BAGS, None, ONES), ValueError, r"shapes are torch.Size\(\[4\]\) and .*\[2, 2\]"),
        (
            "sum",
            (IDS, OFFSETS, ONES[:3]),
            ValueError,
            r"shapes are .*\[3\]\) and .*\[4\]",
        ),
        ("sum", (IDS, OFFSETS, [1.0] * 4), ValueError, r"shapes are None and .*\[4\]"),
        ("sum", (IDS.tolist(), OFFSETS), TypeError, "input must be a tensor, got list"),
        ("sum", ((IDS, OFFSETS),), TypeError, "input must be a tensor, got tuple"),
        ("sum", (BAGS, OFFSETS), ValueError, "offsets must be None for a 2-D input"),
        ("sum", (T(4), OFFSETS), ValueError, r"\[n\] with offsets, or .* got shape \(\)"),
        ("sum", (BAGS[None], None), ValueError, r"\[n\] with offsets, .* shape \(1, 2, 2\)"),
        ("sum", (IDS,), ValueError, "a 1-D input needs offsets, .* got None"),
        ("sum", (IDS, [0, 2]), ValueError, r"a 1-D input needs offsets, .* got \[0, 2\]"),
        ("sum", (IDS, OFFSETS[None]), ValueError, r"offsets must be 1-D, got shape \(1, 2\)"),
        ("sum", (IDS, OFFSETS + 1), ValueError, r"offsets\[0\] is 1"),
        ("sum", (IDS, OFFSETS.float()), TypeError, "offsets must be int64 or int32, got .*float32"),
    ],
)
def test_what_is_refused(mode, arguments, error, message):
    layer = EmbeddingBag(20, 3, mode=mode, name="n")
    with pytest.raises(error, match=f"^n: .*{message}"):
        layer(*arguments)
    assert len(layer.table) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_with_and_without_their_end(dtype):
    layer = EmbeddingBag(20, 3, mode="sum", name="n")
    expected, offsets = layer(BAGS), OFFSETS.to(dtype)
    assert torch.equal(layer(IDS, offsets), expected)
    assert torch.equal(layer(IDS, offsets, ONES), expected)
    layer = EmbeddingBag(20, 3, mode="sum", include_last_offset=True, name="n")
    assert torch.equal(layer(IDS, T([0, 2, 4], dtype=dtype)), expected)
    with pytest.raises(ValueError, match=r"^n: offsets must end at len\(values\)=4"):
        layer(IDS, offsets)


def test_options_of_bags_beside_vectors():
    vectors = torch.ones(3, 2, dtype=torch.float64)
    layer = EmbeddingBag.from_pretrained(vectors, max_norm=2.0, norm_type=1.0, padding_idx=2)
    assert (layer.max_norm, layer.norm_type, layer.padding_idx) == (2.0, 1.0, 2)
    assert layer.weight.dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"^n: the layer is on meta"):
        EmbeddingBag.from_pretrained(vectors.to("meta"), name="n")


def test_a_strategy_of_slots_is_checked():
    with pytest.raises(ValueError, match=r"^n: strategy must be one of auto, .*; got 'near'"):
        DistributedEmbedding("sum", 20, 3, 1, strategy="near", name="n")
    with pytest.raises(ValueError, match=r"^n: max_feature_num must be in .*, got 0"):
        DistributedEmbedding("sum", 20, 3, 1, max_feature_num=0, name="n")
    assert DistributedEmbedding("sum", 20, 3, 1, strategy="reduce_scatter").max_nnz is None
