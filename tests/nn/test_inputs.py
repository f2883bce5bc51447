"""Empty inputs and inputs at exact limits work, and errors name the position of a fault."""

import warnings

import numpy as np
import pytest
import torch

import sparsekit
from sparsekit.lookup import inputs as forms
from sparsekit.lookup.feature_matrix import read_scipy_csr
from sparsekit.lookup.inputs import Bags, check_bags, read_bags
from sparsekit.lookup.request import one_by_one
from sparsekit.lookup.slots import NO_LIMIT

from .keyed import Keyed

T = torch.tensor
CPU = torch.device("cpu")
VALUES, OFFSETS, ONES = T([4, 5, 4, 90]), T([0, 2, 2, 4]), torch.ones(4)


def strided_nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this layout is outdated
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(2)], layout=torch.strided)


def coo(values):
    places = T([[0, 0, 2, 2], [0, 1, 0, 1]])
    return torch.sparse_coo_tensor(places, values, (3, 2), check_invariants=True)


@pytest.mark.parametrize(
    ("inputs", "weights", "error", "message"),
    [
        ((VALUES, OFFSETS), ONES[:, None], ValueError, r"each of the 4 keys, got shape \(4, 1\)"),
        ((VALUES, OFFSETS), strided_nested(), TypeError, "got a nested tensor of layout"),
        (VALUES.view(1, 2, 2), strided_nested(), TypeError, "got a nested tensor of layout"),
        (VALUES.view(1, 2, 2), ONES.view(2, 1, 2), ValueError, r"got shape \(2, 1, 2\)"),
        (coo(VALUES), coo(ONES).to("meta"), ValueError, "sample_weights is on meta"),
    ],
)
def test_weights_of_another_form_are_refused(inputs, weights, error, message):
    with pytest.raises(error, match=f"^movies: .*{message}"):
        read_bags(inputs, weights, "movies", CPU)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_of_any_floating_dtype(dtype):
    layer = sparsekit.DistributedEmbedding("sum", 100, 4, 1, name="movies")
    out = layer((VALUES, OFFSETS), 2 * ONES.to(dtype))
    torch.testing.assert_close(out, 2 * layer((VALUES, OFFSETS)))


def test_a_group_refuses_one_dimension_for_bags():
    group = sparsekit.EmbeddingGroup({"seen": sparsekit.EmbeddingBag(100, 4, name="movies")})
    with pytest.raises(ValueError, match=r"^movies: a dense input must have shape .* got \(4,\)"):
        group({"seen": VALUES})


@pytest.mark.parametrize("shape", [(0, 2, 3), (3, 2, 0), (0, 2, 0), (0, 2, 1)])
def test_a_dense_input_without_keys(shape):
    layer = sparsekit.DistributedEmbedding("mean", 100, 4, 2, max_feature_num=3, name="movies")
    out = layer(torch.empty(shape, dtype=torch.int64))
    assert out.shape == (shape[0], 2, 4)
    assert not out.any()


def test_large_batches_are_not_kept(monkeypatch):
    monkeypatch.setattr(forms, "_MOST_KEPT", 4)
    kept, again = (forms._equal_offsets(4, 3, CPU) for _ in range(2))
    assert kept is again
    large, again = (forms._equal_offsets(5, 3, CPU) for _ in range(2))
    assert large is not again
    assert large.tolist() == [0, 3, 6, 9, 12, 15]


def checked(offsets, slots=1, most=NO_LIMIT, of_sample=None):
    return check_bags(Bags(VALUES, T(offsets), None), "movies", slots, most, of_sample)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1, 2, 4],), r"offsets must start at 0, but offsets\[0\] is -1"),
        (([0, 1, 2, 4], 2, NO_LIMIT, 3), "the number of bags must be a multiple of slot_num=2"),
        (([0, 1, 4], 1, 2), "bag 1 has 3 keys, more than max_nnz=2"),
        (([0, 2, 2, 4], 1, 1), "bag 0 has 2 keys"),
        (([0, 1, 2, 4], 1, 1), "bag 2 has 2 keys"),
        (([0, 1, 4], 1, NO_LIMIT, 1), "sample 1 has 3 keys, more than max_feature_num=1"),
    ],
)
def test_errors_name_the_first_bag_beyond_a_limit(arguments, message):
    with pytest.raises(ValueError, match=f"^movies: {message}"):
        checked(*arguments)


def test_limits_may_be_reached():
    assert checked([0, 2, 4], 1, 2, 2).count == 2
    assert checked([0, 2, 4], 2, 2, 4).count == 2


def test_checked_offsets_are_int64():
    bags = Bags(VALUES, T([0, 2, 4], dtype=torch.int32), None)
    assert check_bags(bags, "movies", 1, 2, None).offsets.dtype == torch.int64


