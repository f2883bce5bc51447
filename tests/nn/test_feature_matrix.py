"""Layers accept a CSR feature matrix: columns are keys, values are weights."""

import numpy as np
import pytest
import torch
from peak_memory import forget_peak, peak

import sparsekit
from sparsekit.hashing import SplitHashEncoder

# A machine with a GPU may have no scipy.
sparse = pytest.importorskip("scipy.sparse")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")


def make_matrix(rows=40, columns=60, dtype="float32"):
    draw = np.random.default_rng(1)
    dense = draw.integers(-3, 4, (rows, columns)) * (draw.random((rows, columns)) < 0.2)
    dense[3] = 0  # an empty row
    return sparse.csr_array(dense.astype(dtype))


def torch_of(matrix):
    parts = matrix.indptr, matrix.indices, matrix.data
    return torch.sparse_csr_tensor(*map(torch.from_numpy, parts), matrix.shape)


def make_layer(**settings):
    return sparsekit.DistributedEmbedding("sum", 100, 5, 1, name="wide", **settings)


def product(matrix, layer):
    table = layer.vectors(torch.arange(matrix.shape[1])).double()
    return torch.from_numpy(matrix.toarray().astype(float)) @ table


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int8", "bool"])
def test_it_equals_the_dense_product(dtype, use_hashtable):
    matrix, layer = make_matrix(dtype=dtype), make_layer(use_hashtable=use_hashtable)
    forms = [matrix, sparse.csr_matrix(matrix)]
    if dtype.startswith("float"):
        forms.append(torch_of(matrix))
    for form in forms:
        out = layer(form)
        assert out.shape == (40, 1, 5)
        assert (out[:, 0] - product(matrix, layer)).abs().max() < 1e-6


def test_torch_tensors_of_integers_have_keys_for_values_still():
    matrix = make_matrix(dtype="int64")
    layer = make_layer()
    values, offsets = torch.from_numpy(matrix.data), torch.from_numpy(matrix.indptr)
    assert torch.equal(layer(torch_of(matrix)), layer((values, offsets)))


def test_gradients_reach_rows_and_values():
    matrix, layer = make_matrix(), make_layer(use_hashtable=False)
    values = torch.from_numpy(matrix.data).requires_grad_()
    indptr, indices = torch.from_numpy(matrix.indptr), torch.from_numpy(matrix.indices)
    grad = torch.randn(40, 1, 5)
    layer(torch.sparse_csr_tensor(indptr, indices, values, matrix.shape)).backward(grad)
    dense = torch.from_numpy(matrix.toarray())
    expected = dense.T @ grad[:, 0]
    assert (layer.weight.grad.to_dense()[:60] - expected).abs().max() < 1e-5
    of_values = grad[:, 0] @ layer.weight[:60].detach().T
    rows, columns = matrix.nonzero()
    assert (values.grad - of_values[rows, columns]).abs().max() < 1e-6


def test_entries_in_any_order_and_memory_that_is_not_to_be_written():
    parts = np.array([1.0, 2.0, 3.0]), np.array([2, 0, 2]), np.array([0, 3])
    matrix = sparse.csr_array(parts, shape=(1, 3))
    for part in (matrix.data, matrix.indices, matrix.indptr):
        part.flags.writeable = False
    layer = make_layer()
    table = layer.vectors(torch.arange(3))
    torch.testing.assert_close(layer(matrix)[0, 0], 4 * table[2] + 2 * table[0])


def test_a_group_takes_them_by_name_and_rows_are_bags_of_slots():
    matrix = make_matrix()
    layers = {
        "wide": make_layer(),
        "slots": sparsekit.DistributedEmbedding("sum", 100, 3, 4, name="slots"),
    }
    out = sparsekit.EmbeddingGroup(layers)({"wide": matrix, "slots": torch_of(matrix)})
    assert (out["wide"][:, 0] - product(matrix, layers["wide"])).abs().max() < 1e-6
    assert out["slots"].shape == (10, 4, 3)
    assert (out["slots"].view(40, 3) - product(matrix, layers["slots"])).abs().max() < 1e-6


@pytest.mark.parametrize("to", ["torch", "scipy"])
@pytest.mark.parametrize("signed", [False, True])
def test_what_the_encoder_makes(to, signed):
    encoder = SplitHashEncoder({"day": 7, "item": 1000}, signed=signed)
    layer = sparsekit.DistributedEmbedding("sum", encoder.width, 5, 1, name="wide")
    columns = {"day": [3, None, "x"], "item": ["a", "b", b"a"]}
    expected = product(encoder.encode(columns, to="scipy"), layer)
    assert (layer(encoder.encode(columns, to=to))[:, 0] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("to", ["torch", "scipy"])
def test_no_dense_matrix_is_made(to):
    """Memory stays far below the 21 GB of a dense 20,000 x 262,144 matrix; entries take 1.6 MB."""
    encoder = SplitHashEncoder({"a": 2**32})
    layer = sparsekit.DistributedEmbedding("sum", 120_000, 4, 1, name="wide")
    columns = {"a": np.arange(20_000)}
    layer(encoder.encode({"a": [0]}, to=to))
    before = forget_peak()
    layer(encoder.encode(columns, to=to)).sum().backward()
    assert peak() - before < 64 * 2**20


@pytest.mark.parametrize(
    ("make", "weights", "error", "message"),
    [
        (make_matrix, torch.ones(3), ValueError, "inputs has weights of its own"),
        (
            lambda: torch_of(make_matrix()),
            torch.ones(3),
            ValueError,
            "inputs has weights of its own",
        ),
        (lambda: make_matrix(dtype="complex64"), None, TypeError, "real numbers .* got complex64"),
        (lambda: torch.ones(2, 2, 2).to_sparse_csr(), None, ValueError, r"got \(2, 2, 2\)"),
        (lambda: sparse.csr_array(np.ones(3)), None, ValueError, r"got \(3,\)"),
        (lambda: make_matrix().tocoo(), None, TypeError, "a CSR matrix of scipy"),
        (lambda: make_matrix().tocsc(), None, TypeError, "a CSR matrix of scipy"),
    ],
)
def test_what_is_refused(make, weights, error, message):
    with pytest.raises(error, match=f"wide: .*{message}"):
        make_layer()(make(), weights)
