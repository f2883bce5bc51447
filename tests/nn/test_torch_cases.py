"""torch's own tests of nn.Embedding and nn.EmbeddingBag pass, case by case, with our drop-ins.

Ids are below num_embeddings, as torch requires. A torch layer is the reference; ours has the
same vectors, with each id in the row of the same number, with rows in another order, or without
a hash table.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsekit

T = torch.tensor
INDEX_DTYPES = (torch.int64, torch.int32)
PAIRS = list(itertools.product(INDEX_DTYPES, INDEX_DTYPES))
STORAGES = ("in order", "in another order", "row numbers")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}

NO_WEIGHT = "the weight is a layer's own, and never of another shape"
NO_HALF = "there are no float16 rows: test_refused"
NO_TWICE = "lookups cannot be differentiated twice, which the rest of sparsekit cannot either"

# Name of torch's test, our tests that cover it, and how they differ or why the test is left out.
#
# test/nn/test_embedding.py:
CASES = [
    ("test_embedding_max_norm_unsorted_repeating_indices", ("test_max_norm",), ""),
    ("test_embedding_sparse_basic", ("test_sparse_gradient",), ""),
    ("test_embedding_sparse_empty_tensor", ("test_empty_input",), "a table has a row and a column"),
    ("test_move_sparse_half_embedding", ("test_moved",), NO_HALF),
    ("test_embedding_max_norm", ("test_max_norm",), ""),
    ("test_embedding_from_pretrained", ("test_from_pretrained",), "rows are floating point"),
    ("test_embedding_bag_from_pretrained", ("test_from_pretrained",), ""),
    (
        "test_embedding_from_pretrained_padding_idx",
        ("test_pretrained_padding",),
        "a padding's vector is zeros: another one is refused",
    ),
    ("test_embedding_bag_from_pretrained_padding_idx", ("test_pretrained_padding",), ""),
    ("test_embedding_from_pretrained_options", ("test_max_norm",), ""),
    ("test_embedding_functional", ("test_vectors",), ""),
    ("test_large_tensors", (), "needs a GPU of 40 GB"),
    ("test_embedding_bag_functional", ("test_bags_of_equal_length",), ""),
    ("test_embedding_bag_padding_idx_error", ("test_padding_out_of_range",), "a ValueError"),
    ("test_embeddingbag_from_pretrained", ("test_from_pretrained",), ""),
    ("test_embeddingbag_from_pretrained_options", ("test_max_norm_of_bags",), ""),
    (
        "test_embeddingbag_include_last_offset",
        ("test_last_offset",),
        "offsets that do not end with the input are refused, where torch corrects them",
    ),
    ("test_embedding_dense_grad", ("test_vectors",), f"gradients are sparse; {NO_TWICE}"),
    ("test_embedding_scalar_weight_error", (), NO_WEIGHT),
    ("test_embedding_backward", ("test_gradients_add_up",), "rows of a gradient are distinct"),
    ("test_embedding_max_norm_backward", ("test_max_norm",), NO_TWICE),
    ("test_embedding_max_norm_fwd_AD", (), "there is no forward AD"),
    (
        "test_embedding_padding_idx",
        ("test_vectors", "test_nothing_but_padding", "test_padding_out_of_range"),
        f"a padding's vector cannot be changed; {NO_TWICE}",
    ),
    ("test_embedding_bag_1D_padding_idx", ("test_ragged_bags_with_padding",), ""),
    ("test_embedding_bag_2D_padding_idx", ("test_bags_of_equal_length",), ""),
    ("test_embedding_max_norm_device", ("test_max_norm",), NO_HALF),
    ("test_embedding_bag_empty_input", ("test_empty_input",), ""),
    (
        "test_embedding_bag_out_of_bounds_idx",
        ("test_out_of_range",),
        "with the hash table any number is an id",
    ),
    ("test_embedding_bag_dimension_errors", ("test_dimensions",), NO_WEIGHT),
    (
        "test_EmbeddingBag_per_sample_weights_failures",
        ("test_sample_weights_refused",),
        "sample weights may be of another dtype than the rows",
    ),
    (
        "test_EmbeddingBag_empty_per_sample_weights_and_offsets",
        ("test_known_example_weighted", "test_empty_input"),
        NO_HALF,
    ),
    (
        "test_EmbeddingBag_per_sample_weights_and_offsets",
        ("test_known_example_weighted",),
        NO_HALF,
    ),
    (
        "test_EmbeddingBag_per_sample_weights_and_new_offsets",
        ("test_known_example_weighted", "test_known_example"),
        NO_HALF,
    ),
    (
        "test_EmbeddingBag_per_sample_weights_and_no_offsets",
        ("test_bags_of_equal_length_weighted",),
        "",
    ),
    (
        "test_embedding_bag_device",
        ("test_known_example", "test_bags_of_equal_length", "test_illegal_combinations"),
        NO_HALF,
    ),
    ("test_embedding_bag_non_contiguous_weight", (), NO_WEIGHT),
    ("test_embedding_bag_bfloat16", ("test_known_example",), ""),
    ("test_embedding_bag_half", (), NO_HALF),
    ("test_embedding_bag_per_sample_weights_grad", ("test_who_needs_a_gradient",), ""),
    # torch/testing/_internal/common_modules.py:
    ("module_inputs_torch_nn_Embedding", ("test_vectors",), ""),
    (
        "module_error_inputs_torch_nn_Embedding",
        ("test_out_of_range", "test_refused"),
        "a float index is a TypeError, a negative size a ValueError",
    ),
    # torch/testing/_internal/common_nn.py:
    ("Embedding, Embedding_discontiguous, Embedding_sparse", ("test_vectors",), ""),
    ("EmbeddingBag_mean, _sum, _max, _sparse", ("test_bags_of_equal_length",), ""),
    ("EmbeddingBag_discontiguous", ("test_bags_of_equal_length",), ""),
    ("EmbeddingBag_{mean,sum,max}_padding_idx", ("test_bags_of_equal_length",), ""),
    # torch/testing/_internal/common_methods_invocations.py:
    (
        "sample_inputs_embedding",
        ("test_vectors", "test_max_norm", "test_refused"),
        "scale_grad_by_freq",
    ),
    (
        "sample_inputs_embedding_bag",
        ("test_bags_of_equal_length", "test_ragged_bags_with_padding", "test_max_norm_of_bags"),
        "scale_grad_by_freq",
    ),
    ("error_inputs_embedding", (), NO_WEIGHT),
]


@pytest.fixture(params=STORAGES)
def storage(request):
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def like(theirs, storage):
    """Return a drop-in with the same vectors as a torch layer."""
    weight = theirs.weight.detach()
    keywords = {"padding_idx": theirs.padding_idx, "dtype": weight.dtype}
    keywords |= {"max_norm": theirs.max_norm, "norm_type": theirs.norm_type}
    drop_in = sparsekit.Embedding
    if isinstance(theirs, nn.EmbeddingBag):
        drop_in = sparsekit.EmbeddingBag
        keywords |= {"mode": theirs.mode, "include_last_offset": theirs.include_last_offset}
    if storage == "in order":
        return drop_in.from_pretrained(weight, freeze=False, **keywords)
    ours = drop_in(*weight.shape, use_hashtable=storage != "row numbers", **keywords)
    ids = torch.randperm(len(weight))
    ours.assign(ids, weight[ids])
    return ours


def gradient_by_id(ours):
    grad = ours.weight.grad
    assert grad.is_sparse
    grad = grad.to_dense()
    return grad if ours.table is None else grad[ours.table.find(torch.arange(len(grad)))]


def assert_close(ours, theirs, scale=1):
    tolerance = TOLERANCE[theirs.dtype] * scale
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def check(theirs, storage, *call, **keywords):
    """Check that outputs and gradients equal torch's; return our layer."""
    ours = like(theirs, storage)
    weights = keywords.get("per_sample_weights")
    own = {}
    if weights is not None:
        own["per_sample_weights"] = weights.detach().clone().requires_grad_(weights.requires_grad)
    expected, got = theirs(*call, **keywords), ours(*call, **own)
    assert got.dtype == expected.dtype
    assert_close(got, expected)
    grad = torch.rand_like(expected)
    theirs.weight.grad = None
    expected.backward(grad)
    got.backward(grad)
    expected = theirs.weight.grad
    expected = expected.to_dense() if expected.is_sparse else expected
    assert_close(gradient_by_id(ours), expected, scale=5)
    if weights is not None and weights.requires_grad:
        assert_close(own["per_sample_weights"].grad, weights.grad, scale=5)
    return ours