@pytest.mark.parametrize("output", ["dict", "concatenated"])
def test_a_key_out_of_range_is_named_by_its_position_in_the_whole_tensor(output):
    layers = {
        name: sparsekit.DistributedEmbedding("sum", 50, 4, 1, name=name, use_hashtable=False)
        for name in ("a", "b")
    }
    group = sparsekit.EmbeddingGroup(layers, {"a": "a", "b": "b"}, output)
    inputs = Keyed(["a", "b"], T([1, 2, 3, 4, 5, 77]), T([0, 1, 3, 4, 6]), None)
    with pytest.raises(IndexError, match=r"^b: feature 'b': key 77 at position 5 is outside"):
        group(inputs)


def test_a_feature_matrix_is_read_to_the_device():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.csr_array(np.eye(3, dtype=np.int64))
    parts = read_scipy_csr(matrix, None, "movies", torch.device("meta"))
    assert [part.device.type for part in parts] == ["meta"] * 3
    assert parts[2].dtype == torch.float32
    with pytest.raises(TypeError, match="at most 64 bits, got float128"):
        read_scipy_csr(matrix.astype(np.longdouble), None, "movies", CPU)


def pooled(slot_num=1, combiner="sum", **settings):
    return sparsekit.DistributedEmbedding(combiner, 100, 4, slot_num, name="movies", **settings)


def test_offsets_without_an_element_are_refused_with_one_slot_too():
    with pytest.raises(ValueError, match=r"^movies: offsets must start at 0, .* is missing"):
        pooled()((VALUES[:0], VALUES[:0]))


@pytest.mark.parametrize("combiner", ["sum", "max"])
def test_bags_by_slot_give_a_contiguous_output(combiner):
    layer = pooled(2, combiner)
    out = layer(Keyed(["a", "b"], VALUES, T([0, 1, 2, 3, 4]), None))
    assert out.is_contiguous()
    assert torch.equal(out[0], layer.vectors(VALUES[[0, 2]]))


def test_a_request_is_checked_once():
    request = pooled(use_hashtable=False).request((VALUES, OFFSETS))
    assert not request.checked
    request.check()
    assert request.checked
    for known in (request, one_by_one(request.table, VALUES)):
        known.bags = Bags(VALUES + 1000, T([0, 4]), None)
        known.check()


def test_weights_are_pooled_with_their_gradient_only_where_one_is_needed():
    request = pooled().request((VALUES, OFFSETS), ONES.clone().requires_grad_())
    assert request.pooled_here
    with torch.no_grad():
        assert not request.pooled_here


def test_a_feature_counts_the_keys_of_each_sample():
    layer = pooled(max_feature_num=2)
    group = sparsekit.EmbeddingGroup({"seen": layer}, {"seen": "seen"})
    assert group({"seen": (VALUES, T([0, 2, 4]))})["seen"].shape == (2, 4)
    assert group({"seen": (VALUES[:0], T([0]))})["seen"].shape == (0, 4)
    with pytest.raises(ValueError, match=r"^movies: feature 'seen': sample 1 has 3 keys"):
        group({"seen": (VALUES, T([0, 1, 4]))})


@pytest.mark.parametrize(
    ("combiner", "settings"),
    [
        ("sum", {"max_nnz": 1, "truncate": True}),
        ("sum", {"max_nnz": [1, None]}),
        (["sum", "mean"], {}),
    ],
)
def test_bags_are_checked_before_slots_change_them(combiner, settings):
    layer = sparsekit.DistributedEmbedding(combiner, 100, 4, 2, name="movies", **settings)
    assert torch.equal(layer(VALUES.view(2, 2, 1)), layer.vectors(VALUES.view(2, 2)))
    with pytest.raises(ValueError, match=r"^movies: offsets must not decrease"):
        layer((VALUES, T([0, 3, 1, 4, 4])))


def test_jagged_keys_on_another_device_are_refused():
    keys = torch.nested.nested_tensor_from_jagged(VALUES.to("meta"), OFFSETS.to("meta"))
    with pytest.raises(ValueError, match=r"^movies: inputs is on meta, the weight on cpu"):
        sparsekit.Embedding(100, 4, name="movies")(keys)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (coo(VALUES), TypeError, "keys must be a dense tensor, got layout torch.sparse_coo"),
        (VALUES, TypeError, "keys must be torch.int32, got torch.int64"),
        (VALUES.short(), TypeError, "keys must be int64 or int32, got torch.int16"),
        (VALUES.tolist(), TypeError, "keys must be a tensor, got list"),
        (VALUES.int().to("meta"), ValueError, "keys is on meta, the weight on cpu"),
    ],
)
def test_keys_that_are_no_dense_int32(keys, error, message):
    layer = sparsekit.Embedding(100, 4, key_dtype=torch.int32, name="movies")
    with pytest.raises(error, match=f"^movies: {message}"):
        layer(keys)


@pytest.mark.parametrize("make", [sparsekit.Embedding, sparsekit.EmbeddingBag])
def test_no_keys_need_no_range(make):
    layer = make(10, 4, use_hashtable=False, padding_key=-1)
    assert layer(VALUES[:0].view(0, 2)).numel() == 0
    assert layer.vectors(VALUES[:0]).shape == (0, 4)