def test_every_case_has_a_test_or_a_reason():
    names = [case for case, *_ in CASES]
    assert len(set(names)) == len(names)
    for case, tests, rest in CASES:
        assert tests or rest, case
        assert all(callable(globals().get(test)) for test in tests), case


INDICES = {
    "0-D": lambda: T(3),
    "1-D": lambda: torch.randint(8, (5,)),
    "2-D": lambda: torch.randint(8, (5, 5)),
    "repeats": lambda: T([[0, 1, 1, 2], [3, 5, 7, 1]]),
    "4-D": lambda: torch.randint(8, (2, 1, 3, 2)),
    "discontiguous": lambda: torch.randint(8, (1, 512)).expand(7, 512),
    "transposed": lambda: torch.randint(8, (4, 3)).T,
}


@pytest.mark.pairs
@pytest.mark.parametrize("padding_idx", [None, 0, 2, -2])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("indices", INDICES)
def test_vectors(storage, indices, dtype, padding_idx):
    theirs = nn.Embedding(8, 3, padding_idx, dtype=dtype)
    ids = INDICES[indices]()
    ours = check(theirs, storage, ids)
    out = ours(ids.int())
    assert out.shape == (*ids.shape, 3)
    assert_close(out, theirs(ids))
    if padding_idx is not None:
        assert ours.padding_idx == padding_idx % 8
        assert not out[ids == padding_idx % 8].any()


def test_sparse_gradient():
    layer = sparsekit.Embedding(10, 20, sparse=True)
    layer(T([[0, 2, 4, 5], [4, 3, 0, 9]])).sum().backward()
    assert layer.weight.grad.is_sparse
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize("n", [1, 2, 1000])
@pytest.mark.parametrize("others", [[], [1, 3], [2]])
def test_nothing_but_padding(storage, others, n):
    theirs = nn.Embedding(5, 2, padding_idx=0)
    ours = check(theirs, storage, T(others + [0] * n))
    assert not gradient_by_id(ours)[0].any()


def test_gradients_add_up(storage):
    theirs = nn.Embedding(10, 3, dtype=torch.float64)
    ours = like(theirs, storage)
    for ids in (T([7, 1, 3]), T([8, 1, 3])):
        for layer in (theirs, ours):
            layer(ids).sum().backward()
    assert_close(gradient_by_id(ours), theirs.weight.grad)


def test_moved():
    layer = sparsekit.Embedding(10, 3, sparse=True)
    assert layer.weight.dtype == torch.get_default_dtype()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert (layer.num_embeddings, layer.embedding_dim) == (10, 3)
    assert layer(T([1])).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_from_pretrained(dtype):
    vectors = T([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=dtype)
    layer = sparsekit.Embedding.from_pretrained(vectors)
    assert torch.equal(layer.weight, vectors)
    assert not layer.weight.requires_grad
    assert torch.equal(layer(T([0, 1])), vectors)
    assert sparsekit.Embedding.from_pretrained(vectors, freeze=False).weight.requires_grad

    bag = sparsekit.EmbeddingBag.from_pretrained(vectors)
    assert torch.equal(bag(T([0, 1]), torch.arange(2)), vectors)
    for mode in ("mean", "sum", "max"):
        bag = sparsekit.EmbeddingBag.from_pretrained(vectors, mode=mode)
        expected = F.embedding_bag(T([[0, 1]]), vectors, mode=mode)
        assert_close(bag(T([[0, 1]])), expected)


def test_pretrained_padding():
    vectors = torch.rand(4, 3, requires_grad=True)
    bag = sparsekit.EmbeddingBag.from_pretrained(vectors, padding_idx=2)
    assert torch.equal(bag.weight, vectors)
    assert_close(bag(T([[2, 1]])), vectors[1:2])
    with pytest.raises(ValueError, match="padding_idx=2 is not zeros"):
        sparsekit.Embedding.from_pretrained(vectors, padding_idx=-2)
    with torch.no_grad():
        vectors[2] = 0
    layer = sparsekit.Embedding.from_pretrained(vectors, padding_idx=-2)
    assert torch.equal(layer(torch.arange(4)), vectors)


@pytest.mark.parametrize("drop_in", [sparsekit.Embedding, sparsekit.EmbeddingBag])
@pytest.mark.parametrize("padding_idx", range(-6, 6))
def test_padding_out_of_range(drop_in, padding_idx):
    if -4 <= padding_idx < 4:
        assert drop_in(4, 3, padding_idx=padding_idx).padding_idx == padding_idx % 4
    else:
        with pytest.raises(ValueError, match="padding_idx must be within num_embeddings"):
            drop_in(4, 3, padding_idx=padding_idx)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
@pytest.mark.parametrize("shape", [(1, 10), (10, 10), (1, 1), (1, 2), (2, 1), (2, 2), (37, 23)])
def test_bags_of_equal_length(storage, shape, mode, dtype):
    ids = torch.randint(10, shape)
    if shape[0] > 1 and shape[1]:
        ids[0] = ids[0, 0]  # so that a bag may consist of padding
    discontiguous = torch.randint(10, (1, 12)).expand(3, 12)
    for padding_idx in {None, *ids.flatten().tolist(), -1}:
        theirs = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=padding_idx, dtype=dtype)
        check(theirs, storage, discontiguous)
        check(theirs, storage, ids.T.contiguous().T)
        offsets = torch.arange(shape[0]) * shape[1]
        check(theirs, storage, ids.reshape(-1), offsets)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows_dim", [(2, 3), (2, 5), (101, 5), (2, 101)])
@pytest.mark.parametrize("trained", [False, True])
def test_bags_of_equal_length_weighted(storage, trained, rows_dim, dtype):
    for shape, index_dtype in itertools.product([(5, 7), (53, 23)], INDEX_DTYPES):
        theirs = nn.EmbeddingBag(*rows_dim, mode="sum", dtype=dtype)
        ids = torch.randint(rows_dim[0], shape, dtype=index_dtype)
        weights = torch.randn(shape, dtype=dtype).softmax(-1).requires_grad_(trained)
        check(theirs, storage, ids, per_sample_weights=weights)


@pytest.mark.parametrize("allpad", [False, True])
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_ragged_bags_with_padding(storage, mode, include_last_offset, allpad):
    lengths = torch.randint(1, 10, (10,))
    lengths[3], lengths[7] = 0, 10
    ids = torch.ones if allpad else lambda n, **k: torch.randint(100, (n,), **k)
    ids = ids(int(lengths.sum()), dtype=torch.int64)
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    offsets = offsets if include_last_offset else offsets[:-1]
    for padding_idx in [*set(ids[:7].tolist()), None]:
        theirs = nn.EmbeddingBag(
            100, 3, mode=mode, include_last_offset=include_last_offset, padding_idx=padding_idx
        )
        check(theirs, storage, ids, offsets)
        if mode == "sum":
            weights = torch.randn(len(ids), requires_grad=True)
            check(theirs, storage, ids, offsets, per_sample_weights=weights)


def known(mode, include_last_offset, dtype, dtypes):
    """Return torch's example with empty bags; the vectors' elements are 1 to 10."""
    theirs = nn.EmbeddingBag(5, 2, mode=mode, include_last_offset=include_last_offset, dtype=dtype)
    theirs.weight.data.copy_(torch.arange(1, 11).view(5, 2))
    offsets = [0, 0, 3, 3, 6, *([6] if include_last_offset else [])]
    return theirs, T([3, 1, 1, 1, 4, 0], dtype=dtypes[0]), T(offsets, dtype=dtypes[1])


@pytest.mark.pairs
@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_known_example(storage, mode, include_last_offset, dtype, dtypes):
    theirs, ids, offsets = known(mode, include_last_offset, dtype, dtypes)
    ours = like(theirs, storage)
    divisor = 3 if mode == "mean" else 1
    full = T([[7, 8], [9, 10]]) if mode == "max" else T([[13, 16]] * 2).double() / divisor
    expected = torch.zeros(5, 2, dtype=dtype)
    expected[[1, 3]] = full.to(dtype)
    out = ours(ids, offsets)
    assert_close(out, expected)
    out.backward(T([[99, 99], [1, 2], [99, 99], [3, 4], [99, 99]], dtype=dtype))
    grad = T([[3, 4], [5, 8], [0, 0], [1, 2], [3, 4]]).double() / divisor
    if mode == "max":
        grad = T([[0, 0], [0, 0], [0, 0], [1, 2], [3, 4]])
    assert_close(gradient_by_id(ours), grad.to(dtype))

    ours.zero_grad()
    out = ours(ids.view(2, 3))
    assert_close(out, full.to(dtype))
    out.backward(T([[1, 2], [3, 4]], dtype=dtype))
    assert_close(gradient_by_id(ours), grad.to(dtype))

    ours.zero_grad()
    ours(ids[:0], offsets[:4] * 0).sum().backward()
    assert not gradient_by_id(ours).any()


@pytest.mark.pairs
@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_known_example_weighted(storage, trained, include_last_offset, dtype, dtypes):
    theirs, ids, offsets = known("sum", include_last_offset, dtype, dtypes)
    weights = torch.randn(6, dtype=dtype, requires_grad=trained)
    check(theirs, storage, ids, offsets, per_sample_weights=weights)
    weights = torch.randn(0, dtype=dtype, requires_grad=trained)
    ours = like(theirs, storage)
    out = ours(ids[:0], offsets * 0, per_sample_weights=weights)
    assert torch.equal(out, torch.zeros(5, 2, dtype=dtype))
    out.sum().backward()
    assert not gradient_by_id(ours).any()
    assert not trained or weights.grad.shape == (0,)


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_empty_input(mode, dtypes):
    layer = sparsekit.EmbeddingBag(4, 3, mode=mode)
    for bags in (1, 2):
        out = layer(input=T([], dtype=dtypes[0]), offsets=torch.zeros(bags, dtype=dtypes[1]))
        assert torch.equal(out, torch.zeros(bags, 3))
        out.sum().backward()
        assert layer.weight.grad._nnz() == 0
    out = layer(torch.empty(3, 0, dtype=dtypes[0]))  # torch's own arange fails here
    assert torch.equal(out, torch.zeros(3, 3))
    layer = sparsekit.Embedding(10, 2)
    out = layer(T([], dtype=dtypes[0]))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


def test_last_offset():
    layer = sparsekit.EmbeddingBag(100, 3, include_last_offset=True, padding_idx=61)
    layer.eval()
    ids = T([0, 1, 2, 3])
    vectors = sparsekit.Embedding(100, 3, seed=int(layer.seed)).eval()(ids)
    expected = torch.stack([vectors[:3].mean(0), vectors[3]])
    assert_close(layer(ids, T([0, 3, 4])), expected)
    with pytest.raises(ValueError, match=r"offsets must end at len\(values\)=4"):
        layer(ids, T([0, 3, 3]))


@pytest.mark.parametrize("ids", [[[-1, 1]], [[11, 8]]])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_out_of_range(mode, padding_idx, ids):
    keywords = {"padding_idx": padding_idx, "use_hashtable": False}
    bag = sparsekit.EmbeddingBag(10, 2, mode=mode, **keywords)
    for dtype in INDEX_DTYPES:
        with pytest.raises(IndexError, match=r"is outside \[0, 10\)"):
            bag(T(ids, dtype=dtype))
        with pytest.raises(IndexError, match=r"is outside \[0, 10\)"):
            sparsekit.Embedding(10, 2, **keywords)(T(ids, dtype=dtype))
    if mode == "sum":
        with pytest.raises(IndexError, match=r"is outside \[0, 10\)"):
            bag(T(ids), per_sample_weights=torch.randn(1, 2))


def test_dimensions():
    layer = sparsekit.EmbeddingBag(3, 6)
    with pytest.raises(ValueError, match=r"input must be \[n\] with offsets, or \[bags, m\]"):
        layer(torch.zeros(2, 0, 6, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"input must be .* sparsekit\.Embedding takes keys of any"
    ):
        layer(T(1))
    with pytest.raises(ValueError, match="offsets must be 1-D"):
        layer(T([1, 1]), torch.zeros(2, 6, dtype=torch.int64))


@pytest.mark.parametrize("mode", ["mean", "sum", "max"])
def test_illegal_combinations(mode):
    layer = sparsekit.EmbeddingBag(10, 20, mode=mode)
    ids = torch.ones(3, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="offsets must be None for a 2-D input"):
        layer(ids, torch.arange(3))
    with pytest.raises(ValueError, match="a 1-D input needs offsets"):
        layer(ids.view(-1))
    with pytest.raises(ValueError, match=r"offsets must start at 0, but offsets\[0\] is 1"):
        layer(ids.view(-1), T([1, 1, 2]))
    with pytest.raises(ValueError, match="offsets must not decrease"):
        layer(ids.view(-1), T([0, 1, 100]))
    assert len(layer.table) == 0


def test_sample_weights_refused():
    layer = sparsekit.EmbeddingBag(5, 2, mode="sum")
    ids, offsets = T([3, 1, 1, 1, 4, 0]), T([0, 0, 3, 3, 6])
    with pytest.raises(ValueError, match="must have the shape of input"):
        layer(ids, offsets, torch.randn(5))
    with pytest.raises(ValueError, match="must have the shape of input"):
        layer(torch.randint(5, (7, 3)), None, torch.randn(21))
    for mode in ("mean", "max"):
        with pytest.raises(NotImplementedError, match="only there with mode='sum'"):
            sparsekit.EmbeddingBag(5, 2, mode=mode)(ids.view(2, 3), None, torch.randn(2, 3))
    # Weights of another dtype are allowed, unlike in torch on the CPU.
    weights = torch.randn(6, dtype=torch.float64)
    assert torch.equal(layer(ids, offsets, weights), layer(ids, offsets, weights.float()))


@pytest.mark.parametrize("bag_trained", [False, True])
@pytest.mark.parametrize("weights_trained", [False, True])
def test_who_needs_a_gradient(storage, bag_trained, weights_trained):
    theirs = nn.EmbeddingBag(256, 16, mode="sum")
    ours = like(theirs, storage).requires_grad_(bag_trained)
    theirs.requires_grad_(bag_trained)
    ids = torch.arange(1, 5).expand(3, -1)
    each = [torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    outs = []
    for layer, weights in zip((theirs, ours), each, strict=True):
        weights.requires_grad_(weights_trained)
        outs.append(layer(ids, per_sample_weights=weights.softmax(-1)))
    assert_close(outs[1], outs[0])
    assert outs[1].requires_grad == outs[0].requires_grad
    if outs[0].requires_grad:
        for out in outs:
            out.sum().backward()
    if weights_trained:
        assert_close(each[1].grad, each[0].grad)
    if bag_trained:
        assert_close(gradient_by_id(ours), theirs.weight.grad)


def trained_with_max_norm(theirs, ours, ids):
    """Check that vectors are scaled to max_norm when read, in training and evaluation."""
    idle = [i for i in range(theirs.num_embeddings) if i not in ids.view(-1).tolist()]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (theirs, ours)]
    start = theirs.weight.detach().clone()
    for step in range(4):
        outs = [layer.train(step != 2)(ids) for layer in (theirs, ours)]
        assert_close(outs[1], outs[0])
        assert_close(ours.vectors(torch.arange(len(start))), theirs.weight.detach())
        for out, optimizer in zip(outs, optimizers, strict=True):
            optimizer.zero_grad()
            out.sin().sum().backward()
            optimizer.step()
        assert torch.equal(ours.vectors(T(idle)), start[idle])
    with torch.no_grad():
        assert_close(ours(ids), theirs(ids))
    assert not torch.equal(theirs.weight, start)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm_type", [2.0, 1, math.inf])
def test_max_norm(storage, norm_type, dtype):
    theirs = nn.Embedding(9, 5, padding_idx=4, max_norm=1.5, norm_type=norm_type, dtype=dtype)
    with torch.no_grad():
        theirs.weight[7] *= 0.1  # below the limit
    ids = T([[7, 2, 2, 6, 2], [4, 2, 0, 7, 2]])
    trained_with_max_norm(theirs, like(theirs, storage), ids)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_max_norm_of_bags(storage, mode):
    theirs = nn.EmbeddingBag(9, 5, max_norm=0.5, mode=mode, padding_idx=1)
    trained_with_max_norm(theirs, like(theirs, storage), T([[7, 2, 2], [1, 0, 7]]))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: sparsekit.Embedding(4, 3, None, 0.0), ValueError, "max_norm must be > 0, got 0.0"),
        (lambda: sparsekit.Embedding(4, 3, max_norm="1"), TypeError, "max_norm must be a number"),
        (
            lambda: sparsekit.EmbeddingBag(4, 3, 1.0, -1),
            ValueError,
            "norm_type must be > 0, got -1",
        ),
        (
            lambda: sparsekit.EmbeddingBag(4, 3, None, 2.0, True),
            NotImplementedError,
            "scale_grad_by_freq=True; leave it out",
        ),
        (
            lambda: sparsekit.Embedding(4, 3, scale_grad_by_freq=True),
            NotImplementedError,
            "keep torch's layer",
        ),
        (
            lambda: sparsekit.Embedding(4, 3, _weight=torch.ones(4, 3)),
            NotImplementedError,
            "from_pretrained",
        ),
        (lambda: sparsekit.Embedding(4, 3, _freeze=True), NotImplementedError, "requires_grad_"),
        (
            lambda: sparsekit.EmbeddingBag(4, 3, _weight=torch.ones(4, 3)),
            NotImplementedError,
            "from_pretrained",
        ),
        (lambda: sparsekit.Embedding(4, 3, dtype=torch.float16), ValueError, "dtype must be one"),
        (lambda: sparsekit.Embedding(-1, 3), ValueError, "num_embeddings must be in"),
        (lambda: sparsekit.Embedding(1, 0), ValueError, "embedding_dim must be in"),
        (lambda: sparsekit.EmbeddingBag(1, 1, mode="last"), ValueError, "mode must be one of sum"),
        (lambda: sparsekit.Embedding(9, 3)(T([1.5])), TypeError, "must be int64 or int32"),
        (lambda: sparsekit.EmbeddingBag(9, 3)([1]), TypeError, "input must be a tensor"),
        (lambda: sparsekit.Embedding(9, 3)([1]), TypeError, "keys must be a tensor"),
    ],
)
def test_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()
